# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at remote addresses: in any layout, by ranges, linked, in the background; and the addresses."""

import os
import pickle
import tempfile
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import fsspec
import pytest
import torch.distributed as dist
from fsspec.registry import known_implementations
from torch import nn

from lightning_3d.checkpoint import (
    AsyncCheckpointer,
    export_lightning,
    export_safetensors,
    import_weights,
    is_checkpoint,
    link_checkpoint,
    load_checkpoint,
    load_full_state_dict,
    load_weights,
    newest_checkpoint,
    places,
    read_metadata,
    remove_checkpoint,
    save_checkpoint,
)
from lightning_3d.checkpoint.folder import read_manifest
from lightning_3d.checkpoint.places import RemotePath, place_of
from lightning_3d.errors import CheckpointError
from tests.checkpoint.layouts import LAYOUTS, assert_same, build, train, whole_state
from tests.checkpoint.remote import error_of, loaded, model_of, save
from tests.harness import run_ranks
from tests.object_store import ObjectStore, fail, names

pytestmark = pytest.mark.filterwarnings("ignore:.*had no gradient")


# --- saving and loading


def test_one_process(memory: str) -> None:
    path = f"{memory}/a.ckpt"
    for step in range(3):
        save(path, step)
        assert loaded(path) == step
    assert is_checkpoint(path)
    assert read_metadata(path) == {"step": 2}
    assert load_full_state_dict(path)["bias"].tolist() == [2.0] * 64
    files = fsspec.filesystem("memory").find("/run")
    data = read_manifest(place_of(path)).data
    assert data.startswith("data-")
    assert {os.path.dirname(file) for file in files} == {"/run/a.ckpt", f"/run/a.ckpt/{data}"}  # nothing old
    newest = newest_checkpoint(memory)
    assert str(newest) == path
    assert newest is not None
    assert loaded(newest) == 2
    remove_checkpoint(path)
    assert fsspec.filesystem("memory").find("/run") == []
    assert newest_checkpoint(memory) is None
    remove_checkpoint(path)


@pytest.mark.parametrize(("saver", "loader"), [("dp2tp2", "pp2"), ("pp2", "dp2tp2"), ("hsdp2x2", "one")])
def test_any_layout(bucket: str, tmp_path: Path, saver: str, loader: str) -> None:
    """Saved in one layout, loaded in another: model, optimizers and the next step bit-equal."""
    layouts = {layout.name: layout for layout in LAYOUTS}

    def write() -> None:
        model, optimizers = build(layouts[saver])
        train(model, optimizers, [0])
        save_checkpoint(f"{bucket}/a.ckpt", model=model, optimizers=optimizers, metadata={"n": 1})
        now = whole_state(model, optimizers)
        train(model, optimizers, [1])
        later = whole_state(model, optimizers)
        if dist.get_rank() == 0:
            (tmp_path / "states").write_bytes(pickle.dumps((now, later)))

    def load() -> None:
        model, optimizers = build(layouts[loader], seed=1)
        assert load_checkpoint(f"{bucket}/a.ckpt", model=model, optimizers=optimizers) == {"n": 1}
        now, later = pickle.loads((tmp_path / "states").read_bytes())
        assert_same(whole_state(model, optimizers), now)
        train(model, optimizers, [1])
        assert_same(whole_state(model, optimizers), later)

    world = layouts[saver].world_size
    run_ranks(world, write)
    data = [name for name in names() if name.endswith(".distcp")]
    assert [name.rpartition("/")[2] for name in data] == [f"__{rank}_0.distcp" for rank in range(world)]
    if loader == "one":
        load()
    else:
        run_ranks(layouts[loader].world_size, load)


