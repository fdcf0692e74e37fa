# SPDX-License-Identifier: Apache-2.0
"""From a run that does not fit to the levers that make it fit."""

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_3d.advisor.levers import LEVERS, Bound, Lever
from lightning_3d.advisor.run import Failure, RunFacts
from lightning_3d.estimator.memory import MEMORY_MARGIN

SMALL_SAVING = 0.02
"""Share of the peak below which a lever is not worth its place."""
AFTER_FAILURE = 0.9
"""Share of its own estimate that a failed run must come down to, where that is below the limit already."""
MOST_PULLS = 6
"""How often one lever is pulled: a microbatch may be halved several times."""


@dataclass(frozen=True, kw_only=True)
class Advised:
    """One lever, judged."""

    lever: Lever
    saving_bytes: float = 0.0
    """Of the fullest rank's peak, by this lever alone."""
    setting: str = ""
    cost: str = ""
    refusal: str = ""
    """Why it is not there or not worth it; empty if it helps."""
    in_set: bool = False
    """Whether it belongs to the first set that fits."""

    @property
    def helps(self) -> bool:
        """Whether it is worth pulling."""
        return not self.refusal


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to do, in order."""

    run: RunFacts
    failure: Failure | None
    limit_bytes: float
    needed_bytes: float
    """Estimated peak of the fullest rank as it is."""
    bound: Bound
    """What fills it."""
    bound_share: float
    advised: tuple[Advised, ...]
    """All levers in decision order."""
    fitting: RunFacts | None
    """The run with the first set that fits; None if none does."""

    @property
    def best(self) -> RunFacts:
        """The run that fits, else the one that comes closest."""
        return self.fitting or self.closest

    closest: RunFacts

    @property
    def first(self) -> Advised | None:
        """What to do first."""
        helping = [item for item in self.advised if item.helps]
        return next((item for item in helping if item.in_set), helping[0] if helping else None)

    @property
    def saving_bytes(self) -> float:
        """What the set saves."""
        return self.needed_bytes - self.best.needed_bytes()


def advise(run: RunFacts, limit_bytes: float, failure: Failure | None = None) -> Advice:
    """Judges all levers and finds the first set that fits.

    Levers are pulled in decision order, those that lower what fills the rank first; only if those are not enough, all
    of them.

    Args:
        run: as it is.
        limit_bytes: memory of a device.
        failure: what happened, if it did.
    """
    bound, share = bound_of(run, failure)
    usable = limit_bytes * MEMORY_MARGIN
    if failure is not None:  # it failed: whatever the estimate says, less is needed
        usable = min(usable, run.needed_bytes() * AFTER_FAILURE)
    chosen, last, names = run, run, set[str]()
    for lowers in ((bound,), ("activations", "states", "logits")):
        chosen, names = _pull_until(run, usable, lowers)
        if chosen.needed_bytes() < last.needed_bytes():
            last = chosen
        if chosen.needed_bytes() <= usable:
            names = _needed_names(run, usable, lowers, names)
            chosen, _ = _pull_until(run, usable, lowers, names)
            break
    fits = chosen.needed_bytes() <= usable
    judged = tuple(_judge(lever, run, bound, chosen if lever.name in names else None) for lever in LEVERS)
    return Advice(
        run=run,
        failure=failure,
        limit_bytes=limit_bytes,
        needed_bytes=run.needed_bytes(),
        bound=bound,
        bound_share=share,
        advised=judged,
        fitting=chosen if fits else None,
        closest=last,
    )


def bound_of(run: RunFacts, failure: Failure | None = None) -> tuple[Bound, float]:
    """What fills the rank, and its share of the estimated peak; a failure in the optimizer is one of the states."""
    estimate = run.estimate()
    parts: dict[Bound, float] = {
        "activations": estimate.activations + (estimate.transient if run.stage < run.layout.pp - 1 else 0),
        "states": estimate.static_bytes + estimate.gathered,
        "logits": estimate.transient if run.stage == run.layout.pp - 1 else 0.0,
    }
    total = max(1.0, sum(parts.values()))
    bound: Bound = max(parts, key=lambda kind: parts[kind])
    if failure is not None and failure.phase == "optimizer":
        bound = "states"
    return bound, parts[bound] / total


def _needed_names(run: RunFacts, usable: float, lowers: Iterable[Bound], names: set[str]) -> set[str]:
    """Leaves out what a later lever replaced, and costly levers without which the run fits as well.

    Full recomputation replaces the selective one; tensor parallelism may take the ranks of a shard.
    """
    for lever in reversed(LEVERS):
        if lever.name in names:
            all_of_them, _ = _pull_until(run, usable, lowers, names)
            others, _ = _pull_until(run, usable, lowers, names - {lever.name})
            if others == all_of_them or (lever.group > 1 and others.needed_bytes() <= usable):
                names = names - {lever.name}
    return names


def _pull_until(
    run: RunFacts, usable: float, lowers: Iterable[Bound], only: set[str] | None = None
) -> tuple[RunFacts, set[str]]:
    """Pulls levers in order, each as often as it saves something, until the run fits."""
    pulled: set[str] = set()
    for lever in LEVERS:
        if not set(lever.lowers) & set(lowers) or (only is not None and lever.name not in only):
            continue
        for _ in range(MOST_PULLS):
            needed = run.needed_bytes()
            if needed <= usable:
                return run, pulled
            after = lever.pull(run)
            if isinstance(after, str) or needed - after.needed_bytes() < SMALL_SAVING * needed:
                break
            run = after
            pulled.add(lever.name)
    return run, pulled


def _judge(lever: Lever, run: RunFacts, bound: Bound, chosen: RunFacts | None) -> Advised:
    """Judges a lever by itself; what to set is told of the chosen run if it belongs to the set."""
    in_set = chosen is not None
    after = lever.pull(run)
    if isinstance(after, str):
        return Advised(lever=lever, refusal=after, in_set=in_set)
    saving = run.needed_bytes() - after.needed_bytes()
    refusal = ""
    if saving < SMALL_SAVING * run.needed_bytes() and not in_set:
        refusal = "saves next to nothing here"
        if bound not in lever.lowers:
            refusal = f"does not lower {bound}, which fill the rank"
    return Advised(
        lever=lever,
        saving_bytes=saving,
        setting=lever.setting(chosen or after),
        cost=lever.cost(run, after),
        refusal=refusal,
        in_set=in_set,
    )
