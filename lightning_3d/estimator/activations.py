# SPDX-License-Identifier: Apache-2.0
"""Activations that the backward of a block needs, per token, and how many microbatches of them are alive.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198),
sections 4 and 5, written out per tensor so that grouped queries, gates, experts and latent attention follow. With
f = 4h, k = a and dropout, the sum is the paper's `34 sbh + 5 a s^2 b`.
"""

from dataclasses import dataclass

from lightning_3d.estimator.layout import FP8_MATMULS, Layout, Workload
from lightning_3d.shape import ModelShape

BYTE = 1
"""Bytes of an 8-bit number."""
HALF = 2
"""Bytes of a 16-bit number."""
FLOAT = 4
"""Bytes of a 32-bit number."""
SCORE_BYTES = 5
"""Bytes a score of unfused attention with dropout: softmax 2, mask 1, dropped softmax 2 (5as^2b of the paper)."""
SCORE_BYTES_NO_DROPOUT = 2


@dataclass(frozen=True, slots=True)
class BlockActivations:
    """Bytes a token of one block, on one rank."""

    replicated: float
    """Tensors around the tensor-parallel regions: norms' inputs and outputs, dropout masks; /t with SP."""
    split: float
    """Tensors inside the regions: queries to attention output, feed-forward; always /t."""
    gathered: float
    """Products' inputs that sequence parallelism gathers and plain PyTorch keeps whole: never divided. 0 with kernels
    that gather them again in the backward (Megatron)."""
    scores: float
    """Attention scores (unfused) or the softmax statistics (flash); always /t."""
    experts: float = 0
    """Inputs, intermediates and outputs of routed experts; /t (their tokens are spread over tp too)."""
    checkpoint: float = 0
    """What full recomputation keeps: the block's input; /t with SP."""
    selected: float = 0
    """What selective recomputation keeps beside it: attention's output and half of the products' outputs; /t."""
    selected_whole: float = 0
    """Of the products' outputs those that are sums over tp (of attention and of the feed-forward): whole on a rank."""


def dense_activations(shape: ModelShape, workload: Workload) -> BlockActivations:
    """Activations of a block with a dense feed-forward, per token, before any division."""
    return _block(shape, workload, shape.intermediate_size, experts=0.0)


def moe_activations(shape: ModelShape, workload: Workload, expert_tp: int = 1) -> BlockActivations:
    """Activations of a block with experts, per token, for balanced routing.

    Each token is K rows in its experts: input and output of width h, and the expert's intermediates. With
    `expert_tp > 1` the rows are gathered over those ranks, and their widths split.
    """
    experts = shape.experts
    if experts is None:
        return dense_activations(shape, workload)
    inner = _mlp(experts.intermediate_size, shape, workload)
    rows = experts.experts_per_token
    routed = rows * (expert_tp * 2 * workload.number_bytes * shape.hidden_size + inner)
    routed += 2 * FLOAT * experts.num_experts
    return _block(shape, workload, experts.shared_intermediate_size, experts=routed)


def _mlp(width: int, shape: ModelShape, workload: Workload) -> float:
    """Bytes that a feed-forward layer keeps: its first product and the activation's output.

    GELU keeps 2f + 2f; a gated one 4f + 2f if fused, and 2f more for the activated half if not. Products below 16
    bits keep their inputs in 8.
    """
    first = (2 if shape.gated_mlp else 1) * workload.number_bytes * width
    unfused = workload.number_bytes * width if shape.gated_mlp and not workload.fused else 0
    return first + _product_input(workload) * width + unfused


def _product_input(workload: Workload) -> int:
    """Bytes of a number that is kept for a weight's gradient alone."""
    return BYTE if workload.matmul in FP8_MATMULS else workload.number_bytes


def _block(shape: ModelShape, workload: Workload, mlp_width: int, experts: float) -> BlockActivations:
    hidden, number = shape.hidden_size, workload.number_bytes
    upcast = FLOAT if shape.rms_norm and not workload.fused else 0
    norms = ((FLOAT if workload.autocast else number) + upcast) * hidden * shape.norms_per_layer
    casts = (3 + (2 if shape.gated_mlp else 1)) if workload.autocast else shape.norms_per_layer
    inputs = _product_input(workload) * hidden * casts
    masks = 2 * hidden if workload.dropout else 0
    qkv = shape.query_width + shape.key_width + shape.value_width
    latent = 0.0
    if shape.latent_attention is not None:
        inner = shape.latent_attention
        latent = 2 * number * (inner.kv_lora_rank + inner.q_lora_rank) + number * inner.qk_rope_head_dim
    split_outputs = qkv + (2 if shape.gated_mlp else 1) * mlp_width
    return BlockActivations(
        replicated=norms + masks + latent + (inputs if workload.fused else 0),
        gathered=0 if workload.fused else inputs,
        split=number * (qkv + shape.attention_output_width) + _mlp(mlp_width, shape, workload),
        scores=_scores(shape, workload),
        experts=experts,
        checkpoint=number * hidden,
        selected=number * (shape.attention_output_width + split_outputs / 2) + experts / 2,
        selected_whole=number * hidden,
    )


