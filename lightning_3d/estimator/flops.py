# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a step: what the model needs, the numerator of MFU.

Conventions (they differ by up to 25 % between tables, so compare tokens/s across sources): a multiply-add is two
operations; the embedding lookup is free, the head is not; attention counts half of the square if causal.
Source: `num_floating_point_operations` of Megatron-LM; Narayanan et al. 2021 (arXiv:2104.04473), equation 3.
"""

from functools import lru_cache

from lightning_3d.models.parameters import mlp_matrices
from lightning_3d.shape import ModelShape

FORWARD_AND_BACKWARD = 3
MULTIPLY_ADD = 2


def attended_tokens(shape: ModelShape, seq_len: int, *, causal: bool) -> float:
    """Keys that a query meets, averaged over a sequence and over the blocks."""
    full = seq_len / 2 if causal else seq_len
    if not shape.num_sliding_layers or not shape.num_layers:
        return full
    share = shape.num_sliding_layers / shape.num_layers
    return share * min(full, shape.sliding_window) + (1 - share) * full


@lru_cache(maxsize=256)
def attention_projections(shape: ModelShape) -> int:
    """Weights of the attention's matrix products in one block."""
    if shape.latent_attention is None:
        inputs = shape.query_width + shape.key_width + shape.value_width
        return shape.hidden_size * (inputs + shape.attention_output_width)
    latent, hidden, heads = shape.latent_attention, shape.hidden_size, shape.num_attention_heads
    query = shape.query_width * (latent.q_lora_rank or hidden) + hidden * latent.q_lora_rank
    key_value = hidden * (latent.kv_lora_rank + latent.qk_rope_head_dim)
    key_value += latent.kv_lora_rank * heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    return query + key_value + heads * latent.v_head_dim * hidden


def matmul_weights(shape: ModelShape) -> float:
    """Weights that one token meets in matrix products, the head included and the embedding not."""
    matrices, hidden = mlp_matrices(shape), shape.hidden_size
    dense_layers = shape.num_layers - shape.num_moe_layers
    weights = float(shape.num_layers * attention_projections(shape))
    weights += dense_layers * matrices * hidden * shape.intermediate_size
    if shape.experts is not None:
        inner = shape.experts
        width = inner.experts_per_token * inner.intermediate_size + inner.shared_intermediate_size
        weights += shape.num_moe_layers * hidden * (matrices * width + inner.num_experts)
    return weights + hidden * shape.vocab_size


def recomputed_flops_per_token(
    shape: ModelShape, seq_len: int, recompute: str, *, causal: bool = True
) -> float:
    """Operations that the backward repeats for one token: what HFU counts beside the model's own.

    Args:
        shape: dimensions of the model.
        seq_len: tokens of a sequence.
        recompute: `none`, `attention` (scores alone), `selective` (every second product) or `full` (all blocks; the
            head is not in them).
        causal: attention counts half of the square.

    >>> from lightning_3d.models import load_shape
    >>> shape = load_shape("llama-3-8b")
    >>> again = recomputed_flops_per_token(shape, 8192, "full")
    >>> round(again / model_flops_per_token(shape, 8192), 3)  # a third, less the head's
    0.313
    """
    scores = attended_tokens(shape, seq_len, causal=causal) * (
        shape.query_width + shape.attention_output_width
    )
    attention = MULTIPLY_ADD * shape.num_layers * scores
    products = MULTIPLY_ADD * (matmul_weights(shape) - shape.hidden_size * shape.vocab_size)
    again = {"none": 0.0, "attention": attention, "selective": products / 2}
    return again.get(recompute, attention + products)


def model_flops_per_token(shape: ModelShape, seq_len: int, *, causal: bool = True) -> float:
    """Operations of a forward and a backward for one token.

    >>> from lightning_3d.models import load_shape
    >>> round(model_flops_per_token(load_shape("llama-3-8b"), 8192) / 1e9, 2)
    51.47
    """
    scores = attended_tokens(shape, seq_len, causal=causal) * (
        shape.query_width + shape.attention_output_width
    )
    forward = MULTIPLY_ADD * (matmul_weights(shape) + shape.num_layers * scores)
    return FORWARD_AND_BACKWARD * forward
