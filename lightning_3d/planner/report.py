# SPDX-License-Identifier: Apache-2.0
"""Reports as tables of text: for terminals, logs and documents."""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_3d.estimator import Layout, MemoryEstimate
from lightning_3d.estimator.memory import CATEGORIES
from lightning_3d.estimator.rank_traffic import rank_traffic
from lightning_3d.estimator.step_time import CAUSES
from lightning_3d.models.parameters import active_parameters, total_parameters
from lightning_3d.planner.rank import PlanReport, RankedPlan
from lightning_3d.units import GIB, format_bytes, format_count, format_seconds

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
AXIS_HEADS = {"dp_replicate": "dp rep", "dp_shard": "dp shard"}
SMALL_SHARE = 0.01
"""Parts of the step below this are not listed."""


def headline(report: PlanReport) -> str:
    """Model, devices and work in one line."""
    shape, workload = report.shape, report.workload
    total, active = total_parameters(shape), active_parameters(shape)
    count = (
        format_count(total) if total == active else f"{format_count(total)} ({format_count(active)} active)"
    )
    batch = (
        f"global batch {workload.global_batch}"
        if workload.global_batch
        else f"batch {workload.batch_per_replica} a replica"
    )
    return (
        f"{shape.name or 'model'}, {count} parameters, on {report.cluster.describe()}"
        f" ({report.cluster.world_size} GPUs), sequence {workload.seq_len}, {batch}, {workload.matmul}"
    )


def layouts_table(report: PlanReport, top: int = 8) -> Table:
    """The best layouts, a row each."""
    table = Table(title=headline(report), title_justify="left", header_style="bold")
    degrees = [axis for axis in AXES if any(getattr(plan.layout, axis) > 1 for plan in report.ranked[:top])]
    for axis in degrees:
        table.add_column(AXIS_HEADS.get(axis, axis), justify="right")
    for head in (
        "micro",
        "schedule",
        "recompute",
        "GiB first",
        "GiB last",
        "bubble",
        "step",
        "tok/s/GPU",
        "MFU",
    ):
        table.add_column(head, justify="left" if head in ("schedule", "recompute") else "right")
    for index, plan in enumerate(report.ranked[:top]):
        table.add_row(*_row(report, plan, degrees), style="bold green" if index == 0 else "")
    return table


def _row(report: PlanReport, plan: RankedPlan, degrees: Sequence[str]) -> list[str]:
    layout = plan.layout
    first, last = report.stage_memory(layout, 0), report.stage_memory(layout, layout.pp - 1)
    microbatches = layout.microbatches(report.workload)
    return [
        *(str(getattr(layout, axis)) for axis in degrees),
        f"{microbatches}x{layout.microbatch_size}",
        schedule_name(layout),
        layout.recompute if layout.offload == "none" else f"{layout.recompute}, offload {layout.offload}",
        f"{first.device_bytes / GIB:.1f}",
        f"{last.device_bytes / GIB:.1f}",
        f"{plan.time.bubble_fraction:.0%}",
        format_seconds(plan.time.step_s),
        f"{plan.tokens_per_s_per_gpu:,.0f}",
        f"{plan.time.mfu:.1%}",
    ]


def schedule_name(layout: Layout) -> str:
    """The schedule with its virtual stages, or a dash without a pipeline."""
    if layout.pp == 1:
        return "-"
    return f"{layout.schedule} v{layout.virtual_stages}" if layout.virtual_stages > 1 else layout.schedule


def memory_table(stages: Sequence[MemoryEstimate]) -> Table:
    """Memory of each stage by category, in GiB; stages between that are alike are left out."""
    table = Table(title="Memory of a rank, GiB", title_justify="left", header_style="bold")
    table.add_column("stage", justify="right")
    for category in CATEGORIES:
        table.add_column(category, justify="right")
    table.add_column("allocated", justify="right")
    table.add_column("device", justify="right")
    offloaded = any(stage.host for stage in stages)
    if offloaded:
        table.add_column("host", justify="right")
    for index, stage in _shown_stages(stages):
        values = [getattr(stage, category) for category in CATEGORIES]
        totals = (stage.allocated_bytes, stage.device_bytes, *([stage.host] if offloaded else []))
        table.add_row(str(index), *(f"{value / GIB:.2f}" for value in (*values, *totals)))
    return table


def _shown_stages(stages: Sequence[MemoryEstimate]) -> list[tuple[int, MemoryEstimate]]:
    if len(stages) <= 4:
        return list(enumerate(stages))
    return [(index, stages[index]) for index in (0, 1, len(stages) - 2, len(stages) - 1)]


def time_table(plan: RankedPlan) -> Table:
    """Where a step's seconds go."""
    table = Table(title="Time of a step", title_justify="left", header_style="bold")
    table.add_column("part")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for cause in CAUSES:
        seconds = getattr(plan.time, cause)
        if seconds > SMALL_SHARE * plan.time.step_s:
            table.add_row(
                cause.removesuffix("_s"), format_seconds(seconds), f"{seconds / plan.time.step_s:.0%}"
            )
    table.add_row("step", format_seconds(plan.time.step_s), "100%", style="bold")
    return table


def traffic_table(report: PlanReport, plan: RankedPlan) -> Table:
    """Bytes that a rank sends on each axis in a step, the link, and communication over computation."""
    table = Table(title="Traffic of a rank in a step", title_justify="left", header_style="bold")
    for head in ("axis", "bytes", "link", "GB/s", "communication / compute"):
        table.add_column(head, justify="left" if head in ("axis", "link") else "right")
    layout, model = plan.layout, report.step_model()
    moved = rank_traffic(report.shape, report.workload, layout, layout.pp // 2)
    groups = model.groups(layout)
    computing = plan.time.compute_s + plan.time.recompute_s
    for axis, num_bytes in moved.items():
        if not num_bytes:
            continue
        group = groups[axis]
        link = "network" if group.crosses else "island" if report.cluster.gpu.has_fast_link else "PCIe"
        ratio = num_bytes / group.bytes_per_s / computing
        table.add_row(axis, format_bytes(num_bytes), link, f"{group.bytes_per_s / 1e9:.0f}", f"{ratio:.2f}")
    return table


def reasons(report: PlanReport) -> Text:
    """Why the first layout was chosen, what to look out for, and why others were not."""
    lines = []
    if report.ranked:
        best = report.best
        lines.append(f"Chosen: {best.layout.describe()}")
        lines += [f"  caution: {caution}" for caution in best.cautions]
    else:
        lines.append(report.nothing_fits())
    lines += [f"Not {refusal.kind}: {refusal.reason}" for refusal in report.refusals]
    return Text("\n".join(lines))


def report_of(report: PlanReport, top: int = 8) -> RenderableType:
    """The whole report as one renderable of rich."""
    if not report.ranked:
        return reasons(report)
    best = report.best
    return Group(
        layouts_table(report, top),
        memory_table(report.stages(best.layout)),
        traffic_table(report, best),
        reasons(report),
    )


def report_text(report: PlanReport, top: int = 4, width: int = 140) -> str:
    """The layouts and reasons as plain text, for a log."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(*([layouts_table(report, top)] if report.ranked else []), reasons(report), sep="\n")
    return capture.get()
