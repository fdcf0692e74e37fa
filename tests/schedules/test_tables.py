# SPDX-License-Identifier: Apache-2.0
"""Every schedule over a grid of sizes: legal, within its memory, with the bubble that theory gives."""

import dataclasses

import pytest

from lightning_3d.errors import ScheduleError
from lightning_3d.schedules import (
    SCHEDULE_NAMES,
    Action,
    ActionKind,
    Durations,
    Schedule,
    build_schedule,
    ideal_bubble_fraction,
    in_flight_bound,
    is_legal,
    peak_in_flight,
    schedule_for_batch,
    simulate,
    stage_placement,
    validate,
)

VIRTUAL_STAGES = {"interleaved": (1, 2, 3), "looped_bfs": (1, 2)}
CASES = [(name, v) for name in SCHEDULE_NAMES for v in VIRTUAL_STAGES.get(name, (None,))]
CLOSED_FORM = [case for case in CASES if case[0] != "zbv"]
DURATIONS = [
    Durations(),
    Durations(forward_s=0.7, backward_input_s=1.1, backward_weight_s=0.4),
]


@pytest.mark.parametrize(("name", "v"), CASES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_table_is_valid_and_within_its_memory_bound(name: str, v: int | None, num_ranks: int) -> None:
    for num_microbatches in range(1, 14):
        schedule = schedule_for_batch(
            name, num_ranks=num_ranks, num_microbatches=num_microbatches, virtual_stages=v
        )
        validate(schedule, in_flight_bound(schedule))
        validate(schedule.forward_only())
        assert schedule.stage_to_rank == stage_placement(name, num_ranks=num_ranks, virtual_stages=v)


@pytest.mark.parametrize(("name", "v"), CLOSED_FORM)
@pytest.mark.parametrize("num_ranks", [2, 3, 6])
def test_bubble_has_its_closed_form(name: str, v: int | None, num_ranks: int) -> None:
    durations = DURATIONS[:1] if name == "zero_bubble" else DURATIONS
    for num_microbatches in range(num_ranks, 3 * num_ranks + 1):
        if not is_legal(name, num_ranks=num_ranks, num_microbatches=num_microbatches):
            continue
        schedule = build_schedule(
            name, num_ranks=num_ranks, num_microbatches=num_microbatches, virtual_stages=v
        )
        ideal = ideal_bubble_fraction(
            name, num_ranks=num_ranks, num_microbatches=num_microbatches, virtual_stages=v or 1
        )
        for times in durations:
            assert simulate(schedule, times).bubble_fraction == pytest.approx(ideal)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_zbv_has_no_more_bubble_than_zero_bubble(num_ranks: int) -> None:
    for num_microbatches in (2 * num_ranks, 4 * num_ranks):
        sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
        zbv = simulate(build_schedule("zbv", **sizes)).bubble_fraction
        assert zbv <= simulate(build_schedule("zero_bubble", **sizes)).bubble_fraction


def test_1f1b_reads_as_in_the_paper() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=3)
    assert str(schedule) == "rank 0: 0F0 0F1 0B0 0F2 0B1 0B2\nrank 1: 1F0 1B0 1F1 1B1 1F2 1B2"


def test_in_flight_microbatches_by_stage() -> None:
    assert peak_in_flight(build_schedule("1f1b", num_ranks=4, num_microbatches=8)) == (4, 3, 2, 1)
    assert peak_in_flight(build_schedule("gpipe", num_ranks=4, num_microbatches=8)) == (8, 8, 8, 8)
    assert max(peak_in_flight(build_schedule("zero_bubble", num_ranks=4, num_microbatches=8))) == 4


def test_short_batch_of_interleaved_keeps_the_placement() -> None:
    short = schedule_for_batch("interleaved", num_ranks=4, num_microbatches=9, virtual_stages=2)
    assert short.name == "looped_bfs"
    assert short.stage_to_rank == (0, 1, 2, 3) * 2
    assert schedule_for_batch("zbv", num_ranks=2, num_microbatches=1).stage_to_rank == (0, 1, 1, 0)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("interleaved", {"num_microbatches": 9}, "Use 8 or 10, or any multiple of 4"),
        ("1f1b", {"num_microbatches": 0}, "num_microbatches=0 must be at least 1"),
        ("1f1b", {"num_microbatches": 8, "virtual_stages": 2}, "Use virtual_stages=1"),
        ("zbv", {"num_microbatches": 8, "virtual_stages": 3}, "Use virtual_stages=2"),
        ("2f2b", {"num_microbatches": 8}, "Use one of gpipe, 1f1b"),
    ],
)
def test_refusals_name_what_is_allowed(name: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build_schedule(name, num_ranks=4, **sizes)


def test_per_stage_durations_and_communication_lengthen_the_step() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    assert simulate(schedule).makespan_s == 9  # (2 + 1) * (1 + 2)
    assert simulate(schedule, Durations(comm_s=0.5)).makespan_s == 10
    slow_last = Durations(forward_s=(1.0, 2.0), backward_input_s=(1.0, 2.0), backward_weight_s=(1.0, 2.0))
    timeline = simulate(schedule, slow_last)
    assert timeline.makespan_s == 1 + 12 + 2
    assert timeline.idle_fractions == pytest.approx((9 / 15, 3 / 15))


def _replaced(schedule: Schedule, rank: int, row: str) -> Schedule:
    rows = list(schedule.actions)
    rows[rank] = tuple(Action.parse(text) for text in row.split())
    return dataclasses.replace(schedule, actions=tuple(rows))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("1F0 1B0 1F1 1B1 1F1", "1F1 is 2 times"),
        ("1F0 1B0 1F1", "Stage 1 has F for microbatch 1"),
        ("1F0 1B0 1B1 1F1", "1B1 comes before 1F1"),
        ("1F0 1B0 1F1 1I1", "Stage 1 has F, I for microbatch 1"),
        ("1F0 1B0 0F1 1B1", "0F1 is on rank 1"),
        ("1F1 1B1 1F0 1B0", "deadlocks: rank 0 waits at 0B0, rank 1 waits at 1F1"),
    ],
)
def test_broken_tables_are_refused(row: str, message: str) -> None:
    sizes = {"num_ranks": 2, "num_microbatches": 2}
    schedule = _replaced(build_schedule("1f1b", **sizes), 0, "0F0 0B0 0F1 0B1")
    validate(schedule)
    with pytest.raises(ScheduleError, match=message):
        validate(_replaced(schedule, 1, row))


def test_memory_bound_is_checked() -> None:
    schedule = build_schedule("gpipe", num_ranks=2, num_microbatches=4)
    with pytest.raises(ScheduleError, match="Rank 0 of schedule 'gpipe' holds 4 microbatches at once, not 2"):
        validate(schedule, (2, 4))


def test_actions_are_printed_and_read_back() -> None:
    action = Action(12, ActionKind.BACKWARD_WEIGHT, 3)
    assert str(action) == "12W3"
    assert Action.parse("12W3") == action
    with pytest.raises(ScheduleError, match="as in 2F0"):
        Action.parse("F0")
