# SPDX-License-Identifier: Apache-2.0
"""Drawings of schedules."""

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_3d.schedules import SCHEDULE_NAMES, build_schedule, draw_png, draw_text


def test_text_shows_actions_and_idle_time() -> None:
    assert draw_text(build_schedule("1f1b", num_ranks=2, num_microbatches=2)).splitlines() == [
        "1f1b: 2 ranks, 2 stages, 2 microbatches, bubble 33.3%",
        "rank 0 |0F0 0F1 ........0B0     ....0B1     |",
        "rank 1 |....1F0 1B0     1F1 1B1     ........|",
    ]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_png_is_written(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = draw_png(build_schedule(name, num_ranks=4, num_microbatches=8), tmp_path / f"{name}.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_schedules_import_neither_torch_nor_matplotlib() -> None:
    code = "import sys, lightning_3d.schedules; sys.exit(bool({'torch', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
