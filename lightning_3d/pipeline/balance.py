# SPDX-License-Identifier: Apache-2.0
"""Splitting blocks over stages so that the heaviest stage is as light as can be."""

from collections.abc import Sequence

from lightning_3d.errors import PlanError


def balance_stages(
    block_costs: Sequence[float], num_stages: int, *, first_cost: float = 0, last_cost: float = 0
) -> list[range]:
    """Assigns each stage a run of blocks, at least one, minimising the cost of the costliest stage.

    Ties leave the earlier stages the lighter ones, since they hold more microbatches in flight.

    Args:
        block_costs: cost of each block, in any unit.
        num_stages: stages to fill.
        first_cost: cost of what the first stage holds besides blocks (the embedding).
        last_cost: cost of what the last stage holds besides blocks (the head).

    Returns:
        One range of block indices a stage.

    Raises:
        PlanError: fewer blocks than stages.

    >>> [len(r) for r in balance_stages([1] * 8, 4)]
    [2, 2, 2, 2]
    >>> [len(r) for r in balance_stages([1] * 8, 2, last_cost=2)]
    [5, 3]
    """
    num_blocks = len(block_costs)
    if num_blocks < num_stages:
        raise PlanError(
            f"{num_stages} pipeline stages need at least as many blocks, but the model has {num_blocks}."
            f" Use at most {num_blocks} stages (pp x virtual_stages)."
        )
    prefix = [0.0]
    for cost in block_costs:
        prefix.append(prefix[-1] + cost)

    def cost_of(stage: int, start: int, stop: int) -> float:
        extra = (first_cost if stage == 0 else 0) + (last_cost if stage == num_stages - 1 else 0)
        return prefix[stop] - prefix[start] + extra

    # best[s][n]: the least possible maximum when the last s stages hold the last n blocks; choice: blocks of the first.
    best: dict[tuple[int, int], tuple[float, float, int]] = {}
    for left in range(1, num_stages + 1):
        stage = num_stages - left
        for blocks in range(left, num_blocks - stage + 1):
            start = num_blocks - blocks
            takes = range(1, blocks - left + 2) if left > 1 else [blocks]
            best[left, blocks] = min(
                _option(cost_of(stage, start, start + take), best.get((left - 1, blocks - take)), take)
                for take in takes
            )
    ranges, start = [], 0
    for left in range(num_stages, 0, -1):
        take = best[left, num_blocks - start][2]
        ranges.append(range(start, start + take))
        start += take
    return ranges


def _option(cost: float, rest: tuple[float, float, int] | None, take: int) -> tuple[float, float, int]:
    """(maximum, sum of squares, blocks taken): the sum of squares evens out the stages below the maximum."""
    if rest is None:
        return cost, cost * cost, take
    return max(cost, rest[0]), cost * cost + rest[1], take
