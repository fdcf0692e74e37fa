# SPDX-License-Identifier: Apache-2.0
"""Hugging Face configs (a dict, or any object with `to_dict`) to `ModelShape`.

Names of fields differ between families, and some structure is in a family's code and not in its config. Both are
data here: `_NAMES` below and `families.json`.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from lightning_3d.errors import ModelError
from lightning_3d.shape import ExpertShape, LatentAttentionShape, ModelShape

_FAMILIES = Path(__file__).parent / "families.json"

_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "width": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
    "expert_width": ("moe_intermediate_size", "expert_intermediate_size"),
    "mtp": ("num_nextn_predict_layers",),
}
"""Names of one thing over the families, in the order that they are looked up."""

_DEFAULT_EXPANSION = 4
"""Feed-forward width over hidden size where a config gives none (GPT-2, BLOOM, Falcon)."""


def shape_from_config(config: Any, *, name: str = "") -> ModelShape:
    """The shape that a Hugging Face config describes.

    Args:
        config: the content of a `config.json`, or a config object with `to_dict`. Of a multimodal config, the text
            model is taken.
        name: what to call the model; the config's own `_name_or_path` if empty.

    Raises:
        ModelError: a dimension is missing.
    """
    values: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    if "text_config" in values and _first(values, "layers") is None:
        tied = values.get("tie_word_embeddings")
        values = dict(values["text_config"])
        if tied is not None:
            values.setdefault("tie_word_embeddings", tied)
    family = _families().get(str(values.get("model_type", "llama")), {})
    hidden, heads = _required(values, "hidden"), _required(values, "heads")
    kv_heads = _kv_heads(values, heads)
    head_dim = int(values.get("head_dim") or hidden // heads)
    bias = bool(values.get("attention_bias", False) or values.get("use_bias", False))
    window, num_windowed = _windows(values, _required(values, "layers"))
    return ModelShape(
        name=name or str(values.get("_name_or_path", "")),
        num_layers=_required(values, "layers"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_width(values, family, hidden),
        vocab_size=int(values.get("vocab_size") or 0),
        tied_embeddings=bool(_with_default(values, "tie_word_embeddings", family.get("tied", False))),
        max_seq_len=_first(values, "positions"),
        gated_mlp=family.get("gated_mlp", True),
        rms_norm=family.get("rms_norm", True),
        norms_per_layer=2 if values.get("new_decoder_architecture") else family.get("norms_per_layer", 2),
        qk_norm_size=_qk_norm(values, family, heads, kv_heads, head_dim),
        qkv_bias=family.get("qkv_bias", bias),
        output_bias=family.get("output_bias", bias and "qkv_bias" not in family and _biased_output(values)),
        mlp_bias=family.get("mlp_bias", bool(values.get("mlp_bias", False))),
        attention_sinks=family.get("attention_sinks", False),
        learned_positions=_learned_positions(values, family),
        embedding_norm=family.get("embedding_norm", False),
        sliding_window=window,
        num_sliding_layers=num_windowed,
        num_mtp_layers=_first(values, "mtp") or 0,
        experts=_experts(values, family),
        latent_attention=_latent_attention(values),
    )


@lru_cache(maxsize=1)
def _families() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_FAMILIES.read_text(encoding="utf-8"))
    return content


def _with_default(values: Mapping[str, Any], name: str, default: Any) -> Any:
    value = values.get(name)
    return default if value is None else value


def _first(values: Mapping[str, Any], what: str) -> int | None:
    for name in _NAMES[what]:
        if isinstance(values.get(name), int):
            return int(values[name])
    return None


def _required(values: Mapping[str, Any], what: str) -> int:
    value = _first(values, what)
    if value is None:
        raise ModelError(
            f"the config (model_type={values.get('model_type')!r}) has none of {', '.join(_NAMES[what])}."
            " Add it, or give the dimensions as a ModelShape."
        )
    return value


def _kv_heads(values: Mapping[str, Any], heads: int) -> int:
    if values.get("multi_query") and not values.get("new_decoder_architecture"):
        return 1
    return _first(values, "kv_heads") or heads


def _width(values: Mapping[str, Any], family: Mapping[str, Any], hidden: int) -> int:
    named = values.get(family.get("dense_width", ""))
    ratio = values.get("expansion_ratio", _DEFAULT_EXPANSION)
    return int(named or _first(values, "width") or ratio * hidden)


def _biased_output(values: Mapping[str, Any]) -> bool:
    """GLM's `attention_bias` concerns queries, keys and values alone; Llama's the output too."""
    return values.get("model_type") != "glm4_moe"


def _qk_norm(
    values: Mapping[str, Any], family: Mapping[str, Any], heads: int, kv_heads: int, head_dim: int
) -> int:
    kind = family.get("qk_norm")
    if kind == "without weights" or not values.get("use_qk_norm", kind is not None):
        return 0
    if kind == "head":
        return 2 * head_dim
    return (heads + kv_heads) * head_dim


def _learned_positions(values: Mapping[str, Any], family: Mapping[str, Any]) -> int:
    if not family.get("learned_positions"):
        return 0
    return _required(values, "positions") + int(family.get("position_offset", 0))


def _windows(values: Mapping[str, Any], num_layers: int) -> tuple[int, int]:
    """Window of the sliding-window layers and how many blocks have it; every n-th block sees all tokens."""
    window = values.get("sliding_window")
    if not window or values.get("use_sliding_window") is False:
        return 0, 0
    kinds = values.get("layer_types")
    if kinds:
        return int(window), sum(kind == "sliding_attention" for kind in kinds)
    pattern = values.get("sliding_window_pattern")
    return int(window), num_layers - num_layers // int(pattern) if pattern else num_layers


def _experts(values: Mapping[str, Any], family: Mapping[str, Any]) -> ExpertShape | None:
    num_experts = _first(values, "experts")
    if not num_experts or num_experts == 1:
        return None
    width = int(values.get(family.get("expert_width", "")) or _required(values, "expert_width"))
    shared = values.get(family.get("shared_width", "shared_expert_intermediate_size"))
    shared = shared or int(values.get("n_shared_experts") or 0) * width
    return ExpertShape(
        num_experts=num_experts,
        experts_per_token=_required(values, "top_k"),
        intermediate_size=width,
        shared_intermediate_size=int(shared),
        num_dense_layers=_dense_layers(values, _required(values, "layers")),
        router_bias=family.get("router_bias", False),
        expert_bias=family.get("expert_bias", False),
        shared_gate=family.get("shared_gate", False),
    )


def _dense_layers(values: Mapping[str, Any], num_layers: int) -> int:
    """Blocks without experts: the first k, those that a step skips, or a list."""
    first = int(values.get("first_k_dense_replace") or 0)
    step = int(values.get("interleave_moe_layer_step") or values.get("decoder_sparse_step") or 1)
    listed = len(values.get("mlp_only_layers") or ())
    return first + listed + (num_layers - num_layers // step if step > 1 else 0)


def _latent_attention(values: Mapping[str, Any]) -> LatentAttentionShape | None:
    if not values.get("kv_lora_rank"):
        return None
    return LatentAttentionShape(
        kv_lora_rank=int(values["kv_lora_rank"]),
        qk_nope_head_dim=int(values["qk_nope_head_dim"]),
        qk_rope_head_dim=int(values["qk_rope_head_dim"]),
        v_head_dim=int(values["v_head_dim"]),
        q_lora_rank=int(values.get("q_lora_rank") or 0),
    )
