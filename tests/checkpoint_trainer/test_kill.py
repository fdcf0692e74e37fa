# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at random moments of saves: a few here, fifty in `benchmarks/kill_resume.py`."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "kill_resume.py"


def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("kill_resume", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kill_resume"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
def test_every_resume_is_right(kills: int) -> None:
    report = benchmark().kill_and_resume(kills, seed=kills)
    assert report.problems == []
    assert report.kills == kills
    assert report.resumed_at == sorted(report.resumed_at)
    assert report.resumed_at[-1] > 0
    assert report.compared > kills
