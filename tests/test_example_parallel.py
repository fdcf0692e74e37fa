# SPDX-License-Identifier: Apache-2.0
"""The example over several processes, in every way that the README starts it."""

import re
import sys
from pathlib import Path

import pytest

from examples.train_lm import ByteLM, StandardLibrary, main
from tests.harness import run_ranks, run_script
from tests.test_example import SMALL, last_val_loss

ROOT = Path(__file__).parent.parent
README_BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def run_example(world_size: int, *arguments: str) -> str:
    """Run the example's `main` on forked ranks; returns what rank 0 wrote."""
    argv = [*SMALL, "--devices", str(world_size), *arguments]
    return run_ranks(world_size, main, argv, init=False, timeout_s=140).outputs[0]


@pytest.mark.timeout(300)
def test_layouts_give_one_result_and_resume_into_each_other(tmp_path: Path) -> None:
    """pp 2 goes six steps; tp 2 goes three, and pp 2 goes on from there: the same loss."""
    whole, first, second = tmp_path / "whole", tmp_path / "first", tmp_path / "second"
    output = run_example(2, "--pp", "2", "--max-steps", "6", "--output", str(whole))
    assert "bubble" in output
    assert re.search(r"The model continues 'def ':\ndef ", output)
    run_example(2, "--tp", "2", "--max-steps", "6", "--output", str(first))
    assert last_val_loss(first) == pytest.approx(last_val_loss(whole), rel=1e-4)
    halfway = str(first / "checkpoints" / "step3.ckpt")
    output = run_example(2, "--pp", "2", "--max-steps", "6", "--output", str(second), "--resume", halfway)
    assert "step 1/" not in output
    assert last_val_loss(second) == pytest.approx(last_val_loss(whole), rel=1e-4)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", README_BLOCKS, ids=["auto", "3d", "callbacks"])
def test_readme_code(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    world_size = 2 if 'strategy="3d"' in block else 8
    block = block.replace("devices=8", f"devices={world_size}").replace("max_steps=1000", "max_steps=1")

    def body() -> int:
        names = {
            "model": ByteLM(d_model=32, n_layers=2),
            "data": StandardLibrary(batch_size=4, num_val_crops=16),
        }
        exec(block, names)
        return int(names["trainer"].global_step)  # type: ignore[attr-defined]

    assert run_ranks(world_size, body, init=False, timeout_s=200) == [1] * world_size


@pytest.mark.parametrize("name", ["one_node", "hsdp_nodes", "three_d"])
def test_yaml_is_understood(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.setattr(sys, "argv", ["train_lm.py"])
    config = str(ROOT / "examples" / f"{name}.yaml")
    cli = LightningCLI(
        ByteLM, StandardLibrary, args=["--config", config, "--trainer.accelerator", "cpu"], run=False
    )
    assert type(cli.trainer.strategy).__module__.startswith("lightning_3d.strategies")
    assert cli.trainer.max_steps == 200


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_yaml_command(tmp_path: Path) -> None:
    """A real command that starts its second process itself."""
    overrides = {
        "devices": "2",
        "max_steps": "4",
        "limit_train_batches": "2",
        "accelerator": "cpu",
        "logger.init_args.save_dir": str(tmp_path),
        "callbacks": "lightning_3d.callbacks.ThroughputMonitor",
        "callbacks.every_n_steps": "2",
        "callbacks.print_lines": "true",
        "enable_checkpointing": "false",
    }
    arguments = [item for name, value in overrides.items() for item in (f"--trainer.{name}", value)]
    arguments += ["--model.d_model", "32", "--data.num_val_crops", "32"]
    example = str(ROOT / "examples" / "train_lm.py")
    config = str(ROOT / "examples" / "one_node.yaml")
    result = run_script(
        [example, "fit", "--config", config, *arguments],
        {"PYTHONPATH": str(ROOT)},
        timeout_s=200,
        cwd=tmp_path,
    )
    assert "step 4/4  train_loss" in result.stdout
    assert (tmp_path / "metrics.csv").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example = [
        str(ROOT / "examples" / "train_lm.py"),
        *SMALL,
        "--devices",
        "2",
        "--tp",
        "2",
        "--max-steps",
        "3",
    ]
    result = run_script(
        [*command, *example, "--output", str(tmp_path)],
        {"PYTHONPATH": str(ROOT)},
        timeout_s=200,
        cwd=tmp_path,
    )
    assert "step 3/3  val_loss" in result.stdout
    assert result.stdout.count("The model continues") == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_low_bit_command(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    example = str(ROOT / "examples" / "low_bit.py")
    arguments = ["--devices", "2", "--max-steps", "2", "--accelerator", "cpu", "--d-model", "128"]
    result = run_script([example, *arguments, "--offload", "cpu"], {}, timeout_s=200, cwd=tmp_path)
    per_parameter = float(result.stdout.split(" bytes of optimizer state")[0].splitlines()[-1])
    assert 2 < per_parameter < 2.5
