# SPDX-License-Identifier: Apache-2.0
"""The code in docs/ runs, its links lead somewhere, and its options exist."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from examples.train_lm import ByteLM, StandardLibrary
from lightning_3d.plan import ParallelPlan
from tests.harness import run_ranks

DOCS = Path(__file__).parents[1] / "docs"
BLOCKS = [
    (path.stem, number, block)
    for path in sorted(DOCS.glob("*.md"))
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.S))
]


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("page", "number", "block"), BLOCKS, ids=[f"{page}-{n}" for page, n, _ in BLOCKS])
def test_code(page: str, number: int, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On as many ranks as the example asks for, on the small model of the examples, for two batches."""
    monkeypatch.chdir(tmp_path)
    devices = re.search(r"devices=(\d+)", block)
    world_size = int(devices[1]) if devices else 1
    block = block.replace(
        "max_epochs=1)", 'max_epochs=1, limit_train_batches=2, logger=False, accelerator="cpu")'
    )

    def body() -> int:
        names = {
            "model": ByteLM(d_model=32, n_layers=2),
            "data": StandardLibrary(batch_size=4, num_val_crops=16),
        }
        exec(block, names)
        trainer = names.get("trainer")
        return int(getattr(trainer, "global_step", 0)) if "fit" in block else 1

    assert all(steps > 0 for steps in run_ranks(world_size, body, init=False, timeout_s=200))


def test_links() -> None:
    for path in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([\w./-]+\.md)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_there_is_a_page_for_every_axis_that_can_be_used() -> None:
    pages = {"pp": "pipeline", "dp_replicate": "data", "dp_shard": "data", "tp": "tensor"}
    known = {field.name for field in fields(ParallelPlan)}
    for axis, page in pages.items():
        assert axis in known
        assert f"`{axis}`" in (DOCS / f"{page}.md").read_text()
