# SPDX-License-Identifier: Apache-2.0
"""Remote checkpoints whose saves fail or die, and whose objects are damaged: whole or not there, and told by name."""

import json
import os
import pickle
import random
import signal
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from lightning_3d.checkpoint import (
    is_checkpoint,
    remove_checkpoint,
    save_checkpoint,
)
from lightning_3d.checkpoint.commit import unfinished
from lightning_3d.checkpoint.folder import read_manifest
from lightning_3d.checkpoint.places import place_of
from tests.checkpoint.remote import error_of, loaded, model_of, save
from tests.harness import RanksError, run_ranks
from tests.object_store import ObjectStore, die, fail, file_of, names

# --- failures


FAULTS = {
    "may not write": (1, "put", ".rank-1", PermissionError("403 Forbidden"), "[rank 1] PermissionError"),
    "store is full": (1, "part", "__1_0", OSError(28, "No space left"), "[rank 1] OSError: [Errno 28]"),
    "error of a backend": (2, "part", "__2_0", RuntimeError("500, try later"), "[rank 2] RuntimeError: 500"),
    "at the end of a file": (2, "put", "__2_0", TimeoutError("unreachable"), "[rank 2] TimeoutError"),
    "index": (0, "put", ".metadata", ConnectionError("reset"), "[rank 0] ConnectionError: reset"),
    "metadata": (0, "put", "metadata.json", ConnectionError("reset"), "[rank 0] ConnectionError: reset"),
    "manifest": (0, "put", "manifest.json", PermissionError("403"), "[rank 0] PermissionError: 403"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_error_of_one_rank_is_everybodys(bucket: str, name: str) -> None:
    rank, kind, part, error, text = FAULTS[name]
    path = f"{bucket}/last.ckpt"
    save(path, 1)
    before = names()

    def body() -> str:
        if dist.get_rank() == rank:
            fail(kind, part, error)
        model = nn.ModuleDict({str(dist.get_rank()): model_of(3, 200)})
        return error_of(lambda: save_checkpoint(path, model=model, metadata={}))

    errors = run_ranks(3, body, timeout_s=40)
    assert len(set(errors)) == 1
    assert text in errors[0]
    assert loaded(path) == 1
    assert names() == before  # nothing is left of it


def test_a_rank_that_dies_in_its_upload(bucket: str) -> None:
    """The ranks that live say so; what is left is not taken for a checkpoint, and the next save clears it up."""
    path = f"{bucket}/a.ckpt"
    for step in (1, 2):
        save(f"{bucket}/step={step}.ckpt", step)

    def body() -> None:
        if dist.get_rank() == 1:
            die("part", "__1_0", after=1)
        save_checkpoint(path, model=nn.ModuleDict({str(dist.get_rank()): model_of(3, 200)}), metadata={})

    with pytest.raises(RanksError) as error:
        run_ranks(3, body, timeout_s=40)
    assert {error.value.failures[rank].type_name for rank in (0, 2)} == {"CheckpointError"}
    assert not is_checkpoint(path)
    assert loaded(f"{bucket}/step=2.ckpt") == 2
    save(path, 4)
    assert loaded(path) == 4
    assert len(names("bucket/run/a.ckpt")) == 5


@pytest.mark.parametrize("moment", [("put", "state.json"), ("put", ".metadata"), ("put", "manifest.json")])
def test_a_process_that_dies_at_each_step(bucket: str, moment: tuple[str, str]) -> None:
    """First where there is no checkpoint of the name, then where there is one."""
    save(f"{bucket}/step=1.ckpt", 1)
    _killed(lambda: save(f"{bucket}/step=2.ckpt", 2), *moment)
    text = error_of(lambda: loaded(f"{bucket}/step=2.ckpt"))
    assert f"{bucket}/step=2.ckpt is partial: it has no manifest.json" in text
    assert f"newest whole one beside it is {bucket}/step=1.ckpt" in text
    assert unfinished(place_of(bucket)) == ["step=2.ckpt (not whole)"]
    _killed(lambda: save(f"{bucket}/step=1.ckpt", 3), *moment)
    assert loaded(f"{bucket}/step=1.ckpt") == 1
    save(f"{bucket}/step=1.ckpt", 4)
    save(f"{bucket}/step=2.ckpt", 5)
    assert (loaded(f"{bucket}/step=1.ckpt"), loaded(f"{bucket}/step=2.ckpt")) == (4, 5)
    assert len(names()) == 10


def test_a_process_that_dies_behind_the_manifest(bucket: str) -> None:
    """The new one stands; what is left of the old one goes with the next save."""
    save(f"{bucket}/a.ckpt", 1)
    _killed(lambda: save(f"{bucket}/a.ckpt", 2), "delete", "__0_0")
    assert loaded(f"{bucket}/a.ckpt") == 2
    assert len(names()) > 5
    save(f"{bucket}/a.ckpt", 3)
    assert len(names()) == 5


def _killed(action: Callable[[], Any], *moment: str) -> None:
    child = os.fork()
    if child == 0:
        die(*moment)
        with suppress(BaseException):
            action()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_kills_at_any_moment(bucket: str) -> None:
    path = f"{bucket}/last.ckpt"
    started = time.monotonic()
    save(path, 0)
    save_s = time.monotonic() - started
    generator = random.Random(0)
    for _ in range(12):
        before = loaded(path)
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                for step in range(before + 1, before + 1000):
                    save(path, step)
            os._exit(1)
        time.sleep(generator.uniform(0, 5 * save_s))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert loaded(path) >= before
    assert loaded(path) > 0
    save(path, 5000)
    assert len(names()) == 5


def test_a_manifest_whose_answer_is_lost(bucket: str) -> None:
    """The save is told to have failed, and stands: what the manifest points to is not cleared away."""
    save(f"{bucket}/a.ckpt", 1)
    fail("done", "manifest.json", TimeoutError("no answer"))
    assert "TimeoutError: no answer" in error_of(lambda: save(f"{bucket}/a.ckpt", 2))
    ObjectStore.fault = None
    assert loaded(f"{bucket}/a.ckpt") == 2
    save(f"{bucket}/a.ckpt", 3)
    assert len(names()) == 5


def test_a_store_that_goes_away_behind_the_manifest(bucket: str) -> None:
    """The save is done; what it replaces is removed by the next one."""
    save(f"{bucket}/a.ckpt", 1)
    gone = []

    def fault(kind: str, name: str) -> None:
        if gone:
            raise ConnectionError("gone")
        gone.extend([name] if (kind, name.rpartition("/")[2]) == ("done", "manifest.json") else [])

    ObjectStore.fault = staticmethod(fault)
    save(f"{bucket}/a.ckpt", 2)
    ObjectStore.fault = None
    assert loaded(f"{bucket}/a.ckpt") == 2
    assert len(names()) == 9
    save(f"{bucket}/a.ckpt", 3)
    assert len(names()) == 5


def test_a_store_that_goes_away_before_the_manifest(bucket: str) -> None:
    """Nothing can be told or cleared up; the next save does."""
    save(f"{bucket}/a.ckpt", 1)
    gone = []

    def fault(kind: str, name: str) -> None:
        gone.extend([name] if (kind, name.rpartition("/")[2]) == ("put", "manifest.json") else [])
        if gone:
            raise ConnectionError("gone")

    ObjectStore.fault = staticmethod(fault)
    assert "ConnectionError: gone" in error_of(lambda: save(f"{bucket}/a.ckpt", 2))
    ObjectStore.fault = None
    assert loaded(f"{bucket}/a.ckpt") == 1
    save(f"{bucket}/a.ckpt", 3)
    assert len(names()) == 5


def test_removal_that_dies_or_is_refused(bucket: str) -> None:
    save(f"{bucket}/a.ckpt", 1)
    save(f"{bucket}/b.ckpt", 2)
    _killed(lambda: remove_checkpoint(f"{bucket}/b.ckpt"), "delete", "data-")
    assert "is partial" in error_of(lambda: loaded(f"{bucket}/b.ckpt"))  # its name was the first to go
    remove_checkpoint(f"{bucket}/b.ckpt")
    assert names("bucket/run/b.ckpt") == []
    fail("delete", "a.ckpt", PermissionError("403"))
    with pytest.warns(UserWarning, match=r"a.ckpt could not be removed: PermissionError: 403"):
        remove_checkpoint(f"{bucket}/a.ckpt")
    assert loaded(f"{bucket}/a.ckpt") == 1


# --- damage


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _other_manifest(file: Path) -> None:
    file.write_text(file.read_text().replace("data-", "../data-"))


DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "no manifest": ("2.ckpt/manifest.json", Path.unlink, "is partial: it has no manifest.json"),
    "half a manifest": ("2.ckpt/manifest.json", lambda file: os.truncate(file, 50), "does not read"),
    "other manifest": ("2.ckpt/manifest.json", _other_manifest, "checksum does not match"),
    "object missing": ("__0_0.distcp", Path.unlink, "__0_0.distcp is missing"),
    "object cut": ("__0_0.distcp", lambda file: os.truncate(file, 100), "__0_0.distcp has 100 bytes instead"),
    "bit flipped": ("__0_0.distcp", _flip, "the contents of __0_0.distcp changed"),
    "bit of the index flipped": (".metadata", _flip, "the contents of .metadata changed"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_by_name_and_a_whole_one_offered(bucket: str, damage: str) -> None:
    save(f"{bucket}/step=2.ckpt", 2)
    name, act, text = DAMAGES[damage]
    file = file_of(name)
    save(f"{bucket}/step=1.ckpt", 1)
    act(file)

    errors = run_ranks(2, lambda: error_of(lambda: loaded(f"{bucket}/step=2.ckpt")))
    assert len(set(errors)) == 1
    assert text in errors[0]
    assert f"{bucket}/step=2.ckpt" in errors[0]
    assert f"newest whole one beside it is {bucket}/step=1.ckpt" in errors[0]
    save(f"{bucket}/step=2.ckpt", 4)
    assert loaded(f"{bucket}/step=2.ckpt") == 4


def test_a_hostile_index_runs_nothing(bucket: str, tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "owned"),)

    save(f"{bucket}/a.ckpt", 1)
    place = place_of(f"{bucket}/a.ckpt")
    manifest = read_manifest(place)
    (place / manifest.data / ".metadata").write_bytes(pickle.dumps(Hostile()))
    error_of(lambda: loaded(f"{bucket}/a.ckpt"))
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "content", [{"link": "../other/a.ckpt"}, {"data": "../a.ckpt"}, {"data": ".."}, {"link": 3}]
)
def test_a_manifest_that_points_elsewhere_is_not_safe(bucket: str, content: dict[str, Any]) -> None:
    save(f"{bucket}/a.ckpt", 1)
    file = file_of("manifest.json")
    stored = {**json.loads(file.read_text())["manifest"], **content}
    crc32 = zlib.crc32(json.dumps(stored, sort_keys=True).encode())
    file.write_text(json.dumps({"manifest": stored, "crc32": crc32}))
    assert "is not safe" in error_of(lambda: loaded(f"{bucket}/a.ckpt"))


def test_earlier_versions_read_what_is_on_a_disk(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", 1)
    stored = json.loads((tmp_path / "a.ckpt" / "manifest.json").read_text())["manifest"]
    assert stored["format_version"] == 1
    assert not {"data", "link"} & stored.keys()


def test_an_object_that_the_store_lost_is_not_committed(bucket: str) -> None:
    """The manifest is written when the store has every file at its size."""
    save(f"{bucket}/a.ckpt", 1)

    def lose(kind: str, name: str) -> None:
        if kind == "put" and name.endswith("state.json"):
            for file in ObjectStore.root.glob("*__0_0.distcp"):
                if file.stat().st_mtime_ns > newest:
                    file.unlink()

    newest = max(file.stat().st_mtime_ns for file in ObjectStore.root.iterdir())
    ObjectStore.fault = staticmethod(lose)
    assert "__0_0.distcp is missing" in error_of(lambda: save(f"{bucket}/a.ckpt", 2))
    ObjectStore.fault = None
    assert loaded(f"{bucket}/a.ckpt") == 1
