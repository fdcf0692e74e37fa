# SPDX-License-Identifier: Apache-2.0
"""Zero-bubble schedules: weight gradients wait until a rank would otherwise be idle.

Source: Zero Bubble Pipeline Parallelism (arXiv 2401.10241): ZB-H1 in section 2.2, ZB-V in section 6. ZB-V's
table is built tick by tick with equal times for F, I and W: at each tick a rank takes the best of what is
ready, so it cannot deadlock. Neither holds more activations than 1F1B does on its first rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from lightning_3d.errors import ScheduleError
from lightning_3d.schedules.builders import require_positive
from lightning_3d.schedules.table import Action, ActionKind, Schedule, looped_placement, v_placement

_F, _I, _W = ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


def zero_bubble(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1: the memory of 1F1B's first rank on every rank, a third of its bubble when F = I = W."""
    require_positive(num_ranks=num_ranks, num_microbatches=num_microbatches)
    return Schedule(
        name="zero_bubble",
        num_stages=num_ranks,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        actions=tuple(tuple(_zb_h1_row(rank, num_ranks, num_microbatches)) for rank in range(num_ranks)),
        stage_to_rank=looped_placement(num_ranks, 1),
    )


def _zb_h1_row(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """1F1B's order with every W `rank` microbatches behind its I: later ranks fill their drain with W."""
    num_warmup = min(num_microbatches, num_ranks - rank) - 1
    yield from (Action(rank, _F, m) for m in range(num_warmup))
    for microbatch in range(num_microbatches):
        if microbatch + num_warmup < num_microbatches:
            yield Action(rank, _F, microbatch + num_warmup)
        yield Action(rank, _I, microbatch)
        if microbatch >= rank:
            yield Action(rank, _W, microbatch - rank)
    yield from (Action(rank, _W, m) for m in range(max(0, num_microbatches - rank), num_microbatches))


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: two stages a rank, placed down and up again, so the first rank also holds the last stage."""
    require_positive(num_ranks=num_ranks, num_microbatches=num_microbatches)
    placement = v_placement(num_ranks)
    ranks = [_Rank(r, (r, 2 * num_ranks - 1 - r)) for r in range(num_ranks)]
    num_actions = 3 * num_microbatches * len(placement)
    done: set[Action] = set()
    while len(done) < num_actions:
        chosen = [_choose(rank, done, num_ranks, num_microbatches) for rank in ranks]
        if not any(chosen):
            raise ScheduleError(
                f"zbv found no order for num_ranks={num_ranks}, num_microbatches={num_microbatches}. "
                "Use schedule='1f1b'."
            )
        for rank, action in zip(ranks, chosen, strict=True):
            if action is not None:
                rank.take(action)
                done.add(action)
    return Schedule(
        name="zbv",
        num_stages=len(placement),
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        actions=tuple(tuple(rank.row) for rank in ranks),
        stage_to_rank=placement,
    )


@dataclass
class _Rank:
    """What one rank has done so far."""

    index: int
    stages: tuple[int, int]
    """The stage on the way down, then the one on the way up."""
    row: list[Action] = field(default_factory=list)
    num_done: dict[tuple[int, ActionKind], int] = field(default_factory=dict)

    def count(self, stage: int, kind: ActionKind) -> int:
        return self.num_done.get((stage, kind), 0)

    def take(self, action: Action) -> None:
        self.row.append(action)
        self.num_done[action.stage, action.kind] = action.microbatch + 1

    @property
    def num_in_flight(self) -> int:
        """(stage, microbatch) pairs whose activations the rank holds."""
        return sum(self.count(s, _F) - self.count(s, _W) for s in self.stages)


def _choose(rank: _Rank, done: set[Action], num_ranks: int, num_microbatches: int) -> Action | None:
    """The best ready action: what others wait for first (I, then F), W to fill what is left."""
    for kind in (_I, _F, _W):
        for stage in reversed(rank.stages):
            action = Action(stage, kind, rank.count(stage, kind))
            if action.microbatch >= num_microbatches or not _ready(action, done, 2 * num_ranks):
                continue
            if kind is not _F or _fits(rank, stage, num_ranks):
                return action
    return None


def _ready(action: Action, done: set[Action], num_stages: int) -> bool:
    stage, kind, microbatch = action
    if kind is _F:
        return stage == 0 or Action(stage - 1, _F, microbatch) in done
    if kind is _W:
        return Action(stage, _I, microbatch) in done
    own = Action(stage, _F, microbatch) in done
    return own and (stage == num_stages - 1 or Action(stage + 1, _I, microbatch) in done)


def _fits(rank: _Rank, stage: int, num_ranks: int) -> bool:
    """Whether one more forward keeps to the memory limit, with room for what must follow it."""
    down, up = rank.stages
    if stage == up:
        return rank.num_in_flight < 2 * num_ranks
    # A forward of the way down brings one of the way up with it: both must fit.
    num_to_come = rank.count(down, _F) - rank.count(up, _F)
    fits_both = rank.num_in_flight + num_to_come + 2 <= 2 * num_ranks
    return fits_both and num_to_come < 2 * (num_ranks - rank.index) - 1
