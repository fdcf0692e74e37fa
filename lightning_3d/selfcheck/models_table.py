# SPDX-License-Identifier: Apache-2.0
"""The table of Hugging Face models and layouts, made by running each cell."""

import sys

from rich.console import Console
from rich.table import Table

from lightning_3d.selfcheck.hugging_face import CLASSIFIERS, DECODERS, LAYOUTS, HuggingFaceTask
from lightning_3d.selfcheck.launch import run_alone, run_layout_forked
from lightning_3d.selfcheck.oracle import Record, Task


def check_models(only: str, tolerance: float) -> int:
    """Trains every model in every layout and prints the largest relative error of loss, gradients and parameters.

    Args:
        only: check only models whose name contains this text.
        tolerance: largest error that passes.

    Returns:
        An exit status: 0 if every cell passed.
    """
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title="largest relative error of loss, gradients and parameters against one process (fp32)")
    table.add_column("model")
    for plan in LAYOUTS:
        table.add_column(plan.describe(), justify="right")
    failed = cells = 0
    for name in (*DECODERS, *CLASSIFIERS):
        if only not in name:
            continue
        task = HuggingFaceTask(name=name)
        references: dict[Task, Record] = {task: run_alone(task)}
        row = [name]
        for plan in LAYOUTS:
            cells += 1
            try:
                worst = run_layout_forked(plan, [task], references)[0].worst
                row.append(f"{worst:.1e}" if worst <= tolerance else f"[red]{worst:.1e}[/red]")
                failed += worst > tolerance
            except RuntimeError as error:
                console.print(f"[red]{name}: {error}[/red]", highlight=False)
                row.append("[red]failed[/red]")
                failed += 1
        console.print("  ".join(row))
        table.add_row(*row)
    console.print(table)
    console.print(f"{cells - failed} passed, {failed} failed")
    return 1 if failed or not cells else 0
