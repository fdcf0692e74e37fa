# SPDX-License-Identifier: Apache-2.0
"""Memory of each rank, by category: what a layout needs before it is launched.

The estimate is of torch's peak `memory_allocated`; `reserved_bytes` and `device_bytes` add what the allocator's
blocks and the driver take on top.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from lightning_3d.estimator.activations import (
    RankActivations,
    dense_activations,
    kept_per_token,
    microbatches_in_flight,
    moe_activations,
    working_set_per_token,
)
from lightning_3d.estimator.layout import Layout, Workload
from lightning_3d.estimator.states import RankParameters, StageBlocks, rank_parameters, stage_blocks
from lightning_3d.levers import num_recomputed
from lightning_3d.shape import ModelShape
from lightning_3d.units import GIB, MIB

GATHERED_BLOCKS = 2
"""Blocks that FSDP holds unsharded at once: the one that computes and the one that is prefetched."""
REDUCED_BLOCKS = 1
"""Blocks whose whole gradients wait for their reduce-scatter under `zero_stage` 2 and 3."""
FRAMEWORK_BYTES = 75 * MIB
"""cuBLAS workspaces, generators and batches: median residual of the Megatron CI runs (25 to 150 MiB)."""
FRAGMENTATION = 0.06
"""Reserved over allocated, less one: 3 to 10 % without expandable segments."""
MEMORY_MARGIN = 0.95
"""Share of a device's memory that a plan may fill: estimates are a few percent off."""
CONTEXT_BYTES = 1.0 * GIB
"""CUDA context and NCCL's buffers, outside torch's counters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Peak bytes of one rank, by category."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    """Blocks that FSDP holds unsharded, and their gradients before reduction; or autocast's copies of weights."""
    activations: float
    """Kept for the backward, over all microbatches in flight."""
    transient: float
    """The larger of the loss's logits (last stage) and the working set of the block that recomputes its forward."""
    buffers: float
    """Receive buffers of pipeline, context and expert parallelism."""
    framework: float = FRAMEWORK_BYTES
    host: float = 0.0
    """Bytes of the host's memory that offload takes for this rank; not part of the total."""

    @property
    def allocated_bytes(self) -> float:
        """Peak of torch's `memory_allocated`."""
        return sum(getattr(self, name) for name in CATEGORIES)

    @property
    def reserved_bytes(self) -> float:
        """Peak of torch's `memory_reserved`: allocations in blocks, with gaps."""
        return self.allocated_bytes * (1 + FRAGMENTATION)

    @property
    def device_bytes(self) -> float:
        """What `nvidia-smi` shows, and what must fit."""
        return self.reserved_bytes + CONTEXT_BYTES

    @property
    def static_bytes(self) -> float:
        """Parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    def to_dict(self) -> dict[str, float]:
        """Bytes by category, and the totals."""
        values = {name: round(getattr(self, name)) for name in (*CATEGORIES, "host")}
        return {**values, "allocated": round(self.allocated_bytes), "device": round(self.device_bytes)}


CATEGORIES = tuple(field.name for field in fields(MemoryEstimate) if field.name != "host")
"""Categories that add up to the allocated bytes."""


class MemoryModel:
    """Estimates the memory of layouts of one model and workload; dimensions are worked out once."""

    def __init__(self, shape: ModelShape, workload: Workload, *, vocab_multiple: int = 1) -> None:
        self.shape = shape
        self.workload = workload
        self._vocab_multiple = vocab_multiple
        self._dense = dense_activations(shape, workload)
        self._moe = {1: moe_activations(shape, workload)}
        self._parameters: dict[Any, list[tuple[StageBlocks, RankParameters]]] = {}

    def stages(self, layout: Layout) -> list[MemoryEstimate]:
        """The estimate of a rank of every pipeline stage, first stage first."""
        return [self.stage(layout, rank) for rank in range(layout.pp)]

    def peak(self, layout: Layout) -> MemoryEstimate:
        """The estimate of the fullest stage. Only the ends and the second stage can be it."""
        ranks = {0, 1, layout.pp - 1} if layout.pp > 1 else {0}
        return max(
            (self.stage(layout, rank) for rank in ranks), key=lambda estimate: estimate.allocated_bytes
        )

    def stage(self, layout: Layout, rank: int) -> MemoryEstimate:
        """The estimate of a rank of pipeline stage `rank`."""
        blocks, counts = self._stage_parameters(layout)[rank]
        kept, recomputed = self._activations(layout, blocks, rank)
        parameters, gradients, optimizer, gathered, host = self._states(layout, counts)
        return MemoryEstimate(
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            gathered=gathered,
            activations=kept,
            transient=max(recomputed, self._logits(layout) if rank == layout.pp - 1 else 0.0),
            buffers=self._buffers(layout),
            host=host,
        )

    def _stage_parameters(self, layout: Layout) -> list[tuple[StageBlocks, RankParameters]]:
        key = (layout.pp, layout.tp, layout.ep, layout.expert_tp)
        if key not in self._parameters:
            self._parameters[key] = [
                (
                    blocks,
                    rank_parameters(
                        self.shape,
                        layout,
                        blocks,
                        first=stage == 0,
                        last=stage == layout.pp - 1,
                        vocab_multiple=self._vocab_multiple,
                    ),
                )
                for stage, blocks in enumerate(stage_blocks(self.shape, layout.pp))
            ]
        return self._parameters[key]

    def _states(self, layout: Layout, counts: RankParameters) -> tuple[float, float, float, float, float]:
        """Parameter, gradient, optimizer and gathered bytes on the device, and bytes on the host."""
        states, stage = self.workload.states, layout.zero_stage
        sharded = counts.dense / layout.shard_group + counts.experts / layout.expert_shard_group
        parameters = states.parameters * (sharded if stage >= 3 else counts.total)
        gradients = states.gradients * (sharded if stage >= 2 else counts.total)
        optimizer = states.optimizer * (sharded if stage >= 1 else counts.total)
        host = 0.0
        if layout.offload != "none":
            host, optimizer = optimizer, 0.0
            if layout.offload == "parameters":
                host, parameters, gradients = host + parameters + gradients, 0.0, 0.0
        return parameters, gradients, optimizer, self._gathered(layout, counts), host

    def _gathered(self, layout: Layout, counts: RankParameters) -> float:
        streamed = layout.offload == "parameters"  # from the host, over however many ranks they are sharded
        if self.workload.autocast and not streamed:
            return self.workload.number_bytes * (counts.total - counts.outside)
        if not streamed and (layout.zero_stage < 2 or layout.shard_group == 1):
            return 0.0
        states = self.workload.states
        waiting = REDUCED_BLOCKS * counts.largest_block * (states.gathered + states.gradients)
        waiting += counts.head * states.gathered
        if layout.defers_reduction(self.workload):
            waiting = counts.total * states.gradients
        if layout.zero_stage == 2 and not streamed:
            return waiting
        whole = counts.total
        if layout.reshard_after_forward:
            whole = min(whole, GATHERED_BLOCKS * counts.largest_block + counts.outside)
        return states.gathered * whole + waiting

    def _activations(self, layout: Layout, blocks: StageBlocks, rank: int) -> tuple[float, float]:
        """Bytes kept over the microbatches in flight, and the working set of recomputation."""
        tokens = self.tokens(layout)
        in_flight = microbatches_in_flight(
            layout.schedule, layout.pp, rank, layout.virtual_stages, layout.microbatches(self.workload)
        )
        share = self._recomputed_share(layout, blocks, tokens, in_flight)
        kept = share * self._kept(layout, blocks)
        if share < 1:
            kept += (1 - share) * self._kept(replace(layout, recompute="none"), blocks)
        embedded = 0.0
        if rank == 0 and self.workload.dropout:
            embedded = tokens * self.shape.hidden_size / (layout.tp if layout.sequence_parallel else 1)
        block = self._moe_block(layout) if blocks.moe else self._dense
        working_set = working_set_per_token(block, layout) * tokens if share else 0.0
        return (kept * tokens + embedded) * in_flight, working_set

    def _kept(self, layout: Layout, blocks: StageBlocks) -> float:
        """Bytes a token that all blocks of a rank keep."""
        moe = kept_per_token(self._moe_block(layout), layout) if blocks.moe else 0.0
        return blocks.dense * kept_per_token(self._dense, layout) + blocks.moe * moe

    def _recomputed_share(
        self, layout: Layout, blocks: StageBlocks, tokens: float, in_flight: float
    ) -> float:
        """The share of a rank's blocks that are recomputed; all of them where even that exceeds a budget."""
        if layout.recompute != "full" or not blocks.total:
            return 1.0
        if layout.recompute_budget_bytes:
            rank = self.rank_activations(layout, blocks, tokens, in_flight)
            count = rank.num_recomputed_within(layout.recompute_budget_bytes)
            return 1.0 if count is None else count / rank.num_blocks
        chunk = max(1, round(blocks.total / layout.virtual_stages))
        return num_recomputed(chunk, layout.recompute_fraction) / chunk

    def rank_activations(
        self, layout: Layout, blocks: StageBlocks, tokens: float, in_flight: float
    ) -> RankActivations:
        """What recomputing more or fewer blocks of a rank changes.

        Args:
            layout: with any recomputation.
            blocks: of the rank.
            tokens: of a microbatch, before tensor parallelism.
            in_flight: microbatches whose activations the rank holds at its peak.
        """
        none, full = replace(layout, recompute="none"), replace(layout, recompute="full")
        block = self._moe_block(layout) if blocks.moe else self._dense
        return RankActivations(
            num_blocks=round(blocks.total),
            kept=self._kept(none, blocks) / blocks.total * tokens * in_flight,
            checkpoint=self._kept(full, blocks) / blocks.total * tokens * in_flight,
            working_set=working_set_per_token(block, full) * tokens,
        )

    def _moe_block(self, layout: Layout) -> Any:
        if layout.expert_tp not in self._moe:
            self._moe[layout.expert_tp] = moe_activations(self.shape, self.workload, layout.expert_tp)
        return self._moe[layout.expert_tp]

    def tokens(self, layout: Layout) -> float:
        """Tokens of a microbatch on a rank, before tensor parallelism: b s / c."""
        return layout.microbatch_size * self.workload.seq_len / layout.cp

    def _logits(self, layout: Layout) -> float:
        """Logits at the loss: `logits_bytes` each, split over tp, and the head's input."""
        shape, workload = self.shape, self.workload
        per_token = (
            workload.logits_bytes * shape.vocab_size / layout.tp + workload.number_bytes * shape.hidden_size
        )
        return self.tokens(layout) * per_token if shape.vocab_size else 0.0

    def _buffers(self, layout: Layout) -> float:
        """Received hidden states (two, in and out), the ring's second K and V, and the experts' exchange."""
        tokens, shape, number = self.tokens(layout), self.shape, self.workload.number_bytes
        hidden = number * tokens * shape.hidden_size / (layout.tp if layout.sequence_parallel else 1)
        buffers = 2 * hidden if layout.pp > 1 else 0.0
        if layout.cp > 1:
            buffers += 2 * number * tokens * (shape.key_width + shape.value_width) / layout.tp
        if layout.ep > 1 and shape.experts is not None:
            buffers += 2 * number * tokens * shape.experts.experts_per_token * shape.hidden_size / layout.tp
        return buffers
