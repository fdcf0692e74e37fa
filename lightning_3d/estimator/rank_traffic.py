# SPDX-License-Identifier: Apache-2.0
"""Bytes that one rank sends in a step, by axis, as the engine runs a layout: what `CommTrace` is compared with.

Ring terms: an all-reduce over n ranks sends 2 (n-1)/n of its size, a gather or scatter (n-1)/n, a transfer its message.
Sources: Rajbhandari et al. 2020 (arXiv:1910.02054) section 7 for data, Korthikanti et al. 2022 (arXiv:2205.05198)
section 4 for tensor, Narayanan et al. 2021 (arXiv:2104.04473) section 3 for pipeline parallelism.

[Note: gathers of a stage]
FSDP2 gathers a block where it computes and finds it freed. Under a pipeline it is freed behind a forward
(`reshard_after_forward`) and kept behind a backward, until the last one. So a forward gathers unless a backward came
right before, and a backward gathers if a forward did: m + 1 times for the last stage of 1F1B, not 2 m. What surrounds
the blocks is gathered once a step.
"""

from collections.abc import Iterable

from lightning_3d.estimator.layout import Layout, Workload
from lightning_3d.estimator.states import StageBlocks, rank_parameters, stage_blocks
from lightning_3d.estimator.traffic import TENSOR_COLLECTIVES, TENSOR_COLLECTIVES_AGAIN, traffic
from lightning_3d.models.parameters import dense_block, moe_block
from lightning_3d.schedules import ActionKind, schedule_for_batch
from lightning_3d.shape import ModelShape

ALL_REDUCE = 2
"""An all-reduce is a scatter and a gather."""
EMBEDDING_COLLECTIVES, HEAD_COLLECTIVES = ALL_REDUCE, ALL_REDUCE
"""Of whole hidden states: rows of the embedding summed forward, gradients of the head's input backward."""
BORDER_COLLECTIVES = 1
"""Gather of the sequence behind the last block, and of the gradient before the first, with sequence parallelism."""
LOSS_NUMBERS = 3
"""Of each token, all-reduced in fp32 for the loss over shards of the vocabulary: maximum, sum, target's logit."""
FP32_BYTES = 4


def rank_traffic(
    shape: ModelShape,
    workload: Workload,
    layout: Layout,
    stage: int,
    *,
    num_blocks: int | None = None,
    accumulated: int = 1,
) -> dict[str, float]:
    """Bytes that a rank sends in an optimizer step, by axis.

    Args:
        shape: dimensions of the model.
        workload: batch, sequence and number formats.
        layout: degrees, schedule, sharding.
        stage: pipeline rank, 0 holds the embedding.
        num_blocks: blocks of the rank, if they do not lie evenly.
        accumulated: batches of an optimizer step, each of the workload's size; gradients are reduced once.

    Returns:
        Bytes for `pp`, `dp_replicate`, `dp_shard`, `cp`, `tp` and `ep`; 0 on axes of one rank.
    """
    blocks = stage_blocks(shape, layout.pp)[stage]
    if num_blocks is not None:
        dense = min(num_blocks, round(num_blocks * blocks.dense / max(1.0, blocks.total)))
        blocks = StageBlocks(dense, num_blocks - dense)
    microbatches = layout.microbatches(workload)
    moved = traffic(shape, workload, layout)
    parts = accumulated * microbatches
    over_shards, over_replicas = _data(shape, workload, layout, blocks, stage, accumulated)
    exchanged = moved.expert_exchanges * moved.expert_bytes
    return {
        "pp": _pipeline(shape, workload, layout, stage, parts * moved.pipeline_bytes),
        "dp_replicate": over_replicas,
        "dp_shard": over_shards,
        "cp": _ring(layout.cp) * 3 * moved.context_bytes * blocks.total * parts,
        "tp": _tensor(shape, workload, layout, blocks, stage, parts),
        "ep": _ring(layout.ep) * exchanged * blocks.moe * parts,
    }


