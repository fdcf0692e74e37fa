# SPDX-License-Identifier: Apache-2.0
"""One self-contained page of a report: memory of each stage, the rank grid over nodes, and the trade-off of layouts."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from lightning_3d.estimator import Layout, MemoryEstimate
from lightning_3d.estimator.memory import CATEGORIES
from lightning_3d.hardware import Cluster
from lightning_3d.planner import PlanReport
from lightning_3d.planner.report import headline, schedule_name
from lightning_3d.units import GIB

COLORS = ("#4e79a7", "#a0cbe8", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c755f", "#bab0ac")
"""One for each category of memory, and for stages in turn."""
WIDTH = 860
BAR_HEIGHT, BAR_GAP = 22, 6
CELL = 26
SHOWN_NODES = 32
"""Nodes drawn in the rank grid; the others repeat the pattern."""
MARGIN = 60


def write_page(report: PlanReport, path: Path) -> None:
    """Writes the page of a report.

    Raises:
        PlanError: nothing fits.
    """
    best = report.best
    sections = [
        ("Layouts", _layouts(report)),
        ("Memory of each stage", _memory_bars(report.stages(best.layout), report)),
        ("Ranks over nodes", _rank_grid(best.layout, report.cluster)),
        ("Trade-off: memory and speed of layouts", _trade_off(report)),
        ("Why not another", _refusals(report)),
    ]
    body = "\n".join(f"<h2>{escape(title)}</h2>\n{content}" for title, content in sections)
    path.write_text(PAGE.format(title=escape(headline(report)), body=body), encoding="utf-8")


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 900px; margin: 2em auto; color: #222; padding: 0 1em; }}
h1 {{ font-size: 1.2em; }} h2 {{ font-size: 1.05em; margin-top: 2em; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: .2em .7em; text-align: right; border-bottom: 1px solid #ddd; }}
svg text {{ font: 11px system-ui, sans-serif; fill: #222; }}
.best {{ font-weight: bold; }} .key {{ display: inline-block; width: 1em; height: 1em; margin: 0 .3em 0 1em; }}
</style></head><body><h1>{title}</h1>
{body}
</body></html>
"""


