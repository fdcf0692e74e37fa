# SPDX-License-Identifier: Apache-2.0
"""The harness itself: what it returns, what it says when a rank fails, and that it leaves nobody behind."""

import gc
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import RanksError, RanksTimeoutError, ScriptError, run_ranks, run_script
from tests.processes import PATIENCE


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_results_come_back_by_rank() -> None:
    def body(offset: int) -> tuple[int, torch.Tensor]:
        value = torch.tensor([float(dist.get_rank() + offset)], requires_grad=True)
        total = value.detach().clone()
        dist.all_reduce(total)
        print("hello from", dist.get_rank())
        return dist.get_rank(), total * value

    results = run_ranks(4, body, 1)
    assert [rank for rank, _ in results] == [0, 1, 2, 3]
    assert [tensor.item() for _, tensor in results] == [10.0, 20.0, 30.0, 40.0]
    assert not results[0][1].requires_grad
    assert results.outputs[2] == "hello from 2\n"


def test_environment_is_torchruns_and_stays_in_the_ranks() -> None:
    def body() -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "EXTRA", "HOME")}

    _, second = run_ranks(2, body, env={"EXTRA": "1", "HOME": None}, init=False)
    assert second == {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "EXTRA": "1", "HOME": None}
    assert "RANK" not in os.environ


def test_exception_of_one_rank_ends_the_others_quickly() -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            print("about to fail")
            raise ValueError("wrong number 17")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RanksError, match=r"rank 1 of 2 failed: ValueError: wrong number 17") as caught:
        run_ranks(2, body)
    assert time.monotonic() - start < 15 * PATIENCE
    assert "about to fail" in str(caught.value)
    assert caught.value.failures[1].type_name == "ValueError"
    assert "raise ValueError" in caught.value.failures[1].details


def test_silent_death_is_reported() -> None:
    def body() -> None:
        if dist.get_rank() == 0:
            os._exit(7)

    with pytest.raises(RanksError, match=r"rank 0 of 2 failed: exit: .*exit code 7"):
        run_ranks(2, body)


def test_timeout_kills_all_and_shows_stacks(tmp_path: Path) -> None:
    def body() -> None:
        child = subprocess.Popen(["sleep", "60"], start_new_session=True)
        (tmp_path / os.environ["RANK"]).write_text(f"{os.getpid()} {child.pid}")
        if os.environ["RANK"] == "1":
            sleep_in_a_function_with_this_name()

    def sleep_in_a_function_with_this_name() -> None:
        time.sleep(60)

    with pytest.raises(
        RanksTimeoutError, match=rf"still running after {PATIENCE:g} s \(ranks \[1\]\)"
    ) as caught:
        run_ranks(2, body, timeout_s=1, init=False)
    assert "sleep_in_a_function_with_this_name" in caught.value.failures[1].details
    pids = [int(pid) for rank in "01" for pid in (tmp_path / rank).read_text().split()]
    assert not [pid for pid in pids if alive(pid)]


def test_warnings_as_errors_reach_the_ranks() -> None:
    def body() -> None:
        warnings.warn_explicit("old", DeprecationWarning, "x.py", 1, module="lightning_3d.thing")

    with pytest.raises(RanksError, match="DeprecationWarning: old"):
        run_ranks(1, body)


def test_trainer_initialises_itself() -> None:
    def body() -> tuple[int, int, bool]:
        from lightning.pytorch import Trainer
        from lightning.pytorch.demos.boring_classes import BoringModel

        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )
        trainer.fit(BoringModel())
        return trainer.global_rank, trainer.world_size, dist.is_initialized()

    assert run_ranks(2, body, init=False) == [(0, 2, True), (1, 2, True)]


def test_script_output_and_status() -> None:
    result = run_script([sys.executable, "-c", "import os; print(os.environ['WORD'])"], {"WORD": "here"})
    assert (result.returncode, result.stdout) == (0, "here\n")
    with pytest.raises(ScriptError, match=r"(?s)status 3.*because"):
        run_script([sys.executable, "-c", "import sys; print('because', file=sys.stderr); sys.exit(3)"])


def test_script_timeout_leaves_no_orphan(tmp_path: Path) -> None:
    code = f"""
import subprocess, time
from pathlib import Path
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
Path({str(tmp_path / "pid")!r}).write_text(str(child.pid))
def waits_in_here():
    time.sleep(60)
waits_in_here()
"""
    with pytest.raises(ScriptError, match=rf"(?s)did not end within {2 * PATIENCE:g} s.*waits_in_here"):
        run_script([sys.executable, "-c", code], timeout_s=2)
    assert not alive(int((tmp_path / "pid").read_text()))


def test_ranks_do_not_collect_what_was_garbage_in_the_parent(tmp_path: Path) -> None:
    """The destructor of a process group would wait for threads that a fork has not."""

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            (tmp_path / str(os.getpid())).touch()

    gc.disable()
    try:
        Garbage()
        run_ranks(2, gc.collect)
    finally:
        gc.enable()
    assert not list(tmp_path.iterdir())
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]


@pytest.mark.timeout(0.2)
@pytest.mark.xfail(raises=TimeoutError, strict=True)
def test_time_limit_of_a_test() -> None:
    time.sleep(5)