def gathers_of_stages(layout: Layout, microbatches: int, stage: int) -> tuple[float, float]:
    """How often a rank gathers its blocks in a step, and what surrounds them. See [Note: gathers of a stage].

    >>> gathers_of_stages(Layout(dp_shard=4), 1, 0)
    (2.0, 1.0)
    >>> gathers_of_stages(Layout(pp=2, dp_shard=2), 4, 1)
    (5.0, 1.0)
    """
    if layout.zero_stage == 0:
        return 0.0, 0.0
    if layout.zero_stage < 3:
        return 1.0, 1.0
    if layout.pp == 1:
        return float(microbatches * (2 if layout.reshard_after_forward else 1)), float(microbatches)
    if not layout.reshard_after_forward or layout.schedule == "zero_bubble":
        return 1.0, 1.0
    schedule = schedule_for_batch(
        layout.schedule,
        num_ranks=layout.pp,
        num_microbatches=microbatches,
        virtual_stages=layout.virtual_stages,
    )
    kinds: dict[int, list[ActionKind]] = {}
    for action in schedule.actions[stage]:
        if action is not None:
            kinds.setdefault(action.stage, []).append(action.kind)
    return sum(map(_gathers, kinds.values())) / len(kinds), 1.0


def _gathers(kinds: Iterable[ActionKind]) -> int:
    count, is_gathered = 0, False
    for kind in kinds:
        count += not is_gathered
        is_gathered = kind is not ActionKind.FORWARD
    return count


def _ring(size: int) -> float:
    return (size - 1) / size


def _pipeline(shape: ModelShape, workload: Workload, layout: Layout, stage: int, hidden: float) -> float:
    """Hidden states to the next stage and gradients to the one before, for each stage of the rank."""
    if layout.pp == 1:
        return 0.0
    stages = range(stage, layout.pp * layout.virtual_stages, layout.pp)
    last = layout.pp * layout.virtual_stages - 1
    messages = sum((each < last) + (each > 0) for each in stages)
    sent = messages * hidden
    if shape.tied_embeddings and layout.pp == 2:  # of more stages, the ends have a group of their own
        table = shape.vocab_size * shape.hidden_size / layout.tp / layout.shard_group
        sent += ALL_REDUCE * _ring(2) * workload.states.gradients * table
    return sent


def _data(
    shape: ModelShape,
    workload: Workload,
    layout: Layout,
    blocks: StageBlocks,
    stage: int,
    accumulated: int,
) -> tuple[float, float]:
    """Bytes over shards, and over replicas."""
    states = workload.states
    counts = rank_parameters(shape, layout, blocks, first=stage == 0, last=stage == layout.pp - 1)
    around, inside = counts.outside, counts.dense - counts.outside
    of_blocks, of_rest = (
        accumulated * gathers for gathers in gathers_of_stages(layout, layout.microbatches(workload), stage)
    )
    shard = _ring(layout.shard_group)
    sent = states.gathered * (of_blocks * inside + of_rest * around) + states.gradients * (inside + around)
    experts = (states.gathered * of_blocks + states.gradients) * counts.experts
    replicated = states.gradients * (inside + around + counts.experts)
    if layout.zero_stage:
        replicated /= layout.shard_group
    return (
        shard * sent + _ring(layout.expert_shard_group) * experts,
        ALL_REDUCE * _ring(layout.dp_replicate) * replicated,
    )


def _tensor(
    shape: ModelShape, workload: Workload, layout: Layout, blocks: StageBlocks, stage: int, parts: int
) -> float:
    """Hidden states of blocks, embedding and head, numbers of the loss, and gradients of replicated parameters."""
    if layout.tp == 1:
        return 0.0
    first, last = stage == 0, stage == layout.pp - 1
    tokens = layout.microbatch_size * workload.seq_len / layout.cp
    hidden = workload.number_bytes * tokens * shape.hidden_size
    again = (
        layout.recompute_fraction * TENSOR_COLLECTIVES_AGAIN
        if layout.recompute in ("full", "selective")
        else 0
    )
    collectives = blocks.total * (TENSOR_COLLECTIVES + again)
    border = BORDER_COLLECTIVES if layout.sequence_parallel else 0
    collectives += (EMBEDDING_COLLECTIVES + border if first else 0) + (
        HEAD_COLLECTIVES + border if last else 0
    )
    loss = ALL_REDUCE * LOSS_NUMBERS * FP32_BYTES * tokens if last and shape.vocab_size else 0
    each_microbatch = collectives * hidden + loss
    replicated = blocks.dense * dense_block(shape).replicated + blocks.moe * moe_block(shape).replicated
    share = layout.shard_group if layout.zero_stage >= 2 else 1
    gradients = ALL_REDUCE * workload.states.gradients * replicated / share if layout.sequence_parallel else 0
    return _ring(layout.tp) * (parts * each_microbatch + gradients)
