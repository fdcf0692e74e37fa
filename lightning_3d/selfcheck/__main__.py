# SPDX-License-Identifier: Apache-2.0
"""`python -m lightning_3d.selfcheck --world 8`: does this installation compute what one process computes?

Alone, it forks 1, 2, 4, ... ranks up to `--world` and checks every legal layout of each. Under torchrun or a cluster's
launcher it checks the layouts of the ranks that were started.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from jsonargparse import auto_cli
from rich.console import Console
from rich.table import Table

from lightning_3d.plan import ParallelPlan
from lightning_3d.selfcheck.launch import (
    be_quiet,
    run_alone,
    run_layout_forked,
    run_layout_here,
    started_world,
)
from lightning_3d.selfcheck.layouts import ALL_CASES, QUICK_CASES, legal_layouts
from lightning_3d.selfcheck.models_table import check_models
from lightning_3d.selfcheck.oracle import Errors, Record, Task
from lightning_3d.selfcheck.resume import check_resume

TOLERANCE = 1e-5
"""Largest relative error that passes, in fp32."""


def main(
    world: int = 8, quick: bool = False, only: str = "", models: bool = False, resume: bool = False
) -> int:
    """Checks that every layout gives the loss, gradients and parameters of one process.

    Args:
        world: most ranks to use when this command starts them itself.
        quick: two cases a layout instead of eight.
        only: check only layouts (with `models`: models) whose description contains this text, such as `pp=2`.
        models: check Hugging Face models, in each axis alone and in all three, instead of every layout.
        resume: save in each of 12 layouts and resume in each of the 12, instead.
    """
    torch.set_num_threads(1)
    be_quiet()
    if models:
        return check_models(only, TOLERANCE)
    if resume:
        return check_resume(only)
    cases = QUICK_CASES if quick else ALL_CASES
    started = started_world()
    references: dict[Task, Record] = {case: run_alone(case) for case in cases}
    sizes = [started] if started else [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= world]
    run = run_layout_here if started else run_layout_forked
    console = Console(quiet=int(os.environ.get("RANK", "0")) > 0, width=None if sys.stdout.isatty() else 110)
    table = Table(title=f"largest relative error over {len(cases)} cases, against one process (fp32)")
    for column in ("ranks", "layout", "schedule", "loss", "gradients", "parameters", "", "s"):
        table.add_column(column, justify="left" if column in ("layout", "schedule") else "right")
    failed = 0
    for plan in _plans(sizes, only):
        start = time.perf_counter()
        try:
            errors = run(plan, cases if plan.schedule == "1f1b" else QUICK_CASES, references)
        except RuntimeError as error:
            console.print(f"[red]{error}[/red]", highlight=False)
            errors = [Errors(float("inf"), float("inf"), float("inf"))]
        passed = all(error.worst <= TOLERANCE for error in errors)
        failed += not passed
        row = _row(plan, errors, passed, time.perf_counter() - start)
        console.print("  ".join(row), highlight=False)
        table.add_row(*row, style="" if passed else "red")
    console.print(table)
    console.print(f"{table.row_count - failed} passed, {failed} failed")
    return 1 if failed or not table.row_count else 0


def _plans(sizes: Sequence[int], only: str) -> Iterator[ParallelPlan]:
    for size in sizes:
        for plan in legal_layouts(size):
            if only in plan.describe():
                yield plan


def _row(plan: ParallelPlan, errors: Sequence[Errors], passed: bool, seconds: float) -> list[str]:
    return [
        str(plan.world_size),
        plan.describe(),
        plan.schedule if plan.size("pp") > 1 else "-",
        *(
            f"{max(getattr(error, name) for error in errors):.1e}"
            for name in ("loss", "gradients", "parameters")
        ),
        "ok" if passed else "FAIL",
        f"{seconds:.0f}",
    ]


if __name__ == "__main__":
    sys.exit(auto_cli(main, as_positional=False))
