# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint folder holds, and how one tells a whole one from the rest.

```
epoch=3.ckpt/
  manifest.json        every other file with its size and checksum; written last: without it, nothing is whole
  metadata.json        Lightning's dict: loops, callbacks, schedulers, hyperparameters
  metadata.pt          the tensors in it
  ranks.json, .pt      what single ranks added: random state, data position
  state.json           names: optimizer groups and state, tied parameters, extra states
  .metadata            torch.distributed.checkpoint's index of tensors
  __<rank>_<n>.distcp  the tensors
```
While it is being written the folder is called `.epoch=3.ckpt.saving-<id>`; the one that it replaces is called
`.epoch=3.ckpt.replaced-<id>` for the moment between the two renames where the file system cannot swap them.

At a remote address nothing can be renamed: the files are in `epoch=3.ckpt/data-<id>/` from the start, and the manifest,
which says so, makes them the checkpoint. A copy of such a folder on a disk is a checkpoint too.
"""

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightning_3d.checkpoint.places import Place, RemotePath
from lightning_3d.errors import CheckpointError

MANIFEST = "manifest.json"
METADATA = "metadata"
RANKS = "ranks"
STATE = "state.json"
DCP_INDEX = ".metadata"
FORMAT_VERSION = 2
_PLAIN_FORMAT_VERSION = 1
"""Of a folder without `data` and `link`: earlier versions of this package read it."""
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and checksum of a file as it was meant to be written."""

    num_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What makes a folder a checkpoint."""

    save_id: str
    created_ns: int
    """Time of the save, in ns since 1970."""
    world_size: int
    torch_version: str
    files: dict[str, FileRecord]
    """All files of the checkpoint by name, the manifest excepted."""
    here: tuple[str, ...]
    """Those of this folder: all of them, unless every node wrote to a disk of its own."""
    format_version: int = FORMAT_VERSION
    data: str = ""
    """Folder in this folder that has the files; empty if they are beside the manifest."""
    link: str = ""
    """The checkpoint beside this one that the name stands for; set when the manifest of a link is read."""


def files_of(folder: Place, manifest: Manifest) -> Place:
    """The folder in which a checkpoint's files are."""
    home = folder.parent / manifest.link if manifest.link else folder
    return home / manifest.data if manifest.data else home


def write_manifest(folder: Place, manifest: Manifest) -> None:
    """Writes the manifest with a checksum of itself, and makes it durable."""
    content = asdict(manifest)
    del content["link"]
    if not manifest.data:
        del content["data"]
        content["format_version"] = _PLAIN_FORMAT_VERSION
    _write_document(folder, content)


def write_link(folder: Place, target: str) -> None:
    """Makes a folder stand for the checkpoint `target` beside it, where the file system has no links."""
    _write_document(folder, {"link": target, "format_version": FORMAT_VERSION})


def _write_document(folder: Place, content: dict[str, Any]) -> None:
    document = {"manifest": content, "crc32": _self_checksum(content)}
    write_durably(folder / MANIFEST, json.dumps(document).encode())


def read_manifest(folder: Place) -> Manifest:
    """The manifest of a folder; of the checkpoint that it stands for, if it is a link.

    Raises:
        CheckpointError: no folder, no manifest (an unfinished save) or a damaged one. The message has no remedy;
            `refusal` adds one.
    """
    content = _read_document(folder)
    link = content.get("link", "")
    if not link:
        return _parsed(folder, content)
    if not _is_plain_name(link):
        raise CheckpointError(f"{folder} is not safe: it stands for {link!r}, which is not beside it.")
    try:
        return replace(_parsed(folder.parent / link, _read_document(folder.parent / link)), link=link)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} stands for {link}: {error}") from None


def _read_document(folder: Place) -> dict[str, Any]:
    try:
        document = json.loads((folder / MANIFEST).read_bytes())
        content: dict[str, Any] = document["manifest"]
        if document["crc32"] != _self_checksum(content):
            raise ValueError("its checksum does not match")
        version: int = content["format_version"]
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(_why_no_manifest(folder)) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} does not read ({error}).") from error
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has format {version}; this version of lightning_3d reads up to {FORMAT_VERSION}. "
            "Update lightning_3d."
        )
    return content


