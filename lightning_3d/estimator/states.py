# SPDX-License-Identifier: Apache-2.0
"""Parameters, gradients and optimizer state: counts of each stage and rank, and their bytes under each sharding."""

from dataclasses import dataclass

from lightning_3d.estimator.layout import Layout, StateBytes
from lightning_3d.models.parameters import (
    dense_block,
    embedding,
    embedding_extras,
    final_norm,
    moe_block,
)
from lightning_3d.shape import ModelShape

VOCAB_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of 128 x tp (`make-vocab-size-divisible-by`)."""


def zero_bytes(states: StateBytes, zero_stage: int, shard_group: int) -> float:
    """Bytes a parameter under a ZeRO stage (arXiv:1910.02054, section 3).

    >>> from lightning_3d.estimator.layout import STATE_BYTES
    >>> [zero_bytes(STATE_BYTES["zero"], stage, 64) for stage in (0, 1, 2, 3)]
    [16.0, 4.1875, 2.21875, 0.25]
    """
    whole, sharded = 0.0, 0.0
    for stage, part in ((3, states.parameters), (2, states.gradients), (1, states.optimizer)):
        if zero_stage >= stage:
            sharded += part
        else:
            whole += part
    return whole + sharded / shard_group


@dataclass(frozen=True, slots=True)
class StageBlocks:
    """Blocks of one pipeline stage (all virtual stages of a rank together)."""

    dense: float
    moe: float

    @property
    def total(self) -> float:
        """Blocks of the stage."""
        return self.dense + self.moe


def stage_blocks(shape: ModelShape, pp: int) -> list[StageBlocks]:
    """How blocks lie on pipeline ranks: even runs, with the odd ones early; a model's dense blocks come first.

    The last stages get fewer blocks, as they hold the head.

    >>> from lightning_3d.models import load_shape
    >>> [int(stage.total) for stage in stage_blocks(load_shape("llama-3.1-405b"), 4)]
    [32, 32, 31, 31]
    """
    base, odd = divmod(shape.num_layers, pp)
    counts = [base + (1 if stage < odd else 0) for stage in range(pp)]
    dense_left = shape.num_layers - shape.num_moe_layers
    stages = []
    for count in counts:
        dense = min(count, dense_left)
        dense_left -= dense
        stages.append(StageBlocks(dense, count - dense))
    return stages


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters that one rank of a stage computes with, before sharding."""

    dense: float
    """All but routed experts; sharded over `dp_shard x cp`."""
    experts: float
    """Routed experts of this rank; sharded over the ranks that hold the same ones."""
    largest_block: float
    """Parameters of the biggest block, which is gathered and freed at once."""
    outside: float
    """Parameters outside the blocks (embedding, head): gathered under the root for the whole step."""
    head: float
    """Parameters of the head, whose gradient is there while all activations still are."""

    @property
    def total(self) -> float:
        """All parameters of the rank."""
        return self.dense + self.experts


def padded_vocab(shape: ModelShape, tp: int, multiple: int = 1) -> int:
    """Vocabulary rows after padding to a multiple of `multiple x tp`."""
    unit = multiple * tp
    return -(-shape.vocab_size // unit) * unit


def rank_parameters(
    shape: ModelShape,
    layout: Layout,
    blocks: StageBlocks,
    *,
    first: bool,
    last: bool,
    vocab_multiple: int = 1,
) -> RankParameters:
    """Parameters of a rank of a stage (Megatron-LM `theoretical_memory_usage.py`).

    Args:
        shape: dimensions of the model.
        layout: tensor and expert degrees.
        blocks: blocks of the stage.
        first: whether the stage has the embedding.
        last: whether the stage has the head; a tied head is a second copy if the stage is not also the first.
        vocab_multiple: padding of the vocabulary.
    """
    tp, dense, moe = layout.tp, dense_block(shape), moe_block(shape)
    per_dense = dense.split / tp + dense.replicated
    per_moe = moe.split / tp + moe.replicated
    experts_per_block = moe.experts / (layout.ep * layout.expert_tp)
    in_blocks = blocks.dense * per_dense + blocks.moe * per_moe
    table = embedding(shape) * padded_vocab(shape, tp, vocab_multiple) / max(1, shape.vocab_size) / tp
    outside = table + embedding_extras(shape) if first else 0.0
    if last:
        outside += final_norm(shape) + shape.other_parameters
        outside += 0 if shape.tied_embeddings and first else table
    return RankParameters(
        dense=in_blocks + outside,
        experts=blocks.moe * experts_per_block,
        largest_block=max(per_dense, per_moe + experts_per_block if blocks.moe else 0),
        outside=outside,
        head=table if last else 0.0,
    )
