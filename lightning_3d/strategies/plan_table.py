# SPDX-License-Identifier: Apache-2.0
"""One table that says what each rank holds, printed when training starts."""

from lightning.pytorch.utilities import rank_zero_info
from rich.console import Console
from rich.table import Table

from lightning_3d.engine import ParallelModel
from lightning_3d.levers import describe_levers
from lightning_3d.plan import MICROBATCHES_PER_STAGE, ParallelPlan
from lightning_3d.schedules import ideal_bubble_fraction
from lightning_3d.units import format_count

_AXES = {
    "pp": "pipeline stages",
    "dp_replicate": "replicas",
    "dp_shard": "shards of the state",
    "cp": "parts of the sequence",
    "tp": "parts of every layer",
}


def print_plan(plan: ParallelPlan, model: ParallelModel) -> None:
    """Logs the layout and what a rank of each stage holds, from rank 0."""
    console = Console(width=110, color_system=None, force_terminal=False)
    axes = ", ".join(f"{plan.size(axis)} {text}" for axis, text in _AXES.items() if plan.size(axis) > 1)
    title = f"{plan.describe()} over {plan.world_size} ranks" + (f": {axes}" if axes else "")
    table = Table(
        title=title, title_justify="left", title_style="bold", caption=_caption(plan), caption_justify="left"
    )
    for column in ("stage", "blocks", "with", "parameters", "a rank holds"):
        table.add_column(column, justify="right" if column in ("parameters", "a rank holds") else "left")
    for row in _rows(plan, model):
        table.add_row(*row)
    with console.capture() as capture:
        console.print(table)
    rank_zero_info(f"\n{capture.get()}")


def _rows(plan: ParallelPlan, model: ParallelModel) -> list[list[str]]:
    share = plan.size("tp") * plan.size("dp_shard")
    num_blocks = 0 if model.blocks is None else len(model.blocks)
    if model.cut is None:
        counts = [format_count(model.num_parameters), format_count(model.num_parameters / share)]
        return [["all", f"{num_blocks} blocks" if num_blocks else "-", "-", *counts]]
    rows = []
    last = len(model.cut.stages) - 1
    for stage, (blocks, count) in enumerate(zip(model.cut.stages, model.cut.num_parameters, strict=True)):
        around = {0: model.cut.surroundings.first, last: model.cut.surroundings.last}.get(stage, ())
        names = ", ".join(name.rpartition(".")[2] for name in around) or "-"
        span = f"{blocks.start}-{blocks.stop - 1}" if len(blocks) > 1 else str(blocks.start)
        rows.append([str(stage), span, names, format_count(count), format_count(count / share)])
    return rows


def _caption(plan: ParallelPlan) -> str | None:
    return "\n".join([*_bubble(plan), *describe_levers(plan)]) or None


def _bubble(plan: ParallelPlan) -> list[str]:
    pp = plan.size("pp")
    if pp == 1:
        return []
    num = plan.num_microbatches if isinstance(plan.num_microbatches, int) else MICROBATCHES_PER_STAGE * pp
    bubble = ideal_bubble_fraction(
        plan.schedule, num_ranks=pp, num_microbatches=num, virtual_stages=plan.virtual_stages
    )
    return [f"{plan.schedule}, {num} microbatches a batch: a bubble of {bubble:.0%} by theory"]
