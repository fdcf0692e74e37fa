# SPDX-License-Identifier: Apache-2.0
"""Rules that a schedule's table must keep before anything runs it."""

from collections import Counter
from collections.abc import Sequence

from lightning_3d.errors import ScheduleError
from lightning_3d.schedules.builders import _interleaved_warmup
from lightning_3d.schedules.simulate import peak_in_flight_of_rank, simulate
from lightning_3d.schedules.table import Action, ActionKind, Schedule

_F, _B, _I, _W = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
)


def validate(schedule: Schedule, max_in_flight: Sequence[int] | None = None) -> None:
    """Check that every action is there once, in a possible order, on its rank, and that nothing can deadlock.

    Args:
        schedule: With backward actions or, all of it, without.
        max_in_flight: For each rank, the most (stage, microbatch) pairs it may hold; None checks no memory.

    Raises:
        ScheduleError: naming the rule and the first action that breaks it.
    """
    _check_placement(schedule)
    _check_each_once(schedule)
    _check_order_on_stage(schedule)
    simulate(schedule)
    if max_in_flight is not None:
        _check_memory(schedule, max_in_flight)


def in_flight_bound(schedule: Schedule) -> tuple[int, ...]:
    """For each rank, the most (stage, microbatch) pairs that a schedule of this name may hold at once."""
    p, m, v = schedule.num_ranks, schedule.num_microbatches, schedule.num_stages_per_rank
    if schedule.name == "1f1b":
        return tuple(min(m, p - rank) for rank in range(p))
    if schedule.name == "interleaved":
        per_round = m // max(1, m // p)
        return tuple(min(m * v, _interleaved_warmup(p, rank, v, per_round) + 1) for rank in range(p))
    if schedule.name in ("zero_bubble", "zbv"):
        return (min(m, p) * v,) * p
    return (m * v,) * p


def _check_placement(schedule: Schedule) -> None:
    counts = Counter(schedule.stage_to_rank)
    even = all(counts[rank] * schedule.num_ranks == schedule.num_stages for rank in range(schedule.num_ranks))
    if len(schedule.stage_to_rank) != schedule.num_stages or not even:
        raise ScheduleError(
            f"stage_to_rank={schedule.stage_to_rank} does not give each of {schedule.num_ranks} ranks "
            f"the same number of the {schedule.num_stages} stages. Place equally many on each."
        )
    if len(schedule.actions) != schedule.num_ranks:
        raise ScheduleError(
            f"The table has {len(schedule.actions)} rows for {schedule.num_ranks} ranks. Give each rank one."
        )
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action is not None and not _is_at_home(schedule, action, rank):
                raise ScheduleError(
                    f"{action} is on rank {rank}, where stage_to_rank={schedule.stage_to_rank} and "
                    f"num_microbatches={schedule.num_microbatches} forbid it. Move it to its stage's rank."
                )


def _is_at_home(schedule: Schedule, action: Action, rank: int) -> bool:
    return (
        0 <= action.stage < schedule.num_stages
        and 0 <= action.microbatch < schedule.num_microbatches
        and schedule.stage_to_rank[action.stage] == rank
    )


def _check_each_once(schedule: Schedule) -> None:
    counts = Counter(a for row in schedule.actions for a in row if a is not None)
    for action, count in counts.items():
        if count > 1:
            raise ScheduleError(f"{action} is {count} times in the table. Every action must be there once.")
    has_backward = schedule.has_backward
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            kinds = {k for k in ActionKind if Action(stage, k, microbatch) in counts}
            allowed = ({_F, _B}, {_F, _I, _W}) if has_backward else ({_F},)
            if kinds not in allowed:
                found = ", ".join(sorted(k.value for k in kinds)) or "nothing"
                rule = "F and B, or F, I and W" if has_backward else "F"
                raise ScheduleError(
                    f"Stage {stage} has {found} for microbatch {microbatch}. Give each stage {rule} of each."
                )


def _check_order_on_stage(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.actions):
        seen: set[Action] = set()
        for action in row:
            if action is None:
                continue
            stage, kind, microbatch = action
            before = {_B: _F, _I: _F, _W: _I}.get(kind)
            if before is not None and Action(stage, before, microbatch) not in seen:
                raise ScheduleError(
                    f"{action} comes before {Action(stage, before, microbatch)} on rank {rank}. Swap them."
                )
            seen.add(action)


def _check_memory(schedule: Schedule, max_in_flight: Sequence[int]) -> None:
    for rank, limit in enumerate(max_in_flight):
        peak = peak_in_flight_of_rank(schedule, rank)
        if peak > limit:
            raise ScheduleError(
                f"Rank {rank} of schedule {schedule.name!r} holds {peak} microbatches at once, not {limit}. "
                "Put backward actions earlier, or allow more memory."
            )
