# SPDX-License-Identifier: Apache-2.0
"""A pipeline schedule as data: which rank computes what, in which order."""

import re
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from lightning_3d.errors import ScheduleError


class ActionKind(Enum):
    """What one action computes. `BACKWARD` is input and weight gradients together."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    @property
    def sends_gradient(self) -> bool:
        """Whether the previous stage waits for this action's result."""
        return self in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)

    @property
    def frees_activations(self) -> bool:
        """Whether a microbatch's activations are no longer needed on the stage after this action."""
        return self in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


_ACTION_PATTERN = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One computation of one stage on one microbatch, printed as `2F0`: stage 2, forward, microbatch 0."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    def __repr__(self) -> str:
        return str(self)

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read what `str(action)` wrote.

        Raises:
            ScheduleError: `text` is not of the form `2F0`.
        """
        match = _ACTION_PATTERN.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action. Write stage, kind (F, B, I or W) and microbatch, as in 2F0."
            )
        return cls(int(match[1]), ActionKind(match[2]), int(match[3]))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order of work on every pipeline rank for one batch of microbatches.

    Hashable, so that it serves as a cache key. Communication is not part of it: it follows from the order.
    """

    name: str
    """Which builder made it, as in `build_schedule`."""
    num_stages: int
    """Stages over all ranks; stage 0 reads the batch, the last one gives the loss."""
    num_ranks: int
    """Pipeline ranks."""
    num_microbatches: int
    """Microbatches that the batch is cut into."""
    actions: tuple[tuple[Action | None, ...], ...]
    """`actions[rank]`: the rank's work in order. `None` is a slot left free: it orders nothing."""
    stage_to_rank: tuple[int, ...]
    """`stage_to_rank[stage]`: the rank that holds the stage."""

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.num_stages, self.num_ranks, self.num_microbatches, self.actions))

    def __hash__(self) -> int:
        return self._hash

    @property
    def num_stages_per_rank(self) -> int:
        """Stages on one rank: 1 without virtual stages."""
        return self.num_stages // self.num_ranks

    @property
    def has_backward(self) -> bool:
        """Whether any action is a backward one."""
        return any(a is not None and a.kind is not ActionKind.FORWARD for row in self.actions for a in row)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed apart from input gradients (the zero-bubble family)."""
        return any(
            a is not None and a.kind is ActionKind.BACKWARD_WEIGHT for row in self.actions for a in row
        )

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that `rank` holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.stage_to_rank) if holder == rank)

    def forward_only(self) -> "Schedule":
        """The same schedule without its backward actions: for evaluation and prediction."""
        rows = tuple(
            tuple(a for a in row if a is not None and a.kind is ActionKind.FORWARD) for row in self.actions
        )
        return Schedule(
            name=f"{self.name}-forward",
            num_stages=self.num_stages,
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            actions=rows,
            stage_to_rank=self.stage_to_rank,
        )

    def __str__(self) -> str:
        rows = (" ".join("-" if a is None else str(a) for a in row) for row in self.actions)
        return "\n".join(f"rank {rank}: {row}" for rank, row in enumerate(rows))


def looped_placement(num_ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """Stage to rank, round after round: rank 0 of 2 with 2 virtual stages holds stages 0 and 2."""
    return tuple(stage % num_ranks for stage in range(num_ranks * virtual_stages))


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Stage to rank, down and up again: rank 0 of 2 holds stages 0 and 3, the first and the last."""
    down = tuple(range(num_ranks))
    return down + down[::-1]
