# SPDX-License-Identifier: Apache-2.0
"""Exact parameter counts, of a whole model, of a stage and of a rank.

Sources: the GPT count `N = L(12h^2 + 13h) + Vh + sh + 2h` (BigScience), and `theoretical_memory_usage.py` of
Megatron-LM for grouped queries, gated feed-forwards, experts and latent attention.
"""

from dataclasses import dataclass
from functools import lru_cache

from lightning_3d.shape import ExpertShape, LatentAttentionShape, ModelShape

GATED_MATRICES, PLAIN_MATRICES = 3, 2


@dataclass(frozen=True, slots=True)
class BlockParameters:
    """Parameters of one block, by how tensor and expert parallelism treat them."""

    split: int
    """Matrices (and column biases) that tensor parallelism divides."""
    replicated: int
    """Norms, row biases, routers and latent down-projections: whole on every tensor-parallel rank."""
    experts: int = 0
    """Routed experts: divided over expert (and expert-tensor) ranks."""

    @property
    def total(self) -> int:
        """All parameters of the block."""
        return self.split + self.replicated + self.experts


def mlp_matrices(shape: ModelShape) -> int:
    """Matrices of a feed-forward layer: three with a gate, two without."""
    return GATED_MATRICES if shape.gated_mlp else PLAIN_MATRICES


@lru_cache(maxsize=256)
def dense_block(shape: ModelShape) -> BlockParameters:
    """Parameters of a block with a dense feed-forward layer."""
    attention_split, attention_replicated = _attention(shape)
    hidden, width = shape.hidden_size, shape.intermediate_size
    split = mlp_matrices(shape) * hidden * width
    replicated = _norm(shape) * shape.norms_per_layer
    if shape.mlp_bias:
        split += (mlp_matrices(shape) - 1) * width
        replicated += hidden
    replicated += attention_replicated
    split = shape.block_parameters - replicated if shape.block_parameters else attention_split + split
    return BlockParameters(split, replicated)


@lru_cache(maxsize=256)
def moe_block(shape: ModelShape) -> BlockParameters:
    """Parameters of a block with a mixture of experts (the dense block if the model has none)."""
    experts = shape.experts
    if experts is None:
        return dense_block(shape)
    attention_split, attention_replicated = _attention(shape)
    hidden, matrices = shape.hidden_size, mlp_matrices(shape)
    router = hidden * experts.num_experts + (experts.num_experts if experts.router_bias else 0)
    shared = matrices * hidden * experts.shared_intermediate_size
    gate = hidden if experts.shared_gate else 0
    norms = _norm(shape) * shape.norms_per_layer
    return BlockParameters(
        split=attention_split + shared,
        replicated=attention_replicated + norms + router + gate,
        experts=experts.num_experts * one_expert(shape, experts),
    )


def one_expert(shape: ModelShape, experts: ExpertShape) -> int:
    """Parameters of one routed expert."""
    matrices, width = mlp_matrices(shape), experts.intermediate_size
    bias = (matrices - 1) * width + shape.hidden_size if experts.expert_bias else 0
    return matrices * shape.hidden_size * width + bias


def embedding(shape: ModelShape) -> int:
    """Parameters of the token embedding."""
    return shape.vocab_size * shape.hidden_size


def embedding_extras(shape: ModelShape) -> int:
    """Parameters beside the token embedding on the first stage: positions and a norm."""
    positions = shape.learned_positions * shape.hidden_size
    return positions + (_norm(shape) if shape.embedding_norm else 0)


def final_norm(shape: ModelShape) -> int:
    """Parameters of the norm before the head."""
    return _norm(shape) if shape.vocab_size else 0


@lru_cache(maxsize=256)
def total_parameters(shape: ModelShape) -> int:
    """All trained parameters of a model, tied ones counted once; prediction blocks of DeepSeek-V3 left out.

    >>> llama = ModelShape(num_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8,
    ...                    intermediate_size=14336, vocab_size=128256)
    >>> total_parameters(llama)
    8030261248
    """
    dense = shape.num_layers - shape.num_moe_layers
    blocks = dense * dense_block(shape).total + shape.num_moe_layers * moe_block(shape).total
    tables = embedding(shape) * (1 if shape.tied_embeddings else 2)
    return blocks + tables + embedding_extras(shape) + final_norm(shape) + shape.other_parameters


@lru_cache(maxsize=256)
def active_parameters(shape: ModelShape) -> int:
    """Parameters that one token visits: the total with E experts replaced by the K that are chosen."""
    if shape.experts is None:
        return total_parameters(shape)
    idle = shape.experts.num_experts - shape.experts.experts_per_token
    return total_parameters(shape) - shape.num_moe_layers * idle * one_expert(shape, shape.experts)


def _norm(shape: ModelShape) -> int:
    return shape.hidden_size * (1 if shape.rms_norm else 2)


def _attention(shape: ModelShape) -> tuple[int, int]:
    """Parameters of an attention layer that tensor parallelism splits, and those it replicates."""
    if not shape.num_attention_heads:
        return 0, 0
    if shape.latent_attention is not None:
        return _latent_attention(shape, shape.latent_attention)
    hidden, qkv = shape.hidden_size, shape.query_width + shape.key_width + shape.value_width
    split = hidden * qkv + shape.query_width * hidden
    split += qkv if shape.qkv_bias else 0
    split += shape.num_attention_heads if shape.attention_sinks else 0
    return split, shape.qk_norm_size + (hidden if shape.output_bias else 0)


def _latent_attention(shape: ModelShape, latent: LatentAttentionShape) -> tuple[int, int]:
    """Latent attention: down-projections and their norms are replicated, up-projections split by heads."""
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    key_value_up = latent.kv_lora_rank * heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    split = key_value_up + heads * latent.v_head_dim * hidden
    replicated = hidden * (latent.kv_lora_rank + latent.qk_rope_head_dim) + latent.kv_lora_rank
    if latent.q_lora_rank:
        split += latent.q_lora_rank * shape.query_width
        replicated += hidden * latent.q_lora_rank + latent.q_lora_rank
    else:
        split += hidden * shape.query_width
    return split, replicated
