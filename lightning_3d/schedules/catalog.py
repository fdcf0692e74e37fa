# SPDX-License-Identifier: Apache-2.0
"""Schedules by name, and what each of them allows."""

from functools import lru_cache

from lightning_3d.errors import ScheduleError
from lightning_3d.schedules.builders import (
    check_rounds,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    require_positive,
    rounds_fit,
)
from lightning_3d.schedules.table import Schedule, looped_placement, v_placement
from lightning_3d.schedules.zero_bubble import zbv, zero_bubble

SCHEDULE_NAMES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "zero_bubble", "zbv")
"""What `build_schedule` and `ParallelPlan.schedule` take."""

_FIXED_STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "zero_bubble": 1, "zbv": 2}


def build_schedule(
    name: str, *, num_ranks: int, num_microbatches: int, virtual_stages: int | None = None
) -> Schedule:
    """Build the schedule called `name`.

    Args:
        name: One of `SCHEDULE_NAMES`.
        num_ranks: Pipeline ranks p.
        num_microbatches: Microbatches m of a batch; may be fewer than the stages.
        virtual_stages: Stages on each rank; None takes the least that the schedule is meant for.

    Raises:
        ScheduleError: the name is unknown, or the schedule does not take these numbers.
    """
    v = stages_per_rank(name, virtual_stages)
    check_microbatches(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    return _build(name, num_ranks, num_microbatches, v)


@lru_cache(maxsize=64)  # asked for at every step
def _build(name: str, num_ranks: int, num_microbatches: int, v: int) -> Schedule:
    if name == "gpipe":
        return gpipe(num_ranks, num_microbatches)
    if name == "1f1b":
        return one_f_one_b(num_ranks, num_microbatches)
    if name == "interleaved":
        return interleaved(num_ranks, num_microbatches, v)
    if name == "looped_bfs":
        return looped_bfs(num_ranks, num_microbatches, v)
    if name == "zero_bubble":
        return zero_bubble(num_ranks, num_microbatches)
    return zbv(num_ranks, num_microbatches)


def schedule_for_batch(
    name: str, *, num_ranks: int, num_microbatches: int, virtual_stages: int | None = None
) -> Schedule:
    """Like `build_schedule`, for a batch whose number of microbatches is what it is.

    A number that the schedule does not take gives `looped_bfs` on the same placement of stages: right, with
    more bubble and memory. Meant for a short last batch.
    """
    if is_legal(name, num_ranks=num_ranks, num_microbatches=num_microbatches):
        return build_schedule(
            name, num_ranks=num_ranks, num_microbatches=num_microbatches, virtual_stages=virtual_stages
        )
    placement = stage_placement(name, num_ranks=num_ranks, virtual_stages=virtual_stages)
    return _build_on(placement, num_ranks, num_microbatches)


@lru_cache(maxsize=64)
def _build_on(placement: tuple[int, ...], num_ranks: int, num_microbatches: int) -> Schedule:
    return looped_bfs(num_ranks, num_microbatches, len(placement) // num_ranks, placement)


def stages_per_rank(name: str, virtual_stages: int | None = None) -> int:
    """Stages that `name` puts on each rank.

    Raises:
        ScheduleError: the name is unknown, or the schedule cannot have `virtual_stages` stages on a rank.
    """
    if name not in SCHEDULE_NAMES:
        raise ScheduleError(f"schedule={name!r} is unknown. Use one of {', '.join(SCHEDULE_NAMES)}.")
    fixed = _FIXED_STAGES_PER_RANK.get(name)
    if fixed is None:
        v = 2 if virtual_stages is None else virtual_stages
        require_positive(virtual_stages=v)
        return v
    if virtual_stages not in (None, fixed):
        raise ScheduleError(
            f"virtual_stages={virtual_stages} does not fit schedule={name!r}, which has {fixed} a rank. "
            f"Use virtual_stages={fixed}, or schedule='interleaved'."
        )
    return fixed


def stage_placement(name: str, *, num_ranks: int, virtual_stages: int | None = None) -> tuple[int, ...]:
    """The rank that holds each stage; known before the number of microbatches is."""
    if name == "zbv":
        return v_placement(num_ranks)
    return looped_placement(num_ranks, stages_per_rank(name, virtual_stages))


def check_microbatches(name: str, *, num_ranks: int, num_microbatches: int) -> None:
    """Refuse a number of microbatches that the schedule cannot run, before any process exists.

    Raises:
        ScheduleError: with the allowed numbers.
    """
    require_positive(num_ranks=num_ranks, num_microbatches=num_microbatches)
    if name == "interleaved":
        check_rounds(num_ranks, num_microbatches)


def is_legal(name: str, *, num_ranks: int, num_microbatches: int) -> bool:
    """Whether the schedule takes this number of microbatches."""
    return name != "interleaved" or rounds_fit(num_ranks, num_microbatches)
