# SPDX-License-Identifier: Apache-2.0
"""No code runs from a checkpoint: files that would create a file when unpickled are refused, and create none."""

import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from lightning_3d.checkpoint import load_checkpoint, load_full_state_dict, read_metadata, save_checkpoint
from lightning_3d.checkpoint.folder import FileRecord, file_checksum, read_manifest, write_manifest
from lightning_3d.checkpoint.safe_index import read_index
from lightning_3d.errors import CheckpointError


class _Creates:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "a.ckpt", model=nn.Linear(4, 4), metadata={"t": torch.ones(2)})
    return tmp_path / "a.ckpt"


def _sign(folder: Path, name: str) -> None:
    """Makes the manifest agree with a file that was changed: checksums are no defence against intent."""
    manifest = read_manifest(folder)
    size = (folder / name).stat().st_size
    manifest.files[name] = FileRecord(num_bytes=size, crc32=file_checksum(folder / name))
    write_manifest(folder, manifest)


def _index(folder: Path) -> Metadata:
    return read_index(folder, read_manifest(folder).files)


def _refused(folder: Path, evidence: Path, match: str) -> None:
    for load in (
        lambda: load_checkpoint(folder, model=nn.Linear(4, 4)),
        lambda: load_full_state_dict(folder),
    ):
        with pytest.raises(CheckpointError, match=match):
            load()
    assert not evidence.exists()


def test_hostile_index(checkpoint: Path, tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(_Creates(evidence)))
    _sign(checkpoint, ".metadata")
    _refused(checkpoint, evidence, r"not safe: .metadata asks for posix.mkdir")


def test_hostile_object_inside_a_real_index(checkpoint: Path, tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    index = _index(checkpoint)
    index.planner_data = _Creates(evidence)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    _sign(checkpoint, ".metadata")
    _refused(checkpoint, evidence, "not safe")


def test_hostile_tensor_file(checkpoint: Path, tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    index, buffer = _index(checkpoint), io.BytesIO()
    torch.save(_Creates(evidence), buffer)
    content = buffer.getvalue()
    (checkpoint / "__0_0.distcp").write_bytes(content)
    for place in index.storage_data.values():
        place.offset, place.length = 0, len(content)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    _sign(checkpoint, ".metadata")
    _sign(checkpoint, "__0_0.distcp")
    _refused(checkpoint, evidence, "Weights only load failed|UnpicklingError")


def test_hostile_metadata(checkpoint: Path, tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    torch.save({"0": _Creates(evidence)}, checkpoint / "metadata.pt")
    _sign(checkpoint, "metadata.pt")
    for load in (
        lambda: load_checkpoint(checkpoint, model=nn.Linear(4, 4)),
        lambda: read_metadata(checkpoint),
    ):
        with pytest.raises(CheckpointError, match="does not read"):
            load()
    assert not evidence.exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", ".."])
def test_an_index_that_points_outside(checkpoint: Path, name: str) -> None:
    index = _index(checkpoint)
    for place in index.storage_data.values():
        place.relative_path = name
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    _sign(checkpoint, ".metadata")
    with pytest.raises(CheckpointError, match="not safe: it points to"):
        load_full_state_dict(checkpoint)


def test_a_manifest_that_points_outside(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    manifest.files["../outside"] = FileRecord(num_bytes=1, crc32=1)
    write_manifest(checkpoint, manifest)
    with pytest.raises(CheckpointError, match="names files outside"):
        load_full_state_dict(checkpoint)


def test_no_pickled_index_of_other_types(checkpoint: Path) -> None:
    for content in (pickle.dumps([1]), pickle.dumps(Metadata({})), b"", b"not a pickle"):
        (checkpoint / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError):
            _index(checkpoint)


def test_what_is_stored_as_text_is_json(checkpoint: Path) -> None:
    for name in ("manifest.json", "metadata.json", "state.json"):
        json.loads((checkpoint / name).read_text())
