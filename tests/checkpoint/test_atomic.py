# SPDX-License-Identifier: Apache-2.0
"""Whole or not there: failures of one rank, kills, damage, replacement."""

import contextlib
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_3d.checkpoint import is_checkpoint, load_checkpoint, read_metadata, renaming, save_checkpoint
from lightning_3d.errors import CheckpointError
from tests.harness import RanksError, run_ranks
from tests.processes import PATIENCE


def _model(value: float, size: int = 64) -> nn.Module:
    model = nn.Linear(size, size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def _save(path: Path, step: int) -> None:
    save_checkpoint(path, model=_model(step), metadata={"step": step})


def _loaded(path: Path) -> int:
    """The step of a checkpoint, once its weights and its metadata agree."""
    model = _model(-1)
    step = load_checkpoint(path, model=model)["step"]
    assert all(bool((parameter == step).all()) for parameter in model.parameters())
    return int(step)


def _hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


# --- failures of one rank


class _Bad(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError("no state today")


def _fails_in_state_dict(path: Path) -> str:
    model = _Bad(2, 2) if dist.get_rank() == 1 else nn.Linear(2, 2)
    return _error_of(lambda: save_checkpoint(path, model=model, metadata={}))


def _fails_on_full_disk(path: Path) -> str:
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    model = nn.ModuleDict({str(dist.get_rank()): _model(3, 200)})
    return _error_of(lambda: save_checkpoint(path, model=model, metadata={}))


def _fails_on_unsafe_metadata(path: Path) -> str:
    metadata = {"callbacks": {"f": len}} if dist.get_rank() == 0 else {}
    return _error_of(lambda: save_checkpoint(path, model=nn.Linear(2, 2), metadata=metadata))


def _fails_on_other_shapes(path: Path) -> str:
    return _error_of(lambda: save_checkpoint(path, model=_model(1, 2 + dist.get_rank()), metadata={}))


def _fails_at_the_rename(path: Path) -> str:
    if dist.get_rank() == 0:
        renaming.ByRename._put_in_place = _refuse
    return _error_of(lambda: save_checkpoint(path, model=nn.Linear(2, 2), metadata={}))


def _refuse(*args: Any) -> NoReturn:
    raise PermissionError("read-only file system")


def _error_of(action: Callable[[], Any]) -> str:
    started = time.monotonic()
    with pytest.raises(CheckpointError) as error:
        action()
    assert time.monotonic() - started < 20 * PATIENCE
    return str(error.value)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (_fails_in_state_dict, "[rank 1] ValueError: no state today"),
        (_fails_on_full_disk, "[rank 1] OSError: [Errno 27]"),
        (_fails_on_unsafe_metadata, "[rank 0] Only pickle could store callbacks.f"),
        (_fails_on_other_shapes, "Names must mean one tensor"),
        (_fails_at_the_rename, "[rank 0] PermissionError: read-only"),
    ],
)
def test_an_error_of_one_rank_is_everybodys(tmp_path: Path, body: Callable[[Path], str], text: str) -> None:
    path = tmp_path / "last.ckpt"
    _save(path, 1)
    errors = run_ranks(3, body, path, timeout_s=40)
    assert len(set(errors)) == 1
    assert text in errors[0]
    assert _loaded(path) == 1
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "last.ckpt"
    errors = run_ranks(2, lambda: _error_of(lambda: _save(path, 1)), timeout_s=40)
    assert len(set(errors)) == 1
    assert "NotADirectoryError" in errors[0]


def test_a_rank_that_dies(tmp_path: Path) -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        _save(tmp_path / "last.ckpt", 2)

    _save(tmp_path / "last.ckpt", 1)
    with pytest.raises(RanksError) as error:
        run_ranks(3, body, timeout_s=40)
    assert {error.value.failures[rank].type_name for rank in (0, 2)} == {"CheckpointError"}
    assert "Lost a rank" in error.value.failures[0].message
    assert _loaded(tmp_path / "last.ckpt") == 1