def _why_no_manifest(folder: Place) -> str:
    if folder.is_file():
        return f"{folder} is a file, not a checkpoint folder."
    if not (folder.exists() or folder.is_symlink()):
        return f"{folder} does not exist."
    return (
        f"{folder} is partial: it has no {MANIFEST}, so its save never finished, or other software wrote it."
    )


def _parsed(folder: Place, content: dict[str, Any]) -> Manifest:
    try:
        files = {name: FileRecord(**record) for name, record in content["files"].items()}
        manifest = Manifest(**{**content, "files": files, "here": tuple(content["here"])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} does not read ({error}).") from error
    if not all(map(_is_plain_name, files)) or not (manifest.data == "" or _is_plain_name(manifest.data)):
        raise CheckpointError(f"{folder} is not safe: its manifest names files outside the folder.")
    return manifest


def _is_plain_name(name: Any) -> bool:
    return isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..")


def check_sizes(folder: Place, manifest: Manifest) -> None:
    """Compares the folder's files with the manifest by presence and size.

    Raises:
        CheckpointError: names the files that are missing or cut short.
    """
    sizes = _sizes(files_of(folder, manifest), manifest.here)
    problems = []
    for name in manifest.here:
        expected = manifest.files[name].num_bytes
        if name not in sizes:
            problems.append(f"{name} is missing")
        elif sizes[name] != expected:
            problems.append(f"{name} has {sizes[name]} bytes instead of {expected}")
    if problems:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(problems[:8])}.")


def _sizes(files: Place, names: Iterable[str]) -> Mapping[str, int]:
    if isinstance(files, RemotePath):
        return files.sizes()  # one request
    sizes = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            sizes[name] = (files / name).stat().st_size
    return sizes


def check_contents(folder: Place, manifest: Manifest, names: Iterable[str]) -> None:
    """Reads the named files and compares their checksums.

    Raises:
        CheckpointError: names the files whose contents changed.
    """
    files = files_of(folder, manifest)
    changed = [name for name in names if file_checksum(files / name) != manifest.files[name].crc32]
    if changed:
        raise CheckpointError(
            f"{folder} is damaged: the contents of {', '.join(changed)} changed since the save."
        )


def file_checksum(path: Place) -> int:
    """CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def whole_manifest(folder: Place) -> Manifest | None:
    """The manifest of a folder that has all its files at their sizes, else None."""
    try:
        manifest = read_manifest(folder)
        check_sizes(folder, manifest)
    except (CheckpointError, OSError):
        return None
    return manifest


def newest_whole(parent: Place, other_than: Place | None = None) -> Place | None:
    """The whole checkpoint in `parent` that was saved last."""
    found: list[tuple[int, Place, Manifest]] = []
    for folder in parent.iterdir() if parent.is_dir() else ():
        if folder == other_than or folder.name.startswith(".") or folder.is_symlink():
            continue
        with contextlib.suppress(CheckpointError, OSError):
            manifest = read_manifest(folder)
            if not manifest.link:
                found.append((manifest.created_ns, folder, manifest))
    for _, folder, manifest in sorted(found, key=lambda entry: entry[:2], reverse=True):
        with contextlib.suppress(CheckpointError, OSError):
            check_sizes(folder, manifest)
            return folder
    return None


def refusal(path: Place, reason: str) -> CheckpointError:
    """The error for a checkpoint that cannot be loaded, with the newest whole one beside it as the remedy."""
    other = newest_whole(path.parent, other_than=path)
    remedy = f"The newest whole one beside it is {other}." if other else "There is no whole one beside it."
    return CheckpointError(f"{reason} {remedy}")


def write_durably(path: Place, content: bytes) -> FileRecord:
    """Writes a file and waits until it is on the disk, or the store has taken it."""
    if isinstance(path, RemotePath):
        path.write_bytes(content)
    else:
        with path.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
    return FileRecord(num_bytes=len(content), crc32=zlib.crc32(content))


def sync_folder(folder: Path) -> None:
    """Waits until the folder's names are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Place) -> None:
    """Removes a file, a link (not what it points to) or a folder, as far as it can; silent when there is none."""
    if isinstance(path, RemotePath):
        with contextlib.suppress(Exception):
            path.remove()
    elif path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _self_checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
