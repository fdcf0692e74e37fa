# SPDX-License-Identifier: Apache-2.0
"""Drawings of a schedule: text for a terminal or a log, a PNG for a document."""

from pathlib import Path
from typing import TYPE_CHECKING

from lightning_3d.schedules.simulate import Durations, Timeline, simulate
from lightning_3d.schedules.table import Action, ActionKind, Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {
    ActionKind.FORWARD: ("#4c78a8", "#9ecae9"),
    ActionKind.BACKWARD: ("#59a14f", "#b5dfa8"),
    ActionKind.BACKWARD_INPUT: ("#e0912f", "#fbd59e"),
    ActionKind.BACKWARD_WEIGHT: ("#8d6cab", "#d7c3e6"),
}
_LABELS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward: input",
    ActionKind.BACKWARD_WEIGHT: "backward: weight",
}
_INCHES_PER_ACTION = 0.24
_MAX_INCHES = 40.0


def draw_text(schedule: Schedule, durations: Durations | None = None) -> str:
    """One line a rank; an action is as wide as it is long, dots are idle time.

    ```text
    1f1b: 2 ranks, 2 stages, 2 microbatches, bubble 33.3%
    rank 0 |0F0 0F1 ........0B0     0B1     |
    rank 1 |....1F0 1B0     1F1 1B1     ....|
    ```
    """
    timeline = simulate(schedule, durations)
    lengths = [span.end_s - span.start_s for span in timeline.spans.values()]
    unit_s = min((length for length in lengths if length > 0), default=1.0)
    width = max(len(str(action)) for action in timeline.spans) + 1
    rows = ("".join(_text_row(timeline, rank, unit_s / width)) for rank in range(schedule.num_ranks))
    return "\n".join([_headline(timeline), *(f"rank {rank} |{row}|" for rank, row in enumerate(rows))])


def draw_png(schedule: Schedule, path: str | Path, durations: Durations | None = None) -> Path:
    """Write a chart of the schedule: a row a rank, a box an action, the microbatch in the box.

    On a rank with several stages the later ones are lighter. Needs matplotlib (the `plot` extra).

    Returns:
        The file that was written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timeline = simulate(schedule, durations)
    unit_s = min((s.end_s - s.start_s for s in timeline.spans.values() if s.end_s > s.start_s), default=1.0)
    width = min(_MAX_INCHES, max(6.0, _INCHES_PER_ACTION * timeline.makespan_s / unit_s + 1.2))
    figure = Figure(figsize=(width, 0.42 * schedule.num_ranks + 1.3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    fontsize = min(8.0, 5.6 * (width - 1.2) / (_INCHES_PER_ACTION * timeline.makespan_s / unit_s))
    for action, span in timeline.spans.items():
        rank = schedule.stage_to_rank[action.stage]
        face, text = _box_colors(schedule, action)
        length = span.end_s - span.start_s
        axes.barh(rank, length, 0.86, span.start_s, color=face, edgecolor="white", linewidth=0.8)
        if fontsize >= 3.5:
            center = span.start_s + length / 2
            axes.text(
                center, rank, str(action.microbatch), ha="center", va="center", color=text, fontsize=fontsize
            )
    axes.set_facecolor("#f0f0f0")
    axes.set_yticks(range(schedule.num_ranks), [f"rank {r}" for r in range(schedule.num_ranks)])
    axes.set_ylim(schedule.num_ranks - 0.5, -0.5)
    axes.set_xlim(0, timeline.makespan_s)
    axes.set_xlabel("time", fontsize=8)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    axes.set_title(_headline(timeline), fontsize=10, loc="left")
    _add_legend(figure, schedule)
    target = Path(path)
    figure.savefig(target, dpi=150)
    return target


def _headline(timeline: Timeline) -> str:
    schedule = timeline.schedule
    return (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches, bubble {100 * timeline.bubble_fraction:.1f}%"
    )


def _text_row(timeline: Timeline, rank: int, column_s: float) -> list[str]:
    cells = ["."] * round(timeline.makespan_s / column_s)
    for action in timeline.schedule.actions[rank]:
        if action is None:
            continue
        span = timeline.spans[action]
        first, last = round(span.start_s / column_s), round(span.end_s / column_s)
        cells[first:last] = list(str(action).ljust(last - first)[: last - first])
    return cells


def _box_colors(schedule: Schedule, action: Action) -> tuple[str, str]:
    """Face and text colours: dark for a rank's first stage, light for its others."""
    stages = schedule.stages_of(schedule.stage_to_rank[action.stage])
    dark, light = _COLORS[action.kind]
    return (dark, "white") if stages.index(action.stage) == 0 else (light, "#202020")


def _add_legend(figure: "Figure", schedule: Schedule) -> None:
    from matplotlib.patches import Patch

    kinds = [
        k for k in ActionKind if any(a is not None and a.kind is k for row in schedule.actions for a in row)
    ]
    patches = [Patch(facecolor=_COLORS[kind][0], label=_LABELS[kind]) for kind in kinds]
    if schedule.num_stages_per_rank > 1:
        patches.append(Patch(facecolor=_COLORS[kinds[0]][1], label="lighter: the rank's later stages"))
    patches.append(Patch(facecolor="#f0f0f0", label="idle"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