# --- kills


@pytest.mark.parametrize("exchange", [True, False])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, exchange: bool) -> None:
    """One process saves to one path again and again and is killed; what is there then is whole and consistent."""
    path = tmp_path / "last.ckpt"
    started = time.monotonic()
    _save(path, 0)
    save_s = time.monotonic() - started  # on a machine that is busy with others, too
    generator = random.Random(0)
    for _ in range(12):
        before = _loaded(path)
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                if not exchange:
                    renaming.exchange = lambda first, second: False
                for step in range(before + 1, before + 1000):
                    _save(path, step)
            os._exit(1)
        time.sleep(generator.uniform(0, 5 * save_s))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert _loaded(path) >= before
    assert _loaded(path) > 0
    _save(path, 5000)
    assert os.listdir(tmp_path) == ["last.ckpt"]  # the leftovers of the killed are gone


def test_a_kill_between_the_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    _save(path, 1)
    monkeypatch.setattr(renaming, "exchange", lambda first, second: False)
    rename = Path.rename

    def once(self: Path, target: Path) -> Path:
        if target == path:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", once)
        patch.setattr(renaming.ByRename, "abandon", lambda self, folder: None)
        with pytest.raises(KeyboardInterrupt):
            _save(path, 2)
    assert not path.exists()
    assert len(_hidden(tmp_path)) == 2
    assert _loaded(path) == 2  # the newer of the two whole ones gets the name
    _save(path, 3)
    assert os.listdir(tmp_path) == ["last.ckpt"]


# --- damage


def _truncate(folder: Path) -> None:
    os.truncate(folder / "__0_0.distcp", 100)


