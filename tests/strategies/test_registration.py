# SPDX-License-Identifier: Apache-2.0
"""`Trainer(strategy="3d")` works after `import lightning_3d`, in either order, and costs nothing before."""

import pytest

from tests.harness import run_script

TRAIN = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
trainer = Trainer(strategy={name!r}, devices=1, accelerator="cpu", fast_dev_run=1, enable_progress_bar=False)
trainer.fit(BoringModel())
print("strategy:", type(trainer.strategy).__name__)
"""


@pytest.mark.parametrize(
    ("name", "class_name"),
    [
        ("3d", "ThreeDStrategy"),
        ("hybrid_shard", "HybridShardStrategy"),
        ("tensor_parallel", "TensorParallelStrategy"),
        ("pipeline", "PipelineStrategy"),
    ],
)
def test_names(name, class_name, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import lightning_3d\n" + TRAIN.format(name=name))
    assert f"strategy: {class_name}" in run_script([str(script)], timeout_s=90).stdout


def test_after_lightning_too(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import lightning.pytorch\nimport lightning_3d\n" + TRAIN.format(name="3d"))
    assert "strategy: ThreeDStrategy" in run_script([str(script)], timeout_s=90).stdout


def test_import_is_light(tmp_path):
    script = tmp_path / "light.py"
    script.write_text(
        "import sys, lightning_3d\nprint('heavy:', [m for m in ('torch', 'lightning') if m in sys.modules])"
    )
    assert "heavy: []" in run_script([str(script)], timeout_s=30).stdout