def _layouts(report: PlanReport, top: int = 12) -> str:
    heads = ("layout", "schedule", "GiB", "bubble", "step s", "tokens/s/GPU", "MFU")
    rows = [
        (
            plan.layout.describe(),
            schedule_name(plan.layout),
            f"{plan.memory.device_bytes / GIB:.1f}",
            f"{plan.time.bubble_fraction:.0%}",
            f"{plan.time.step_s:.2f}",
            f"{plan.tokens_per_s_per_gpu:,.0f}",
            f"{plan.time.mfu:.1%}",
        )
        for plan in report.ranked[:top]
    ]
    return _table(heads, rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = []
    for index, row in enumerate(rows):
        cells = "".join(f"<td>{escape(text)}</td>" for text in row)
        lines.append(f'<tr class="{"best" if index == 0 else ""}">{cells}</tr>')
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _memory_bars(stages: Sequence[MemoryEstimate], report: PlanReport) -> str:
    """A bar a stage, stacked by category, with the device's memory as a line."""
    limit = report.cluster.gpu.memory_bytes
    longest = max([limit, *(stage.allocated_bytes for stage in stages)])
    scale = (WIDTH - 2 * MARGIN) / longest
    parts = []
    for index, stage in enumerate(stages):
        top, left = index * (BAR_HEIGHT + BAR_GAP), float(MARGIN)
        parts.append(f'<text x="4" y="{top + 15}">stage {index}</text>')
        for color, category in zip(COLORS, CATEGORIES, strict=False):
            value = getattr(stage, category)
            width = value * scale
            title = f"{category} {value / GIB:.2f} GiB"
            parts.append(_rectangle(left, top, width, BAR_HEIGHT, color, title))
            left += width
        parts.append(f'<text x="{left + 4:.1f}" y="{top + 15}">{stage.allocated_bytes / GIB:.1f} GiB</text>')
    height = len(stages) * (BAR_HEIGHT + BAR_GAP) + 16
    line = MARGIN + limit * scale
    parts.append(
        f'<line x1="{line:.1f}" x2="{line:.1f}" y1="0" y2="{height - 16}" stroke="#c00" stroke-dasharray="4"/>'
    )
    parts.append(f'<text x="{line - 60:.1f}" y="{height - 3}">{limit / GIB:.0f} GiB device</text>')
    keys = "".join(
        f'<span class="key" style="background:{color}"></span>{escape(category)}'
        for color, category in zip(COLORS, CATEGORIES, strict=False)
    )
    return f"<p>{keys}</p>{_svg(WIDTH, height, parts)}"


def _rank_grid(layout: Layout, cluster: Cluster) -> str:
    """A row a node, a cell a GPU: the stage by color, the rank on each axis as text."""
    inner = layout.cp * layout.tp
    shown = min(cluster.num_nodes, SHOWN_NODES)
    parts = []
    for node in range(shown):
        parts.append(f'<text x="4" y="{node * CELL + 17}">node {node}</text>')
        for slot in range(cluster.gpus_per_node):
            rank = node * cluster.gpus_per_node + slot
            tp, cp = rank % layout.tp, rank // layout.tp % layout.cp
            dp, pp = rank // inner % layout.dp, rank // (inner * layout.dp)
            title = f"rank {rank}: pp {pp}, dp {dp}, cp {cp}, tp {tp}"
            left = MARGIN + slot * (CELL * 2 + 2)
            parts.append(_rectangle(left, node * CELL, CELL * 2, CELL - 2, COLORS[pp % len(COLORS)], title))
            parts.append(f'<text x="{left + 3}" y="{node * CELL + 16}">p{pp} d{dp} t{tp}</text>')
    rest = (
        f"<p>{cluster.num_nodes - shown} more nodes go on like this.</p>" if shown < cluster.num_nodes else ""
    )
    return _svg(WIDTH, shown * CELL, parts) + rest


def _trade_off(report: PlanReport) -> str:
    """Every ranked layout as a point: memory of its fullest stage, and tokens a second."""
    height = 320
    memories = [plan.memory.device_bytes / GIB for plan in report.ranked]
    speeds = [plan.tokens_per_s_per_gpu for plan in report.ranked]
    limit, fastest = report.cluster.gpu.memory_bytes / GIB, max(speeds)
    parts = [
        f'<line x1="{MARGIN}" y1="{height - 30}" x2="{WIDTH - 20}" y2="{height - 30}" stroke="#888"/>',
        f'<line x1="{MARGIN}" y1="10" x2="{MARGIN}" y2="{height - 30}" stroke="#888"/>',
        f'<text x="{WIDTH - 190}" y="{height - 8}">GiB of the fullest stage (of {limit:.0f})</text>',
        f'<text x="{MARGIN + 4}" y="12">tokens/s/GPU (top {fastest:,.0f})</text>',
    ]
    for index, (memory, speed, plan) in enumerate(zip(memories, speeds, report.ranked, strict=True)):
        left = MARGIN + memory / limit * (WIDTH - MARGIN - 40)
        top = height - 30 - speed / fastest * (height - 60)
        title = escape(f"{plan.layout.describe()}: {memory:.1f} GiB, {speed:,.0f} tokens/s/GPU")
        color = COLORS[4] if index == 0 else COLORS[0]
        parts.append(
            f'<circle cx="{left:.1f}" cy="{top:.1f}" r="5" fill="{color}"><title>{title}</title></circle>'
        )
    return _svg(WIDTH, height, parts)


def _refusals(report: PlanReport) -> str:
    items = [f"<li>{escape(refusal.kind)}: {escape(refusal.reason)}</li>" for refusal in report.refusals]
    items += [f"<li>caution: {escape(caution)}</li>" for caution in report.best.cautions]
    return f"<ul>{''.join(items)}</ul>"


def _rectangle(left: float, top: float, width: float, height: float, color: str, title: str) -> str:
    shape = f'<rect x="{left:.1f}" y="{top}" width="{max(0.0, width):.1f}" height="{height}" fill="{color}">'
    return f"{shape}<title>{escape(title)}</title></rect>"


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}">{"".join(parts)}</svg>'
