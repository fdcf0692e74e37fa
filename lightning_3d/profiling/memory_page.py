# SPDX-License-Identifier: Apache-2.0
"""One self-contained page (and a PNG) of the memory traces of a run: timeline, ranks, the peak explained, estimate."""

import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_3d.trace import CATEGORIES, MemoryTrace, SpanTrace
from lightning_3d.units import GIB, KIB, MIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {
    "parameters": "#4e79a7",
    "gradients": "#a0cbe8",
    "optimizer": "#f28e2b",
    "gathered": "#59a14f",
    "activations": "#e15759",
    "temporary": "#b07aa1",
    "buffers": "#9c755f",
}
MOST_RANKS = 64
"""Ranks drawn as bars."""
MOST_BLOCKS = 40
"""Rows of the table of blocks."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; color: #222; padding: 0 1em; }}
h1 {{ font-size: 1.2em; }} h2 {{ font-size: 1.05em; margin-top: 2em; }}
table {{ border-collapse: collapse; }} svg {{ max-width: 100%; height: auto; }}
td, th {{ padding: .2em .7em; text-align: right; border-bottom: 1px solid #ddd; }}
td:first-child, th:first-child {{ text-align: left; }}
</style></head><body><h1>{title}</h1>
{body}
</body></html>
"""


def headline(traces: Sequence[MemoryTrace]) -> str:
    """The peak of all ranks in a sentence."""
    fullest = _fullest(traces)
    span = fullest.fullest
    largest = max(CATEGORIES, key=span.peak.of)
    share = span.peak.of(largest) / max(1, span.peak.total)
    stage = f" (stage {fullest.stage})" if any(trace.stage for trace in traces) else ""
    return (
        f"Peak {format_bytes(span.peak.total)} on rank {fullest.rank}{stage} in {span.name}, {span.peak.phase} of"
        f" {span.peak.block}: {share:.0%} are {largest}"
    )


def write_page(traces: Sequence[MemoryTrace], folder: Path) -> Path:
    """Writes `memory.html`, and `memory.png` where matplotlib is installed.

    Args:
        traces: of one run, at least one with a span.
        folder: where to.

    Returns:
        The page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fullest = _fullest(traces)
    figure = draw(traces)
    if figure is None:
        picture = "<p>Install matplotlib (the <code>plot</code> extra) for the pictures.</p>"
    else:
        figure.savefig(folder / "memory.png", dpi=110)
        picture = _svg(figure)
    body = "\n".join(
        [
            picture,
            f"<h2>The peak of rank {fullest.rank}, {escape(fullest.fullest.name)}, by block</h2>",
            _blocks_table(fullest.fullest),
            "<h2>Peak of each phase</h2>",
            _phases_table(fullest.fullest),
            "<h2>Estimate beside measurement</h2>",
            _estimate_table(traces),
        ]
    )
    path = folder / "memory.html"
    path.write_text(PAGE.format(title=escape(headline(traces)), body=body), encoding="utf-8")
    return path


def draw(traces: Sequence[MemoryTrace]) -> "Figure | None":
    """The fullest rank's steps over time, and every rank's peak; None without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    shown = sorted((trace for trace in traces if trace.spans), key=lambda trace: trace.rank)[:MOST_RANKS]
    figure = Figure(figsize=(10, 4.2 + 0.28 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=[4, 0.6 + 0.28 * len(shown)])
    _draw_timeline(above, _fullest(traces))
    _draw_ranks(below, shown)
    figure.legend(
        *above.get_legend_handles_labels(), loc="outside upper center", ncols=len(CATEGORIES) + 1, fontsize=8
    )
    return figure


def _draw_timeline(axes: "Axes", trace: MemoryTrace) -> None:
    unit, name = _unit(trace.fullest.peak.total)
    start = 0
    for index, span in enumerate(trace.spans):
        positions = range(start, start + len(span.timeline))
        layers = [[moment.of(category) / unit for moment in span.timeline] for category in CATEGORIES]
        labels = CATEGORIES if index == 0 else ["_"] * len(CATEGORIES)
        axes.stackplot(
            positions, layers, labels=labels, colors=[COLORS[key] for key in CATEGORIES], step="post"
        )
        axes.axvline(start, color="#888", linewidth=0.8)
        axes.text(start, 1.0, f" {span.name}", fontsize=8, va="bottom", transform=axes.get_xaxis_transform())
        if span is trace.fullest:
            peak = max(range(len(span.timeline)), key=lambda at: span.timeline[at].total)
            axes.plot(start + peak, span.peak.total / unit, "k.", markersize=7)
            axes.annotate(
                f"{span.peak.total / unit:.3g} {name} in {span.peak.phase}, {span.peak.block}",
                (start + peak, span.peak.total / unit),
                xytext=(6, 4),
                textcoords="offset points",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1},
            )
        start += len(span.timeline)
    if trace.estimate:
        expected = (trace.estimate["allocated"] - trace.estimate.get("framework", 0)) / unit
        axes.axhline(
            expected, color="#222", linestyle="--", linewidth=1, label=f"estimate {expected:.3g} {name}"
        )
    axes.set_xlim(0, max(1, start - 1))
    axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
    axes.set_xticks([])
    axes.set_xlabel("allocations, in order")
    axes.set_ylabel(f"{name} on rank {trace.rank}")


