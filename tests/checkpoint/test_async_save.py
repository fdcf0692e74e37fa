# SPDX-License-Identifier: Apache-2.0
"""Saving in the background: what is written is the state at the call, and nothing is lost by anything that follows."""

import contextlib
import multiprocessing
import os
import random
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_3d.checkpoint import (
    AsyncCheckpointer,
    async_save,
    is_checkpoint,
    load_checkpoint,
    newest_checkpoint,
    remove_checkpoint,
    save_checkpoint,
)
from lightning_3d.errors import CheckpointError
from tests.checkpoint.layouts import LAYOUTS, assert_same, build, train, whole_state
from tests.harness import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*had no gradient")


def _model(value: float, size: int = 64) -> nn.Module:
    model = nn.Linear(size, size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def _loaded(path: Path, size: int = 64) -> int:
    model = _model(-1, size)
    step = load_checkpoint(path, model=model)["step"]
    assert all(bool((parameter == step).all()) for parameter in model.parameters())
    return int(step)


def _slow(seconds: float) -> None:
    """Makes the writer of this process slow."""
    write = async_save.write_snapshot

    def slowly(*args: object) -> None:
        time.sleep(seconds)
        write(*args)  # type: ignore[arg-type]

    async_save.write_snapshot = slowly  # type: ignore[assignment]


def _train_while_writing(path: Path, overlap: bool) -> None:
    _slow(0.2)
    layout = next(layout for layout in LAYOUTS if layout.name == "dp2tp2")
    model, optimizers = build(layout)
    train(model, optimizers, [0])
    checkpointer = AsyncCheckpointer()
    expected = whole_state(model, optimizers)
    for number in (1, 2):
        checkpointer.save(
            path / f"{number}.ckpt",
            model=model,
            optimizers=optimizers,
            metadata={"n": number},
            overlap=overlap,
        )
        for _, buffer in model.named_buffers():
            buffer.fill_(9)  # a forward pass may do this at once
        for _ in range(20):
            dist.all_reduce(torch.ones(1000))  # training's own traffic
        assert not is_checkpoint(path / f"{number}.ckpt")
        checkpointer.wait_staged()
        train(model, optimizers, [number])
        expected, later = whole_state(model, optimizers), expected
        checkpointer.wait()
        fresh, fresh_optimizers = build(layout, seed=3)
        load_checkpoint(path / f"{number}.ckpt", model=fresh, optimizers=fresh_optimizers)
        assert_same(whole_state(fresh, fresh_optimizers), later)
    checkpointer.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_training_goes_on(tmp_path: Path, overlap: bool) -> None:
    run_ranks(4, _train_while_writing, tmp_path, overlap)


def test_one_save_at_a_time_and_the_old_one_goes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves come faster than they are written; at every moment one whole checkpoint is there."""
    monkeypatch.setattr(async_save, "write_snapshot", async_save.write_snapshot)
    _slow(0.05)
    checkpointer = AsyncCheckpointer()
    seen_none = threading.Event()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            if all(newest_checkpoint(tmp_path) is None for _ in range(3)):  # a listing is not one moment
                seen_none.set()

    save_checkpoint(tmp_path / "0.ckpt", model=_model(0), metadata={"step": 0})
    watcher = threading.Thread(target=watch)
    watcher.start()
    for step in range(1, 5):
        checkpointer.save(tmp_path / f"{step}.ckpt", model=_model(step), metadata={"step": step})
        assert checkpointer.in_flight == tmp_path / f"{step}.ckpt"
        old = tmp_path / f"{step - 1}.ckpt"
        checkpointer.after_commit(lambda old=old: remove_checkpoint(old))
        assert is_checkpoint(old)
    checkpointer.close()
    done.set()
    watcher.join()
    assert not seen_none.is_set()
    assert os.listdir(tmp_path) == ["4.ckpt"]
    assert _loaded(tmp_path / "4.ckpt") == 4


def _failing_writer(path: Path) -> str:
    save_checkpoint(path / "a.ckpt", model=_model(1), metadata={"step": 1})
    checkpointer = AsyncCheckpointer()
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
    checkpointer.save(path / "b.ckpt", model=_model(2), metadata={"step": 2})
    checkpointer.after_commit(lambda: remove_checkpoint(path / "a.ckpt"))
    with pytest.raises(CheckpointError) as error:
        checkpointer.wait()
    checkpointer.close()  # reported once
    return str(error.value)


def test_a_writer_that_fails(tmp_path: Path) -> None:
    errors = run_ranks(2, _failing_writer, tmp_path, timeout_s=40)
    assert errors[0] == errors[1]
    assert "[rank 1] OSError: [Errno 27]" in errors[0]
    assert _loaded(tmp_path / "a.ckpt") == 1
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_remove_takes_links_and_files_alone(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.ckpt", model=_model(1), metadata={"step": 1})
    (tmp_path / "link.ckpt").symlink_to("a.ckpt")
    (tmp_path / "file.ckpt").write_text("")
    for name in ("link.ckpt", "file.ckpt", "none.ckpt"):
        remove_checkpoint(tmp_path / name)
    assert os.listdir(tmp_path) == ["a.ckpt"]
    remove_checkpoint(tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == []


def _ends_early(path: Path) -> None:
    _slow(0.3)
    AsyncCheckpointer().save(path, model=_model(5), metadata={"step": 5})
    raise RuntimeError("the step after the save")


def test_a_process_that_ends_by_an_exception_finishes_its_checkpoint(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_ends_early, args=(tmp_path / "a.ckpt",))
    process.start()
    process.join(30)
    assert process.exitcode == 1
    assert _loaded(tmp_path / "a.ckpt") == 5


def test_a_kill_at_any_moment(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    started = time.monotonic()
    save_checkpoint(path, model=_model(0, 200), metadata={"step": 0})
    save_s = time.monotonic() - started  # on a machine that is busy with others, too
    generator = random.Random(1)
    for _ in range(8):
        before = _loaded(path, 200)
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                checkpointer = AsyncCheckpointer()
                model = _model(before, 200)
                for step in range(before + 1, before + 1000):
                    checkpointer.wait_staged()
                    for parameter in model.parameters():
                        parameter.data.fill_(step)
                    checkpointer.save(path, model=model, metadata={"step": step}, overlap=True)
            os._exit(1)
        time.sleep(generator.uniform(0, 5 * save_s))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert _loaded(path, 200) >= before
    assert _loaded(path, 200) > 0


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _save_often(path: Path) -> tuple[float, int]:
    checkpointer = AsyncCheckpointer()
    model = _model(1, 1000)
    middle = 0.0
    for number in range(30):
        if number == 10:
            checkpointer.wait()
            middle = _resident_mib()
        checkpointer.save(path / "a.ckpt", model=model, metadata={"step": 1})
    checkpointer.wait()
    return _resident_mib() - middle, threading.active_count()


def test_memory_does_not_grow(tmp_path: Path) -> None:
    for growth_mib, threads in run_ranks(2, _save_often, tmp_path):
        assert growth_mib < 4
        assert threads <= 2
