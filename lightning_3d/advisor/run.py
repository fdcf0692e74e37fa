# SPDX-License-Identifier: Apache-2.0
"""A run as the estimator sees it, and how it failed: plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightning_3d.estimator import Layout, MemoryEstimate, MemoryModel, Workload
from lightning_3d.shape import ModelShape
from lightning_3d.trace import OUTSIDE


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """One run: model, layout, work and machine."""

    shape: ModelShape
    layout: Layout
    workload: Workload
    """`batch_per_replica` counts the sequences of one optimizer step, or with stages those of one batch."""
    stage: int
    """Pipeline stage of this rank."""
    accumulate: int
    """Batches that are accumulated before a step."""
    precision: str
    """The Trainer's."""
    ranks_per_node: int = 1
    is_cpu: bool = True
    """Whether there is no driver that takes memory of its own."""
    datamodule_has_batch_size: bool = False

    @property
    def batch_size(self) -> int:
        """Sequences of the data loader's batch on each replica."""
        layout = self.layout
        return layout.microbatch_size if layout.pp == 1 else self.workload.batch_per_replica

    def estimate(self) -> MemoryEstimate:
        """What this rank should need."""
        return MemoryModel(self.shape, self.workload).stage(self.layout, self.stage)

    def fullest(self) -> MemoryEstimate:
        """What the fullest rank should need."""
        return MemoryModel(self.shape, self.workload).peak(self.layout)

    def needed_bytes(self) -> float:
        """Peak of the fullest rank: what a device must have, or on a CPU the tensors alone."""
        estimate = self.fullest()
        return estimate.allocated_bytes - estimate.framework if self.is_cpu else estimate.device_bytes

    def with_layout(self, layout: Layout) -> "RunFacts":
        """The run under another layout; the sequences of a step stay, so fewer replicas accumulate more.

        Stages take the batches that were accumulated without them as microbatches of one larger batch.
        """
        kept = self.accumulate if self.layout.pp > 1 and layout.pp > 1 else 1
        step = self.workload.batch_per_replica * self.layout.dp
        if self.layout.pp > 1 and layout.pp == 1:
            step *= self.accumulate
        per_replica = max(1, step // layout.dp)
        accumulate = kept if layout.pp > 1 else max(1, per_replica // layout.microbatch_size)
        workload = replace(
            self.workload, batch_per_replica=per_replica, autocast=uses_autocast(self.precision, layout)
        )
        return replace(self, layout=layout, workload=workload, accumulate=accumulate)


def uses_autocast(precision: str, layout: Layout) -> bool:
    """Whether a mixed precision rests on autocast alone: FSDP has a mixed precision of its own."""
    return precision.endswith("-mixed") and (layout.shard_group == 1 or layout.zero_stage < 3)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Where and when memory ran out."""

    rank: int
    phase: str
    block: str = OUTSIDE
    num_bytes: Mapping[str, float] = field(default_factory=dict)
    """What was alive, by category of a trace; empty if nothing measured it."""
    message: str = ""