def test_each_rank_writes_its_own_and_reads_its_own(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the check of checksums, which the ranks share, a rank fetches the ranges that it needs."""
    monkeypatch.setattr(places, "BLOCK_BYTES", 1 << 14)
    size = 256
    part_bytes = size * size * 4

    def body() -> tuple[int, int, int]:
        rank = dist.get_rank()
        model = nn.ModuleDict({str(rank): model_of(rank, size)})
        ObjectStore.requests.clear()
        save_checkpoint(f"{bucket}/a.ckpt", model=model, metadata={})
        wrote = sum(count for kind, _, count in ObjectStore.requests if kind == "part")
        ObjectStore.requests.clear()
        load_checkpoint(f"{bucket}/a.ckpt", model=model)
        gets = [count for kind, _, count in ObjectStore.requests if kind == "get"]
        return wrote, sum(gets), max(gets)

    for wrote, read, largest in run_ranks(4, body):
        assert part_bytes < wrote < 1.1 * part_bytes
        assert read < 2.3 * part_bytes  # its share of the check, and its own tensors
        assert largest < 20_000


def test_a_copy_of_the_folder_on_a_disk(bucket: str, tmp_path: Path) -> None:
    """And a folder of a disk that is copied to a store."""
    save(f"{bucket}/a.ckpt", 3)
    fs = fsspec.filesystem("objects")
    for name in names():
        target = tmp_path / "copy" / name.removeprefix("bucket/run/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(fs.cat_file(name))
    assert loaded(tmp_path / "copy" / "a.ckpt") == 3
    save(tmp_path / "b.ckpt", 4)
    for file in (tmp_path / "b.ckpt").iterdir():
        fs.pipe_file(f"bucket/run/b.ckpt/{file.name}", file.read_bytes())
    assert loaded(f"{bucket}/b.ckpt") == 4
    assert str(newest_checkpoint(bucket)) == f"{bucket}/b.ckpt"
    save(f"{bucket}/b.ckpt", 5)
    assert loaded(f"{bucket}/b.ckpt") == 5
    assert len(names("bucket/run/b.ckpt")) == 5
    save(tmp_path / "copy" / "a.ckpt", 6)  # on the disk again
    assert loaded(tmp_path / "copy" / "a.ckpt") == 6


def test_ranks_with_stores_of_their_own(memory: str) -> None:
    """`memory://` lives in one process: as with disks of their own, every rank keeps and finds its part."""

    def body() -> int:
        model = nn.ModuleDict({str(dist.get_rank()): model_of(dist.get_rank())})
        save_checkpoint(f"{memory}/a.ckpt", model=model, metadata={"step": 7})
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        step = load_checkpoint(f"{memory}/a.ckpt", model=model)["step"]
        assert all(bool((parameter == dist.get_rank()).all()) for parameter in model.parameters())
        return int(step)

    assert run_ranks(2, body) == [7, 7]


def test_links(bucket: str) -> None:
    save(f"{bucket}/step=1.ckpt", 1)
    link_checkpoint(f"{bucket}/step=1.ckpt", f"{bucket}/last.ckpt")
    assert loaded(f"{bucket}/last.ckpt") == 1
    assert len(names("bucket/run/last.ckpt")) == 1
    assert str(newest_checkpoint(bucket)) == f"{bucket}/step=1.ckpt"
    save(f"{bucket}/step=2.ckpt", 2)
    link_checkpoint(f"{bucket}/step=2.ckpt", f"{bucket}/last.ckpt")
    remove_checkpoint(f"{bucket}/step=1.ckpt")
    assert loaded(f"{bucket}/last.ckpt") == 2
    save(f"{bucket}/step=2.ckpt", 3)  # the link stands for the name
    assert loaded(f"{bucket}/last.ckpt") == 3
    remove_checkpoint(f"{bucket}/step=2.ckpt")
    assert "stands for step=2.ckpt" in error_of(lambda: loaded(f"{bucket}/last.ckpt"))
    save(f"{bucket}/last.ckpt", 4)
    assert loaded(f"{bucket}/last.ckpt") == 4
    assert {name.split("/")[2] for name in names()} == {"last.ckpt"}
    remove_checkpoint(f"{bucket}/last.ckpt")
    assert names() == []


# --- in the background


def test_in_the_background(bucket: str) -> None:
    """Training's process goes on while a slow store takes its time; an error comes with the next call."""

    def body() -> str:
        ObjectStore.latency_s = 0.03
        checkpointer = AsyncCheckpointer()
        model = nn.ModuleDict({str(dist.get_rank()): model_of(1, 400)})
        started = time.monotonic()
        checkpointer.save(f"{bucket}/a.ckpt", model=model, metadata={"step": 1})
        staged_s = time.monotonic() - started
        assert checkpointer.in_flight == place_of(f"{bucket}/a.ckpt")
        assert not is_checkpoint(f"{bucket}/a.ckpt")
        seen = set()
        while checkpointer.in_flight:
            seen.add(checkpointer.progress())
            time.sleep(0.005)
        checkpointer.wait()
        assert staged_s < time.monotonic() - started - 0.2
        assert any(0 < share < 1 for share in seen)
        assert is_checkpoint(f"{bucket}/a.ckpt")
        if dist.get_rank() == 1:
            fail("part", "__1_0", OSError(28, "No space left"))
        checkpointer.save(f"{bucket}/b.ckpt", model=model, metadata={"step": 2})
        checkpointer.after_commit(lambda: remove_checkpoint(f"{bucket}/a.ckpt"))
        text = error_of(checkpointer.wait)
        checkpointer.close()
        return text

    errors = run_ranks(2, body)
    assert len(set(errors)) == 1
    assert "[rank 1] OSError: [Errno 28]" in errors[0]
    assert is_checkpoint(f"{bucket}/a.ckpt")
    assert names("bucket/run/b.ckpt") == []


def test_one_is_whole_at_every_moment(bucket: str) -> None:
    save(f"{bucket}/last.ckpt", 0)
    seen, done = [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            with suppress(CheckpointError):
                seen.append(read_metadata(f"{bucket}/last.ckpt")["step"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    checkpointer = AsyncCheckpointer()
    for step in range(1, 6):
        checkpointer.save(f"{bucket}/last.ckpt", model=model_of(step), metadata={"step": step})
    checkpointer.close()
    done.set()
    watcher.join()
    assert seen == sorted(seen)
    assert loaded(f"{bucket}/last.ckpt") == 5


# --- addresses


def test_addresses_that_do_not_work() -> None:
    for address, text in {
        "nowhere://a/b.ckpt": "no protocol 'nowhere'. Use one that it has",
        "simplecache::memory://a.ckpt": "not the address of one place",
        "memory://run/[a].ckpt": "not the address of one place",
    }.items():
        assert text in error_of(lambda address=address: save(address, 1))
        with pytest.raises(CheckpointError):
            is_checkpoint(address)


def test_a_backend_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"class": "no_such_package.FileSystem", "err": "Install no_such_package to access nosuch"}
    monkeypatch.setitem(known_implementations, "nosuch", entry)
    text = error_of(lambda: save("nosuch://a/b.ckpt", 1))
    assert "the package for nosuch:// is not installed. Install no_such_package to access nosuch" in text


def test_remote_paths() -> None:
    path = place_of("memory://a/b=1.ckpt/")
    assert path == RemotePath("memory://a/b=1.ckpt")
    assert (path.name, path.suffix, str(path.parent)) == ("b=1.ckpt", ".ckpt", "memory://a")
    assert str(path.parent.parent / "c") == "memory://c"
    assert str(place_of("memory://a.ckpt").parent / "b.ckpt") == "memory://b.ckpt"
    assert place_of("file:///a/b") == place_of("local:///a/b") == Path("/a/b")
    assert pickle.loads(pickle.dumps(path)) == path


def test_does_not_replace_a_folder_of_something_else(bucket: str) -> None:
    (place_of(bucket) / "thesis" / "chapter1.tex").write_bytes(b"...")
    assert "folder with other contents" in error_of(lambda: save(f"{bucket}/thesis", 1))
    assert names() == ["bucket/run/thesis/chapter1.tex"]


# --- files of others


def test_weights_out_and_in(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    save(f"{bucket}/a.ckpt", 3)
    export_safetensors(f"{bucket}/a.ckpt", f"{bucket}/export", max_file_bytes=10_000)
    export_lightning(f"{bucket}/a.ckpt", f"{bucket}/plain.ckpt")
    import_weights(f"{bucket}/export", f"{bucket}/b.ckpt", metadata={"step": 3})
    assert loaded(f"{bucket}/b.ckpt") == 3
    for source in ("export", "plain.ckpt", "export/model-00001-of-00002.safetensors"):
        model = model_of(0)
        with nullcontext() if "model-" not in source else pytest.warns(UserWarning, match="Missing"):
            load_weights(f"{bucket}/{source}", model=model, strict="model-" not in source)
        assert model.weight.unique().tolist() in ([3.0], [0.0])
    assert "replaces nothing" in error_of(lambda: export_safetensors(f"{bucket}/a.ckpt", f"{bucket}/export"))
    assert list(tmp_path.iterdir()) == [ObjectStore.root]
