# SPDX-License-Identifier: Apache-2.0
"""The check before training: measure, compare ranks, look again at what seems slow, say what is."""

import time
from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch.distributed as dist

from lightning_3d.errors import LinkError
from lightning_3d.profiling.link_rates import LATENCY, Rates, measure_rates
from lightning_3d.profiling.link_report import Limits, LinkReport
from lightning_3d.profiling.topology import Topology, gather_objects

OnSlow: TypeAlias = Literal["warn", "error"]


def check_links(
    topology: Topology, limits: Limits, slowed_ranks: Mapping[int, float] | None = None
) -> LinkReport:
    """Measures every rank and link; collective over the world, with the same report on every rank.

    Where something seems slow everything is measured once more and the better of both counts: a moment's load is no
    slow link.

    Args:
        topology: groups of this rank, names of all.
        limits: what is slow.
        slowed_ranks: for trying it out: rank -> how many times as long everything takes there.
    """
    start = time.perf_counter()
    slowdown = (slowed_ranks or {}).get(topology.rank, 1.0)
    rates = measure_rates(topology, slowdown)
    report = _gathered(topology, limits, rates, start)
    if report.slow:
        report = _gathered(topology, limits, _better(rates, measure_rates(topology, slowdown)), start)
    return report


def refuse_slow(report: LinkReport, on_slow: OnSlow) -> None:
    """Raises the same error on every rank, if something is slow and that is not to be lived with.

    Raises:
        LinkError: something is slow and `on_slow` is `error`.
    """
    if report.slow and on_slow == "error":
        raise LinkError(
            f"slow: {'; '.join(map(str, report.slow))}. Every rank waits for the slowest. Repair or leave out what is"
            " slow, lower slow_below, or set on_slow='warn'."
        )


def _gathered(topology: Topology, limits: Limits, rates: Rates, start: float) -> LinkReport:
    groups = {axis: tuple(dist.get_process_group_ranks(group)) for axis, group in topology.axes.items()}
    rows = gather_objects((rates, groups))
    return LinkReport(
        names=topology.names,
        stages=topology.stages,
        rates=tuple(row[0] for row in rows),
        groups=tuple(row[1] for row in rows),
        limits=limits,
        seconds=time.perf_counter() - start,
    )


def _better(first: Rates, second: Rates) -> Rates:
    return {
        name: min(value, second[name]) if name.endswith(LATENCY) else max(value, second[name])
        for name, value in first.items()
    }