def _scores(shape: ModelShape, workload: Workload) -> float:
    heads = shape.num_attention_heads
    if workload.attention == "flash":
        return FLOAT * heads
    per_score = SCORE_BYTES if workload.dropout else SCORE_BYTES_NO_DROPOUT
    return per_score * heads * workload.seq_len


def kept_per_token(block: BlockActivations, layout: Layout) -> float:
    """Bytes a token that a block keeps from its forward to its backward under the layout's recomputation."""
    replicated_by = layout.tp if layout.sequence_parallel else 1
    if layout.recompute == "full":
        return block.checkpoint / replicated_by
    if layout.recompute == "selective":
        return block.checkpoint / replicated_by + block.selected / layout.tp + block.selected_whole
    kept = _all_but_scores(block, layout)
    return kept if layout.recompute == "attention" else kept + block.scores / layout.tp


def _all_but_scores(block: BlockActivations, layout: Layout) -> float:
    replicated_by = layout.tp if layout.sequence_parallel else 1
    return block.replicated / replicated_by + block.gathered + (block.split + block.experts) / layout.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class RankActivations:
    """What recomputation has to choose from on one rank, in bytes of one block over the microbatches in flight."""

    num_blocks: int
    kept: float
    """Of a block that keeps its activations."""
    checkpoint: float
    """Of a block that is recomputed."""
    working_set: float
    """Of the block whose activations are back while its backward runs, once."""

    def peak(self, num_recomputed: int) -> float:
        """Bytes while all microbatches in flight are there and one block is being recomputed."""
        whole = (self.num_blocks - num_recomputed) * self.kept + num_recomputed * self.checkpoint
        return whole + (self.working_set if num_recomputed else 0.0)

    def num_recomputed_within(self, budget_bytes: float) -> int | None:
        """The fewest blocks whose recomputation keeps to a budget; None if all of them do not.

        >>> rank = RankActivations(num_blocks=4, kept=100, checkpoint=10, working_set=50)
        >>> [rank.num_recomputed_within(budget) for budget in (400, 360, 270, 90, 80)]
        [0, 1, 2, 4, None]
        """
        fitting = (k for k in range(self.num_blocks + 1) if self.peak(k) <= budget_bytes)
        return next(fitting, None)


def working_set_per_token(block: BlockActivations, layout: Layout) -> float:
    """Bytes a token that recomputation brings back while one block runs its backward."""
    if layout.recompute == "none":
        return 0.0
    scores = block.scores / layout.tp
    if layout.recompute == "attention":
        return scores
    whole = _all_but_scores(block, layout) + scores
    if layout.recompute == "selective":
        return max(0.0, whole - block.selected / layout.tp - block.selected_whole)
    return whole


def microbatches_in_flight(
    schedule: str, pp: int, rank: int, virtual_stages: int, microbatches: int
) -> float:
    """Microbatches whose activations a pipeline rank holds at its peak, in units of the rank's whole blocks.

    GPipe holds all; 1F1B and zero-bubble (ZB-H1) at most p - i on rank i; interleaved 2(p-i-1) + (v-1)p + 1 chunks
    of 1/v (Narayanan et al. 2021; Qi et al. 2024, tables of peak memory).

    >>> [microbatches_in_flight("1f1b", 4, rank, 1, 16) for rank in range(4)]
    [4, 3, 2, 1]
    >>> microbatches_in_flight("interleaved", 4, 0, 2, 16)
    5.5
    """
    if schedule == "gpipe" or pp == 1:
        return microbatches if pp > 1 else 1
    if schedule == "interleaved":
        chunks = 2 * (pp - rank - 1) + (virtual_stages - 1) * pp + 1
        return min(microbatches * virtual_stages, chunks) / virtual_stages
    return min(microbatches, pp - rank)
