# SPDX-License-Identifier: Apache-2.0
"""The model of a row of a table of published runs."""

import re
from collections.abc import Mapping
from dataclasses import replace

from lightning_3d.models import known_models, load_shape
from lightning_3d.models.parameters import total_parameters
from lightning_3d.shape import ModelShape


def number(row: Mapping[str, str], name: str, default: float | None = None) -> float | None:
    """A column as a number; the default if it is empty or text."""
    try:
        return float(row.get(name) or "")
    except ValueError:
        return default


def degree(row: Mapping[str, str], name: str) -> int:
    """A column as a parallel degree; 1 if it is empty."""
    return max(1, int(number(row, name, 1) or 1))


def shape_of_row(row: Mapping[str, str]) -> ModelShape | None:
    """The model: a known one if its name and dimensions say so, else one made of the row's numbers."""
    layers, hidden = number(row, "layers"), number(row, "hidden")
    if not layers or not hidden:
        return None
    experts = number(row, "ep", 1) or 1
    known = _known_shape(row, int(layers), int(hidden))
    if known is not None and (known.experts is not None or _is_near(row, known)):
        return known
    if experts > 1:
        return None
    heads = int(number(row, "heads") or hidden // 128)
    width = number(row, "ffn")
    return _fit_to_parameters(
        row,
        ModelShape(
            num_layers=int(layers),
            hidden_size=int(hidden),
            num_attention_heads=heads,
            num_key_value_heads=int(number(row, "kv_heads") or heads),
            intermediate_size=int(width or 4 * hidden),
            vocab_size=int(number(row, "vocab") or 50304),
            name=row["model"],
        ),
    )


def _is_near(row: Mapping[str, str], shape: ModelShape) -> bool:
    """Whether a known model has the row's size: tables call variants by the same name."""
    printed = number(row, "params_b")
    return printed is None or abs(total_parameters(shape) / 1e9 / printed - 1) < SAME_SIZE


SAME_SIZE = 1e-3
"""Relative difference of counts below which a row's model is the known one of that name."""


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _known_shape(row: Mapping[str, str], layers: int, hidden: int) -> ModelShape | None:
    """A known model whose name is in the row's and whose width is the same; its depth may be cut (proxies)."""
    wanted = _key(row["model"])
    for name in sorted(known_models(), key=len, reverse=True):
        if _key(name) in wanted or wanted in _key(name):
            shape = load_shape(name)
            if shape.hidden_size == hidden and (shape.experts is not None or shape.num_layers == layers):
                return shape if shape.num_layers == layers else replace(shape, num_layers=layers)
    return None


def _fit_to_parameters(row: Mapping[str, str], plain: ModelShape) -> ModelShape:
    """Of the variants that a row does not tell apart (gate, biases, tied head), the one nearest to its printed size."""
    positions = int(number(row, "seq") or 0)
    plain_mlp = replace(plain, gated_mlp=False)
    tied_mlp = replace(plain_mlp, tied_embeddings=True)
    gpt = replace(tied_mlp, rms_norm=False, qkv_bias=True, output_bias=True, mlp_bias=True)
    variants = [
        plain,
        replace(plain, tied_embeddings=True),
        plain_mlp,
        tied_mlp,
        gpt,
        replace(gpt, learned_positions=positions),
        replace(tied_mlp, learned_positions=positions),
    ]
    printed = number(row, "params_b")
    if printed is None:
        return plain_mlp if plain.intermediate_size == 4 * plain.hidden_size else plain
    return min(variants, key=lambda shape: abs(total_parameters(shape) / 1e9 - printed))
