# SPDX-License-Identifier: Apache-2.0
"""Plays a schedule on a clock: when each action starts and ends, how long ranks idle, what is in flight."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_3d.errors import ScheduleError
from lightning_3d.schedules.table import Action, ActionKind, Schedule

_F, _B, _I, _W = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
)


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds of each kind of action: one number for every stage, or one for each stage."""

    forward_s: float | tuple[float, ...] = 1.0
    """F."""
    backward_input_s: float | tuple[float, ...] = 1.0
    """I: gradient of the stage's input."""
    backward_weight_s: float | tuple[float, ...] = 1.0
    """W: gradient of the stage's parameters."""
    comm_s: float = 0.0
    """From the end of an action to the moment a stage on another rank may use its result."""

    def of(self, action: Action) -> float:
        """Seconds that `action` takes; B takes I + W."""
        if action.kind is _F:
            return _at(self.forward_s, action.stage)
        if action.kind is _I:
            return _at(self.backward_input_s, action.stage)
        if action.kind is _W:
            return _at(self.backward_weight_s, action.stage)
        return _at(self.backward_input_s, action.stage) + _at(self.backward_weight_s, action.stage)


def _at(seconds: float | tuple[float, ...], stage: int) -> float:
    return seconds[stage] if isinstance(seconds, tuple) else seconds


@dataclass(frozen=True, kw_only=True)
class Span:
    """When one action ran, in seconds from the start of the step."""

    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A schedule that was played."""

    schedule: Schedule
    spans: Mapping[Action, Span]
    """Start and end of every action."""
    makespan_s: float
    """End of the last action."""
    idle_fractions: tuple[float, ...]
    """Of each rank: the share of the makespan in which it computes nothing."""
    peak_in_flight: tuple[int, ...]
    """Of each stage: most microbatches whose activations it holds at once."""

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time that is idle."""
        return sum(self.idle_fractions) / len(self.idle_fractions)


def simulate(schedule: Schedule, durations: Durations | None = None) -> Timeline:
    """Play `schedule`: each rank starts its next action as soon as its inputs are there.

    Raises:
        ScheduleError: the ranks wait for each other for ever.
    """
    times = durations or Durations()
    spans: dict[Action, Span] = {}
    rows = [[a for a in row if a is not None] for row in schedule.actions]
    position = [0] * schedule.num_ranks
    clock = [0.0] * schedule.num_ranks
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                action = row[position[rank]]
                ready_s = _inputs_ready_s(schedule, action, spans, times.comm_s)
                if ready_s is None:
                    break
                start_s = max(clock[rank], ready_s)
                clock[rank] = start_s + times.of(action)
                spans[action] = Span(start_s=start_s, end_s=clock[rank])
                position[rank] += 1
                progress = True
    _check_finished(schedule, rows, position)
    makespan_s = max(clock)
    busy_s = [sum(times.of(a) for a in row) for row in rows]
    return Timeline(
        schedule=schedule,
        spans=spans,
        makespan_s=makespan_s,
        idle_fractions=tuple(1 - busy / makespan_s if makespan_s else 0.0 for busy in busy_s),
        peak_in_flight=peak_in_flight(schedule),
    )


def bubble_fraction(schedule: Schedule, durations: Durations | None = None) -> float:
    """Share of all ranks' time that is idle while `schedule` runs."""
    return simulate(schedule, durations).bubble_fraction


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Of each stage: most microbatches forwarded and not yet through their (weight) backward."""
    live = [0] * schedule.num_stages
    peak = [0] * schedule.num_stages
    for action in (a for row in schedule.actions for a in row if a is not None):
        live[action.stage] += _change(action)
        peak[action.stage] = max(peak[action.stage], live[action.stage])
    return tuple(peak)


def peak_in_flight_of_rank(schedule: Schedule, rank: int) -> int:
    """Most (stage, microbatch) pairs whose activations `rank` holds at once, over all its stages."""
    live = peak = 0
    for action in schedule.actions[rank]:
        live += 0 if action is None else _change(action)
        peak = max(peak, live)
    return peak


def ideal_bubble_fraction(
    name: str, *, num_ranks: int, num_microbatches: int, virtual_stages: int = 1
) -> float:
    """The closed form of a schedule's bubble, for equal stages and free communication, at m >= p.

    `(p-1) / (m+p-1)` for GPipe and 1F1B; `(p-1) / (v*m+p-1)` interleaved and breadth-first (arXiv 2104.04473,
    section 2.2); `(p-1) / (3*m+p-1)` for ZB-H1 at F = I = W (arXiv 2401.10241, section 2.2).

    Raises:
        ScheduleError: no closed form is known for `name`.
    """
    factors = {"gpipe": 1, "1f1b": 1, "interleaved": virtual_stages, "looped_bfs": virtual_stages}
    factors["zero_bubble"] = 3
    if name not in factors:
        raise ScheduleError(f"No closed form for schedule={name!r}. Use one of {sorted(factors)}.")
    return (num_ranks - 1) / (factors[name] * num_microbatches + num_ranks - 1)


def _change(action: Action) -> int:
    return 1 if action.kind is _F else -1 if action.kind.frees_activations else 0


def dependencies(schedule: Schedule, action: Action) -> tuple[tuple[Action, ...], ...]:
    """What must be over before `action` starts: for each input, the actions of which any one gives it."""
    stage, kind, microbatch = action
    if kind is _F:
        return () if stage == 0 else ((Action(stage - 1, _F, microbatch),),)
    if kind is _W:
        return ((Action(stage, _I, microbatch),),)
    own = (Action(stage, _F, microbatch),)
    if stage == schedule.num_stages - 1:
        return (own,)
    return own, (Action(stage + 1, _B, microbatch), Action(stage + 1, _I, microbatch))


def _inputs_ready_s(
    schedule: Schedule, action: Action, spans: Mapping[Action, Span], comm_s: float
) -> float | None:
    """Seconds at which the last input of `action` arrives; None when one is not computed yet."""
    ready_s = 0.0
    rank = schedule.stage_to_rank[action.stage]
    for givers in dependencies(schedule, action):
        giver = next((a for a in givers if a in spans), None)
        if giver is None:
            return None
        is_remote = schedule.stage_to_rank[giver.stage] != rank
        ready_s = max(ready_s, spans[giver].end_s + (comm_s if is_remote else 0.0))
    return ready_s


def _check_finished(schedule: Schedule, rows: Sequence[Sequence[Action]], position: Sequence[int]) -> None:
    stuck = [
        f"rank {rank} waits at {row[at]}"
        for rank, (row, at) in enumerate(zip(rows, position, strict=True))
        if at < len(row)
    ]
    if stuck:
        raise ScheduleError(
            f"Schedule {schedule.name!r} deadlocks: {', '.join(stuck)}. "
            "Order the actions so that each one's inputs are computed before it."
        )
