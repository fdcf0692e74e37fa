# SPDX-License-Identifier: Apache-2.0
"""The cells as the table in the docs."""

from pathlib import Path

PATH = Path(__file__).parents[2] / "docs" / "trainer_features.md"

_HEAD = """# Trainer features by layout

Every row is checked by `python -m tests.trainer_features`: the same LightningModule runs in each layout and on one
process, and what comes out must agree. `yes` means it does; a number refers to the refusal below the table, which is
raised in one line before training. The table is written by `python -m tests.trainer_features --write`.
"""


def as_markdown(cells: dict[str, dict[str, dict[str, str]]]) -> str:
    """Cells by layout, scenario and feature -> the page."""
    layouts = list(cells)
    lines = [_HEAD, "| feature | " + " | ".join(layouts) + " |", "|---" * (len(layouts) + 1) + "|"]
    notes: list[str] = []
    for scenario, features in cells[layouts[0]].items():
        for feature in features:
            row = [_short(cells[layout][scenario][feature], notes) for layout in layouts]
            lines.append(f"| {feature} | " + " | ".join(row) + " |")
    if notes:
        lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    return "\n".join(lines) + "\n"


def _short(text: str, notes: list[str]) -> str:
    if not text.startswith("refused: "):
        return text
    message = text.removeprefix("refused: ")
    if message not in notes:
        notes.append(message)
    return f"refused ({notes.index(message) + 1})"
