# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint is: a path on a mounted file system, or an address of a store that fsspec knows.

`RemotePath` has the part of pathlib's interface that checkpoints use, so that the code that reads and writes one is
the same for both. What differs, how a checkpoint gets its name, is in `renaming` and `pointing`.

[Note: remote files] Files are streamed: written in blocks as they are made, read in blocks as they are needed. Nothing
is put on a local disk, and a rank holds a few blocks at a time. Backends, credentials and endpoints are fsspec's own
(its configuration files, `FSSPEC_*` and the backend's environment variables).
"""

import contextlib
import io
import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from lightning_3d.errors import CheckpointError

PathLike = str | os.PathLike[str]
BLOCK_BYTES = 8 << 20
_MAX_BLOCKS = 4
_LOCAL = ("file://", "local://")


@dataclass(frozen=True, order=True)
class RemotePath(os.PathLike[str]):
    """A file or folder at an address such as `s3://bucket/run/last.ckpt`; folders are prefixes of names.

    The file system is asked for anew each time: fsspec keeps one for every thread, and not every backend can be
    used by two threads at once.
    """

    url: str
    """Without a slash at the end."""

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url}{'' if self.url.endswith('/') else '/'}{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The ending of the name, with its dot."""
        return os.path.splitext(self.name)[1]

    @property
    def parent(self) -> "RemotePath":
        """The folder that this is in."""
        above = self.url.rpartition("/")[0]
        return RemotePath(f"{above}/" if above.endswith(":/") else above)

    def _located(self) -> tuple[Any, str]:
        """The file system, and this address as it calls it."""
        return fsspec.core.url_to_fs(self.url)

    def _info(self) -> dict[str, Any] | None:
        """What the store says of this name now; None if it has none. Other errors are raised."""
        fs, path = self._located()
        fs.invalidate_cache(path)  # other processes write here too
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return dict(fs.info(path))
        return None

    def exists(self) -> bool:
        """Whether there is a file of this name, or files below it."""
        return self._info() is not None

    def is_file(self) -> bool:
        """Whether there is a file of this name."""
        info = self._info()
        return info is not None and info["type"] == "file"

    def is_dir(self) -> bool:
        """Whether there are files below this name."""
        info = self._info()
        return info is not None and info["type"] == "directory"

    def is_symlink(self) -> bool:
        """Stores have no links."""
        return False

    def _listed(self) -> dict[str, dict[str, Any]]:
        fs, path = self._located()
        fs.invalidate_cache(path)
        try:
            entries = fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        own = path.strip("/")
        named = ((entry["name"].strip("/"), entry) for entry in entries)
        return {name.rpartition("/")[2]: entry for name, entry in named if name != own}

    def iterdir(self) -> Iterator["RemotePath"]:
        """What is directly below this name; nothing where there is nothing."""
        return iter([self / name for name in sorted(self._listed())])

    def sizes(self) -> dict[str, int]:
        """The files directly below this name, with their sizes in bytes."""
        sizes = {name: entry["size"] for name, entry in self._listed().items() if entry["type"] == "file"}
        return {name: self._size(name) if size is None else size for name, size in sizes.items()}

    def _size(self, name: str) -> int:
        info = (self / name)._info()  # a listing of http:// has no sizes
        return -1 if info is None or info["size"] is None else int(info["size"])

    def read_bytes(self) -> bytes:
        """A small file."""
        fs, path = self._located()
        return bytes(fs.cat_file(path))

    def write_bytes(self, content: bytes) -> None:
        """Writes a small file in one step: with object stores it is there, whole, or it is not."""
        fs, path = self._located()
        try:
            fs.pipe_file(path, content)
        except FileNotFoundError:  # a file system with real folders; never a bucket that does not exist
            top = path.partition("/")[0]
            if top and not RemotePath(fs.unstrip_protocol(top)).exists():
                raise
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            fs.pipe_file(path, content)

    @contextlib.contextmanager
    def open(self, mode: str = "rb") -> Iterator[Any]:
        """A stream to read from anywhere in a file, or to write one from front to back.

        A file that is being written gets its name when the context ends well, with object stores.
        """
        fs, path = self._located()
        if mode == "rb":
            yield io.BufferedReader(_Blocks(fs, path), 1 << 16)
            return
        raw = fs.open(path, mode)
        try:
            yield _Upload(raw)
            raw.close()
        except BaseException:
            _abandon(raw)
            raise

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Folders come with the files in them."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes a file."""
        fs, path = self._located()
        try:
            fs.rm_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rename(self, target: "RemotePath") -> None:
        """Gives a small file another name, by way of this process: stores cannot."""
        target.write_bytes(self.read_bytes())
        self.unlink()

    def remove(self) -> None:
        """Removes a file, or everything below this name; silent when there is none."""
        fs, path = self._located()
        fs.invalidate_cache(path)
        with contextlib.suppress(FileNotFoundError):
            fs.rm(path, recursive=True)


Place = Path | RemotePath


def place_of(path: PathLike) -> Place:
    """What a user's path means.

    Raises:
        CheckpointError: an address of a protocol that fsspec does not know, or whose package is not installed.
    """
    text = os.fspath(path)
    for prefix in _LOCAL:
        text = text.removeprefix(prefix)
    if "://" not in text:
        return Path(os.path.abspath(text))
    protocol, _, name = text.partition("://")
    if "::" in text or any(mark in name for mark in "*?["):
        raise CheckpointError(
            f"{text} is not the address of one place. Leave out chained protocols (::) and the marks * ? and [."
        )
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise CheckpointError(f"{text}: the package for {protocol}:// is not installed. {error}") from error
    except ValueError:
        raise CheckpointError(
            f"{text}: fsspec has no protocol {protocol!r}. Use one that it has (s3, gs, abfs, ...), or register yours "
            "with fsspec.register_implementation."
        ) from None
    return RemotePath(f"{protocol}://{name.rstrip('/')}")


class _Blocks(io.RawIOBase):
    """A remote file, read in blocks of which a few are kept."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path
        fs.invalidate_cache(path)
        self._size = int(fs.info(path)["size"])
        self._position = 0
        self._kept: OrderedDict[int, bytes] = OrderedDict()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")
        start = self._position % BLOCK_BYTES
        if self._position >= self._size:
            return 0
        piece = self._block(self._position // BLOCK_BYTES)[start : start + len(room)]
        room[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def _block(self, number: int) -> bytes:
        if number not in self._kept:
            start = number * BLOCK_BYTES
            end = min(start + BLOCK_BYTES, self._size)
            content = self._fs.cat_file(self._path, start=start, end=end)
            if len(content) != end - start:
                raise OSError(f"{self._path} ends at {start + len(content)} instead of {self._size} bytes")
            self._kept[number] = content
            if len(self._kept) > _MAX_BLOCKS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return self._kept[number]


class _Upload(io.RawIOBase):
    """A remote file that is being written, in small writes: a backend keeps what one write brings in memory."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BLOCK_BYTES):
            self._raw.write(view[start : start + BLOCK_BYTES])
        return len(view)


def _abandon(raw: Any) -> None:
    """Drops a file that is being written, and what the store has of it, as far as the backend can."""
    with contextlib.suppress(Exception):
        raw.discard()
    with contextlib.suppress(Exception):
        raw.closed = True  # or closing it, at the latest when it is collected, would finish the upload
