# SPDX-License-Identifier: Apache-2.0
"""The classic schedules in closed form: GPipe, 1F1B, interleaved 1F1B, looped breadth-first.

Sources: GPipe (arXiv 1811.06965), 1F1B (PipeDream-Flush, arXiv 2006.09503), interleaved 1F1B (Megatron-LM,
arXiv 2104.04473 section 2.2), looped breadth-first (arXiv 2211.05953).
"""

from collections.abc import Iterator

from lightning_3d.errors import ScheduleError
from lightning_3d.schedules.table import Action, ActionKind, Schedule, looped_placement

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD


def require_positive(**values: int) -> None:
    """Refuse counts below 1.

    Raises:
        ScheduleError: naming the first such value.
    """
    for name, value in values.items():
        if value < 1:
            raise ScheduleError(f"{name}={value} must be at least 1. Use {name}=1 or more.")


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards. Keeps every microbatch's activations; any number of microbatches."""
    schedule = looped_bfs(num_ranks, num_microbatches, virtual_stages=1)
    return _schedule("gpipe", num_ranks, 1, num_microbatches, schedule.actions)


def looped_bfs(
    num_ranks: int,
    num_microbatches: int,
    virtual_stages: int = 1,
    stage_to_rank: tuple[int, ...] | None = None,
) -> Schedule:
    """All microbatches through one local stage, then the next; backward in the reverse order of stages.

    Legal for any number of microbatches and any placement of stages: what a short last batch falls back to.
    """
    require_positive(num_ranks=num_ranks, num_microbatches=num_microbatches, virtual_stages=virtual_stages)
    placement = stage_to_rank or looped_placement(num_ranks, virtual_stages)
    rows = []
    for rank in range(num_ranks):
        stages = [s for s, holder in enumerate(placement) if holder == rank]
        row = [Action(s, _F, m) for s in stages for m in range(num_microbatches)]
        row += [Action(s, _B, m) for s in reversed(stages) for m in range(num_microbatches)]
        rows.append(tuple(row))
    return Schedule(
        name="looped_bfs",
        num_stages=len(placement),
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        actions=tuple(rows),
        stage_to_rank=placement,
    )


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B: rank r holds at most `num_ranks - r` microbatches in flight; any number of microbatches."""
    require_positive(num_ranks=num_ranks, num_microbatches=num_microbatches)
    rows = []
    for rank in range(num_ranks):
        forwards = [Action(rank, _F, m) for m in range(num_microbatches)]
        backwards = [Action(rank, _B, m) for m in range(num_microbatches)]
        num_warmup = min(num_microbatches, num_ranks - rank) - 1
        rows.append(tuple(_warmup_then_pairs(forwards, backwards, num_warmup)))
    return _schedule("1f1b", num_ranks, 1, num_microbatches, tuple(rows))


def interleaved(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
    """1F1B over `virtual_stages` stages a rank: the bubble shrinks by that factor, the traffic grows by it.

    Microbatches go round after round through all local stages. There are `max(1, m // p)` equal rounds.

    Raises:
        ScheduleError: the microbatches do not divide into equal rounds.
    """
    require_positive(num_ranks=num_ranks, num_microbatches=num_microbatches, virtual_stages=virtual_stages)
    check_rounds(num_ranks, num_microbatches)
    num_rounds = max(1, num_microbatches // num_ranks)
    per_round = num_microbatches // num_rounds
    num_chunks = num_microbatches * virtual_stages
    rows = []
    for rank in range(num_ranks):
        stages = [rank + chunk * num_ranks for chunk in range(virtual_stages)]
        forwards = list(_rounds(stages, _F, num_rounds, per_round))
        backwards = list(_rounds(stages[::-1], _B, num_rounds, per_round))
        num_warmup = min(num_chunks - 1, _interleaved_warmup(num_ranks, rank, virtual_stages, per_round))
        rows.append(tuple(_warmup_then_pairs(forwards, backwards, num_warmup)))
    return _schedule("interleaved", num_ranks, virtual_stages, num_microbatches, tuple(rows))


def check_rounds(num_ranks: int, num_microbatches: int) -> None:
    """Refuse a number of microbatches that the interleaved schedule cannot cut into equal rounds.

    Raises:
        ScheduleError: with the nearest allowed numbers.
    """
    if rounds_fit(num_ranks, num_microbatches):
        return
    below = next(m for m in range(num_microbatches, 0, -1) if rounds_fit(num_ranks, m))
    above = next(
        m for m in range(num_microbatches, 2 * num_microbatches + num_ranks) if rounds_fit(num_ranks, m)
    )
    rounds = num_microbatches // num_ranks
    raise ScheduleError(
        f"num_microbatches={num_microbatches} does not divide into the {rounds} rounds of the interleaved "
        f"schedule on {num_ranks} pipeline ranks. Use {below} or {above}, or any multiple of {num_ranks}."
    )


def rounds_fit(num_ranks: int, num_microbatches: int) -> bool:
    """Whether `interleaved` takes this number of microbatches."""
    return num_microbatches >= 1 and num_microbatches % max(1, num_microbatches // num_ranks) == 0


def _interleaved_warmup(num_ranks: int, rank: int, virtual_stages: int, per_round: int) -> int:
    """Forwards before the first forward-backward pair, without virtual stages the same as 1F1B's."""
    if virtual_stages == 1:
        return num_ranks - rank - 1
    return (virtual_stages - 1) * per_round + 2 * (num_ranks - rank - 1)


def _rounds(stages: list[int], kind: ActionKind, num_rounds: int, per_round: int) -> Iterator[Action]:
    for first in range(0, num_rounds * per_round, per_round):
        for stage in stages:
            for microbatch in range(first, first + per_round):
                yield Action(stage, kind, microbatch)


def _warmup_then_pairs(forwards: list[Action], backwards: list[Action], num_warmup: int) -> Iterator[Action]:
    yield from forwards[:num_warmup]
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - num_warmup :]


def _schedule(
    name: str,
    num_ranks: int,
    virtual_stages: int,
    num_microbatches: int,
    rows: tuple[tuple[Action | None, ...], ...],
) -> Schedule:
    return Schedule(
        name=name,
        num_stages=num_ranks * virtual_stages,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        actions=rows,
        stage_to_rank=looped_placement(num_ranks, virtual_stages),
    )
