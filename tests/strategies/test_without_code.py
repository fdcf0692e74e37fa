# SPDX-License-Identifier: Apache-2.0
"""Runs from YAML alone: no code of the user imports the package, or there is no code but the module's."""

from pathlib import Path

import pytest

from tests.harness import run_script

ROOT = Path(__file__).parents[2]
MODEL = """
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel


class Mine(BoringModel):
    def on_train_end(self):
        if self.trainer.is_global_zero:
            print("trained by", type(self.trainer.strategy).__name__, "on", self.trainer.world_size, flush=True)
"""
CONFIG = """
trainer:
  strategy: 3d
  accelerator: cpu
  devices: {devices}
  max_steps: 2
  limit_val_batches: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
model: {{class_path: mine.Mine}}
data: {{class_path: lightning.pytorch.demos.boring_classes.BoringDataModule}}
"""
ENTRY_POINT = "[torch.backends]\nautoloaded = lightning_3d.registration:autoload\n"


def run_yaml(folder: Path, devices: int, command: list[str], paths: str) -> str:
    (folder / "mine.py").write_text(MODEL)
    (folder / "x.yaml").write_text(CONFIG.format(devices=devices))
    arguments = [*command, "fit", "--config", "x.yaml"]
    return run_script(arguments, env={"PYTHONPATH": paths}, cwd=folder, timeout_s=140).stdout


@pytest.mark.timeout(150)
def test_no_code_of_the_user_imports_the_package(tmp_path):
    """torch calls the entry point that an installed package has; here its metadata stands in a folder of its own."""
    metadata = tmp_path / "site" / "autoloaded-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: autoloaded\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINT)
    (tmp_path / "main.py").write_text("from lightning.pytorch.cli import LightningCLI\nLightningCLI()\n")
    written = run_yaml(tmp_path, 1, ["main.py"], f"{tmp_path / 'site'}:{ROOT}")
    assert "trained by ThreeDStrategy on 1" in written


@pytest.mark.timeout(150)
def test_fit_needs_no_script(tmp_path):
    written = run_yaml(tmp_path, 2, ["-m", "lightning_3d.cli"], str(ROOT))
    assert "trained by ThreeDStrategy on 2" in written
