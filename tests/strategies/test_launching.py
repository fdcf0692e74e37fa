# SPDX-License-Identifier: Apache-2.0
"""Environments that do not fit the Trainer are refused before a process waits for others; stray variables do no harm."""

import os
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment

from lightning_3d.errors import PlanError
from lightning_3d.strategies import TensorParallelStrategy, ThreeDStrategy
from lightning_3d.strategies import launching
from lightning_3d.strategies.launching import check_launch
from tests.harness import run_script

ROOT = str(Path(__file__).parents[2])
TASK = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NAME": "train", "SLURM_NTASKS_PER_NODE": "4"}
TRAIN = """
import sys, time
import lightning_3d
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
print("started", flush=True)
trainer = Trainer(strategy="3d", devices=int(sys.argv[1]), accelerator="cpu", max_steps=1, limit_val_batches=0,
                  enable_progress_bar=False, enable_checkpointing=False, logger=False)
trainer.fit(BoringModel())
if trainer.is_global_zero:
    print("trained on", trainer.world_size)
"""


@pytest.fixture
def environment(monkeypatch):
    def use(**variables):
        for name in [name for name in os.environ if name.startswith("SLURM")]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return use


def make(strategy, devices):
    return pl.Trainer(strategy=strategy, devices=devices, accelerator="cpu", logger=False, num_nodes=1)


@pytest.mark.parametrize("ntasks", ["1", "2", "8"])
def test_slurm_with_another_number_of_tasks(ntasks, environment):
    environment(**TASK, SLURM_NTASKS=ntasks, SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS=ntasks)
    with pytest.raises(PlanError, match=rf"SLURMEnvironment has {ntasks} processes.*told of 4"):
        make(ThreeDStrategy(dp_shard=4), 4)
    with pytest.raises(PlanError, match="Start as many as that"):
        make(TensorParallelStrategy(tp=4), 4)


def test_slurm_without_srun(environment):
    """The batch script of a job of 4 tasks runs once."""
    environment(**TASK, SLURM_NTASKS="4")
    with pytest.raises(PlanError, match="not started with srun"):
        make(ThreeDStrategy(dp_shard=4), 4)
    environment(**TASK, SLURM_NTASKS="4", SLURM_STEP_ID="0")
    check_launch(SLURMEnvironment(), 4, 1)


def test_a_node_that_is_not_there(environment, monkeypatch):
    monkeypatch.setenv("NODE_RANK", "1")
    with pytest.raises(PlanError, match="This is node 1.*num_nodes=1"):
        check_launch(LightningEnvironment(), 2, 1)
    check_launch(LightningEnvironment(), 2, 2)


@pytest.mark.timeout(150)
def test_variables_that_were_left_behind(tmp_path):
    """A plain script starts its two processes whatever WORLD_SIZE says."""
    (tmp_path / "train.py").write_text(TRAIN)
    stray = {"NODE_RANK": "0", "WORLD_SIZE": "8", "RANK": "3", "PYTHONPATH": ROOT}
    result = run_script(["train.py", "2"], env=stray, cwd=tmp_path, timeout_s=140)
    assert "trained on 2" in result.stdout


def test_an_interactive_interpreter(monkeypatch):
    """Refuses several processes with what to do, and lets one train."""
    monkeypatch.setattr(launching, "is_interactive", lambda: True)
    with pytest.raises(PlanError, match=r"start it with `torchrun --nproc-per-node 2 script.py`"):
        make(ThreeDStrategy(dp_shard=2), 2)
    assert make(ThreeDStrategy(), 1).strategy.launcher.is_interactive_compatible


def test_who_waits_for_a_parent_that_is_gone_ends(tmp_path):
    said = tmp_path / "said"
    parent = os.fork()
    if parent == 0:
        if os.fork() == 0:
            with launching.ending_with_parent(lambda: (said.write_text("gone"), os._exit(0))):
                (tmp_path / "waits").touch()
                time.sleep(60)
            os._exit(1)
        while not (tmp_path / "waits").exists():
            time.sleep(0.01)
        os._exit(0)
    os.waitpid(parent, 0)
    deadline = time.monotonic() + 30
    while not said.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert said.read_text() == "gone"
