# SPDX-License-Identifier: Apache-2.0
"""The options that trade time for memory, as data: what they may say, and what they mean."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor
from typing import TYPE_CHECKING, Literal, TypeAlias

from lightning_3d.errors import PlanError
from lightning_3d.units import GIB

if TYPE_CHECKING:
    from lightning_3d.plan import ParallelPlan

RecomputeOption: TypeAlias = str | float
"""`none`, `selective`, `full`, a share of the blocks (`0.5`), or a budget (`2GiB`)."""
Offload: TypeAlias = Literal["none", "cpu"]

RECOMPUTE_MODES: Mapping[str, str] = {
    "none": "keep all activations",
    "selective": "keep the results of attention and of half of the matrix products, recompute the rest of each block",
    "full": "keep only the input of each block and recompute the block in the backward",
}

OFFLOADS: Mapping[str, str] = {
    "none": "parameters, gradients and optimizer state on the device",
    "cpu": "parameters, gradients and optimizer state in the host's memory; a block comes to the device to compute",
}

_BUDGET = re.compile(r"([0-9]*\.?[0-9]+)\s*gib", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class RecomputeChoice:
    """What a value of `recompute` means."""

    mode: Literal["none", "selective", "full"]
    fraction: float = 1.0
    """Share of the blocks of each stage to which the mode applies."""
    budget_bytes: float | None = None
    """What activations may take on a rank; the share is then the smallest that keeps to it."""


def parse_recompute(value: object) -> RecomputeChoice:
    """Reads a value of `recompute`.

    Raises:
        PlanError: it is none of the modes, no share from 0 to 1, and no budget.

    >>> parse_recompute(0.25)
    RecomputeChoice(mode='full', fraction=0.25, budget_bytes=None)
    >>> parse_recompute("1.5GiB").budget_bytes / 2**30
    1.5
    """
    if isinstance(value, str) and value in RECOMPUTE_MODES:
        return RecomputeChoice(mode=value)  # type: ignore[arg-type]
    budget = _BUDGET.fullmatch(value.strip()) if isinstance(value, str) else None
    if budget and float(budget[1]) > 0:
        return RecomputeChoice(mode="full", budget_bytes=float(budget[1]) * GIB)
    fraction = _number(value)
    if fraction is not None and 0 <= fraction <= 1:
        return RecomputeChoice(mode="full" if fraction else "none", fraction=fraction or 1.0)
    modes = ", ".join(map(repr, RECOMPUTE_MODES))
    raise PlanError(
        f"recompute={value!r} is unknown. Use one of {modes}, the share of blocks to recompute (0.5), or what a"
        " rank's activations may take ('2GiB')."
    )


def canonical_recompute(value: object) -> str:
    """One text for each meaning: `0.5` and `"0.50"` are the same, `1.0` is `full`.

    >>> [canonical_recompute(value) for value in ("full", 0.5, "0.50", 1, 0.0, "2 gib")]
    ['full', '0.5', '0.5', 'full', 'none', '2GiB']
    """
    choice = parse_recompute(value)
    if choice.budget_bytes is not None:
        return f"{choice.budget_bytes / GIB:.10g}GiB"
    return choice.mode if choice.fraction == 1.0 else str(choice.fraction)


def describe_recompute(value: str) -> str:
    """What a value of `recompute` does, in words."""
    choice = parse_recompute(value)
    if choice.budget_bytes is not None:
        return (
            f"recompute as many blocks as keep a rank's activations within {choice.budget_bytes / GIB:g} GiB"
        )
    if choice.fraction < 1:
        return f"keep only the input of {choice.fraction:.0%} of each stage's blocks, and recompute these"
    return RECOMPUTE_MODES[choice.mode]


def num_recomputed(num_blocks: int, fraction: float) -> int:
    """Blocks of a stage that are recomputed: as near as can be to the share that was asked for, and one at least.

    >>> [num_recomputed(blocks, 0.5) for blocks in (1, 2, 3, 4)]
    [1, 1, 2, 2]
    """
    return min(num_blocks, max(1, floor(fraction * num_blocks + 0.5)))


def spread_evenly(blocks: Sequence[int], count: int) -> frozenset[int]:
    """`count` of the blocks, as far from each other as can be.

    >>> sorted(spread_evenly(range(8), 2)), sorted(spread_evenly(range(4, 8), 3))
    ([3, 7], [5, 6, 7])
    """
    total = len(blocks)
    return frozenset(
        block for index, block in enumerate(blocks) if (index + 1) * count // total > index * count // total
    )


DEFAULT_BACKEND = "inductor"
"""What compiles blocks unless a backend is named."""


def check_values(offload: object, compile_blocks: object, backend: object, float8: object) -> None:
    """Refuses values that no layout has.

    Raises:
        PlanError: an unknown place, a switch that is neither True nor False, or a backend that nothing uses.
    """
    if offload not in OFFLOADS:
        raise PlanError(
            f"offload={offload!r} is unknown. Use one of {', '.join(map(repr, OFFLOADS))}. To offload to NVMe, or the"
            " optimizer alone, use strategy='zero_offload'."
        )
    for name, value in (("compile", compile_blocks), ("float8_all_gather", float8)):
        if not isinstance(value, bool):
            also = " A backend is named by compile_backend." if name == "compile" else ""
            raise PlanError(f"{name}={value!r} is neither True nor False.{also}")
    if not compile_blocks and backend != DEFAULT_BACKEND:
        raise PlanError(f"compile_backend={backend!r} has no effect without compile=True. Set compile=True.")


def check_levers(plan: "ParallelPlan") -> None:
    """Checks the options against the degrees of a resolved plan.

    Raises:
        PlanError: an option cannot work in this layout, or has no effect in it.
    """
    if plan.compile and plan.recompute == "selective" and plan.size("tp") > 1:
        raise PlanError(
            f"compile=True with recompute='selective' and tp={plan.tp}: selective recomputation goes inside the"
            " compiled block, and torch does not compile it around tensor-parallel layers. Use recompute='full' or a"
            " share of the blocks (0.5), compile=False, or tp=1."
        )
    if not plan.float8_all_gather:
        return
    if plan.size("tp") > 1:
        raise PlanError(
            f"float8_all_gather=True with tp={plan.tp}: tensor parallelism multiplies shards by itself, where torchao's"
            " 8-bit layers do not come into play. Use tp=1, or float8_all_gather=False."
        )
    if plan.size("dp_shard") == 1:
        raise PlanError(
            "float8_all_gather=True has no effect with dp_shard=1: no weight is gathered."
            " Use dp_shard >= 2, or float8_all_gather=False."
        )


def describe_levers(plan: "ParallelPlan") -> list[str]:
    """What the options that are in use do, one line each."""
    lines = []
    if plan.recompute != "none":
        lines.append(f"recompute: {describe_recompute(str(plan.recompute))}")
    if plan.offload != "none":
        lines.append(f"offload: {OFFLOADS[plan.offload]}")
    if plan.compile:
        lines.append(f"compile: each block, by {plan.compile_backend}")
    if plan.float8_all_gather:
        lines.append("float8_all_gather: linear layers of the blocks compute and travel in 8 bits")
    return lines


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None