def _draw_ranks(axes: "Axes", traces: Sequence[MemoryTrace]) -> None:
    unit, name = _unit(max(trace.fullest.peak.total for trace in traces))
    for row, trace in enumerate(traces):
        left, peak = 0.0, trace.fullest.peak
        for category in CATEGORIES:
            width = peak.of(category) / unit
            axes.barh(row, width, 0.8, left, color=COLORS[category])
            left += width
        axes.text(left, row, f" {left:.3g} {name}, {peak.phase}", va="center", fontsize=8)
    axes.set_yticks(
        range(len(traces)), [f"rank {trace.rank}, stage {trace.stage}" for trace in traces], fontsize=8
    )
    axes.invert_yaxis()
    axes.set_xlim(0, axes.get_xlim()[1] * 1.2)
    axes.set_xlabel(f"peak of each rank, {name}")


def _svg(figure: "Figure") -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg")
    text = stream.getvalue()
    return text[text.index("<svg") :]


def _blocks_table(span: SpanTrace) -> str:
    used = [category for category in CATEGORIES if span.peak.of(category)]
    order = sorted(span.blocks_at_peak.items(), key=lambda item: -sum(item[1].values()))
    rows = [
        [block, *(_size(values.get(category, 0)) for category in used), _size(sum(values.values()))]
        for block, values in order[:MOST_BLOCKS]
    ]
    rows.append(["all", *(_size(span.peak.of(category)) for category in used), _size(span.peak.total)])
    return _table(["block", *used, "all"], rows)


def _phases_table(span: SpanTrace) -> str:
    used = [category for category in CATEGORIES if any(m.of(category) for m in span.peak_of_phase.values())]
    rows = [
        [f"{phase}, {moment.block}", *(_size(moment.of(category)) for category in used), _size(moment.total)]
        for phase, moment in span.peak_of_phase.items()
    ]
    return _table(["phase, at", *used, "all"], rows)


def _estimate_table(traces: Sequence[MemoryTrace]) -> str:
    """Measured over estimated, of the fullest rank of each stage."""
    stages: dict[int, MemoryTrace] = {}
    for trace in traces:
        if trace.spans and trace.estimate:
            held = stages.get(trace.stage)
            if held is None or trace.fullest.peak.total > held.fullest.peak.total:
                stages[trace.stage] = trace
    if not stages:
        return "<p>The estimator cannot read this model's shape: it needs a ModuleList of blocks.</p>"
    rows = [row for stage, trace in sorted(stages.items()) for row in _estimate_rows(stage, trace)]
    return _table(["stage, category", "measured", "estimated", "ratio"], rows)


def _estimate_rows(stage: int, trace: MemoryTrace) -> list[list[str]]:
    """The estimate counts all states at once; so the measurement is each category's own peak."""
    span, estimate = trace.fullest, trace.estimate
    highest = {
        category: max(moment.of(category) for moment in span.peak_of_phase.values())
        for category in CATEGORIES
    }
    pairs = [
        *((name, highest[name], estimate[name]) for name in ("parameters", "gradients", "optimizer")),
        (
            "activations and temporary",
            highest["activations"] + span.peak.of("temporary") + span.peak.of("gathered"),
            estimate["activations"] + estimate["transient"] + estimate["gathered"],
        ),
        ("peak", span.peak.total, estimate["allocated"] - estimate["framework"]),
    ]
    return [
        [
            f"{stage}, {name}",
            _size(measured),
            _size(expected),
            f"{measured / expected:.2f}" if expected else "",
        ]
        for name, measured, expected in pairs
    ]


def _fullest(traces: Sequence[MemoryTrace]) -> MemoryTrace:
    return max((trace for trace in traces if trace.spans), key=lambda trace: trace.fullest.peak.total)


def _unit(num_bytes: float) -> tuple[int, str]:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if num_bytes >= unit:
            return unit, name
    return KIB, "KiB"


def _size(num_bytes: float) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = ["<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows]
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"
