# SPDX-License-Identifier: Apache-2.0
"""`lightning-3d check`: are all ranks and links as fast as their peers?"""

import json
import os
from math import prod
from typing import Any

from rich.console import Console

from lightning_3d.errors import PlanError
from lightning_3d.plan import Degree, ParallelPlan

_AXES = ("pp", "dp_replicate", "dp_shard", "tp")


def check(options: Any) -> int:
    """Measures the ranks that a launcher started, or those of this machine; names or refuses what is slow."""
    from lightning_3d.profiling.link_check import refuse_slow
    from lightning_3d.profiling.link_report import Limits
    from lightning_3d.profiling.standalone import Job, check_here, check_started, num_devices, started_world

    started = started_world()
    world, per_node = started or (_own_world(options, num_devices()),) * 2
    job = Job(
        plan=_plan(options).resolve(world, per_node),
        limits=Limits(
            slow_below=options.slow_below, least_tflops=options.least_tflops, least_gb_s=options.least_gb_s
        ),
        slowed_ranks={options.slow_rank: options.slow_times} if options.slow_rank >= 0 else {},
    )
    if options.on_slow not in ("warn", "error"):
        raise PlanError(f"--on-slow {options.on_slow!r} is unknown. Use warn or error.")
    report = check_started(job) if started else check_here(job)
    if int(os.environ.get("RANK", "0")) == 0:
        _show(report, options.json)
    refuse_slow(report, options.on_slow)
    return 0


def _plan(options: Any) -> ParallelPlan:
    degrees: dict[str, Degree] = {axis: options[axis] or "auto" for axis in _AXES}
    return ParallelPlan(**degrees)  # type: ignore[arg-type]  # only degrees are given


def _own_world(options: Any, num_devices: int) -> int:
    """Processes to start: as many as were asked for, as the degrees need, as there are GPUs, or two."""
    needed = prod(options[axis] or 1 for axis in _AXES)
    return options.world or num_devices or max(2, needed)


def _show(report: Any, as_json: bool) -> None:
    from lightning_3d.profiling.link_report import axis_table, rank_table

    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
        return
    console = Console()
    console = console if console.is_terminal else Console(width=120)
    console.print(rank_table(report))
    if report.groups[0]:
        console.print(axis_table(report))
    for slow in report.slow:
        console.print(f"Slow: {slow}.", highlight=False)
    verdict = "all alike" if not report.slow else f"{len(report.slow)} slow"
    ranks = "1 rank" if len(report.names) == 1 else f"{len(report.names)} ranks"
    console.print(f"{ranks} in {report.seconds:.1f} s: {verdict}.", highlight=False)