def _flip(folder: Path) -> None:
    content = bytearray((folder / "__0_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "__0_0.distcp").write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no manifest": (
        lambda folder: (folder / "manifest.json").unlink(),
        "is partial: it has no manifest.json",
    ),
    "half a manifest": (
        lambda folder: os.truncate(folder / "manifest.json", 50),
        "manifest.json does not read",
    ),
    "other manifest": (
        lambda f: (f / "manifest.json").write_text((f / "manifest.json").read_text().replace('": 1', '": 2')),
        "checksum does not match",
    ),
    "file missing": (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "file cut": (_truncate, "__0_0.distcp has 100 bytes instead of"),
    "bit flipped": (_flip, "the contents of __0_0.distcp changed"),
    "index missing": (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
    "gone": (shutil.rmtree, "does not exist"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_by_name_and_a_whole_one_offered(tmp_path: Path, damage: str) -> None:
    for step in (3, 1, 2):
        _save(tmp_path / f"step={step}.ckpt", step)
    act, text = DAMAGES[damage]
    act(tmp_path / "step=2.ckpt")
    with pytest.raises(CheckpointError) as error:
        _loaded(tmp_path / "step=2.ckpt")
    assert text in str(error.value)
    assert "step=2.ckpt" in str(error.value)
    assert f"newest whole one beside it is {tmp_path / 'step=1.ckpt'}" in str(
        error.value
    )  # by time, not name
    assert is_checkpoint(tmp_path / "step=2.ckpt") == (damage == "bit flipped")
    _save(tmp_path / "step=2.ckpt", 4)
    assert _loaded(tmp_path / "step=2.ckpt") == 4


def test_every_rank_refuses_damage(tmp_path: Path) -> None:
    run_ranks(2, _save, tmp_path / "a.ckpt", 1)
    content = bytearray((tmp_path / "a.ckpt" / "__1_0.distcp").read_bytes())
    content[-1] ^= 1
    (tmp_path / "a.ckpt" / "__1_0.distcp").write_bytes(content)
    errors = run_ranks(2, lambda: _error_of(lambda: _loaded(tmp_path / "a.ckpt")))
    assert len(set(errors)) == 1
    assert "the contents of __1_0.distcp changed" in errors[0]
    assert "There is no whole one beside it" in errors[0]


# --- replacement


def test_replaces_what_has_the_name(tmp_path: Path) -> None:
    path = tmp_path / "best.ckpt"
    for step in range(3):
        _save(path, step)
        assert _loaded(path) == step
    shutil.rmtree(path)
    torch.save({"state_dict": {}}, path)  # a plain file of another strategy
    assert not is_checkpoint(path)
    _save(path, 3)
    assert _loaded(path) == 3
    assert os.listdir(tmp_path) == ["best.ckpt"]


def test_replaces_a_partial_one_of_other_software(tmp_path: Path) -> None:
    path = tmp_path / "step=4.ckpt"
    path.mkdir()
    (path / "__0_0.distcp").write_bytes(b"half")
    run_ranks(2, _save, path, 4, timeout_s=40)
    assert _loaded(path) == 4


def test_replaces_a_link_and_not_what_it_points_to(tmp_path: Path) -> None:
    _save(tmp_path / "step=1.ckpt", 1)
    (tmp_path / "last.ckpt").symlink_to("step=1.ckpt")
    assert _loaded(tmp_path / "last.ckpt") == 1
    _save(tmp_path / "last.ckpt", 2)
    assert (_loaded(tmp_path / "last.ckpt"), _loaded(tmp_path / "step=1.ckpt")) == (2, 1)


def test_does_not_replace_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("...")
    with pytest.raises(CheckpointError, match="folder with other contents"):
        _save(tmp_path / "thesis", 1)
    assert os.listdir(tmp_path) == ["thesis"]


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _save(Path("runs/optimizer_model_x/a.ckpt"), 1)
    assert _loaded(tmp_path / "runs/optimizer_model_x/a.ckpt") == 1
    assert read_metadata(f"file://{tmp_path}/runs/optimizer_model_x/a.ckpt") == {"step": 1}


# --- disks of their own


def _on_own_disk(folder: Path) -> tuple[list[str], int]:
    """Two nodes of two ranks: the same path, and another disk behind it."""
    node = folder / f"node{dist.get_rank() // 2}"
    node.mkdir(exist_ok=True)
    os.chdir(node)
    model = nn.ModuleDict({str(dist.get_rank()): _model(dist.get_rank(), 8)})
    save_checkpoint("a.ckpt", model=model, metadata={"step": 7})
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    step = load_checkpoint("a.ckpt", model=model)["step"]
    assert all(bool((parameter == dist.get_rank()).all()) for parameter in model.parameters())
    assert is_checkpoint("a.ckpt")
    return sorted(os.listdir("a.ckpt")), step


def test_every_node_has_its_own_disk(tmp_path: Path) -> None:
    results = run_ranks(4, _on_own_disk, tmp_path)
    files = [{name for name in names if name.endswith(".distcp")} for names, _ in results]
    assert files[0] == files[1] == {"__0_0.distcp", "__1_0.distcp"}
    assert files[2] == files[3] == {"__2_0.distcp", "__3_0.distcp"}
    assert [step for _, step in results] == [7] * 4
    with (
        pytest.raises(CheckpointError, match=r"__2_0.distcp was written on the disk of another node"),
        pytest.warns(UserWarning, match="Unexpected in the checkpoint"),
    ):
        load_checkpoint(tmp_path / "node0" / "a.ckpt", model=nn.ModuleDict({"2": _model(0, 8)}), strict=False)


def test_ranks_that_see_different_saves(tmp_path: Path) -> None:
    for node in range(2):
        _save(tmp_path / str(node) / "a.ckpt", node)

    def body() -> str:
        os.chdir(tmp_path / str(dist.get_rank()))
        return _error_of(lambda: _loaded(Path("a.ckpt")))

    errors = run_ranks(2, body)
    assert errors[0] == errors[1]
    assert "is not one checkpoint" in errors[0]
