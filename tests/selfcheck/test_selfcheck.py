# SPDX-License-Identifier: Apache-2.0
"""The selfcheck passes, and can fail."""

import pytest
import torch

from lightning_3d.selfcheck.hugging_face import LAYOUTS, HuggingFaceTask
from lightning_3d.selfcheck.launch import be_quiet, run_alone, run_layout_forked
from lightning_3d.selfcheck.layouts import QUICK_CASES, legal_layouts
from lightning_3d.selfcheck.oracle import Record, compare
from tests.harness import run_script


@pytest.mark.timeout(400)
def test_command_checks_every_layout_of_two_ranks():
    result = run_script(["-m", "lightning_3d.selfcheck", "--world", "2", "--quick", "true"], timeout_s=300)
    for layout in ("single", "tp=2", "dp_shard=2", "dp_replicate=2", "pp=2"):
        assert layout in result.stdout
    assert "7 passed, 0 failed" in result.stdout


def test_layouts_are_complete():
    plans = list(legal_layouts(8))
    assert len({plan.describe() for plan in plans}) == 20
    assert all(plan.world_size == 8 for plan in plans)


def record(value):
    return Record([torch.tensor(1.0)], [{"w": torch.tensor([value, 1.0])}], {"w": torch.tensor([2.0])})


@pytest.mark.parametrize("value", [1.1, float("nan")])
def test_a_wrong_gradient_is_seen(value):
    assert compare(record(value), record(1.0)).gradients > 1e-2
    assert compare(record(1.0), record(1.0)).worst == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["llama (tied)", "bert", "vit"])
def test_hugging_face_in_3d(name):
    pytest.importorskip("transformers")
    be_quiet()
    task = HuggingFaceTask(name=name)
    (errors,) = run_layout_forked(LAYOUTS[-1], [task], {task: run_alone(task)})
    assert errors.worst <= 1e-5


def test_one_layout_in_three_axes():
    plan = next(p for p in legal_layouts(8) if p.describe() == "pp=2 x dp_shard=2 x tp=2")
    case = QUICK_CASES[0]
    (errors,) = run_layout_forked(plan, [case], {case: run_alone(case)})
    assert errors.worst <= 1e-5
