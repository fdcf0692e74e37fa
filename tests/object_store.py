# SPDX-License-Identifier: Apache-2.0
"""A store of objects that forked ranks share, for tests: `objects://bucket/name`, spoken by fsspec.

It has what checkpoints meet in S3 and its like: flat names, no folders, no rename, objects that appear whole when
their upload is complete, uploads in parts, and listings that a client remembers until it is told not to. Requests can
be slow, fail, or end the process.
"""

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class ObjectStore(AbstractFileSystem):  # type: ignore[misc]
    """Objects are files of one folder, under their quoted names."""

    protocol = "objects"
    cachable = True  # codespell:ignore
    root = Path()
    latency_s = 0.0
    fault: Callable[[str, str], None] | None = None
    """Called with each request and its name (`"put", "bucket/a"`), and with `"done"` when an object is there; what it
    raises is the answer."""
    requests: list[tuple[str, str, int]] = []  # noqa: RUF012  # of this process
    """Kind, name and bytes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.remembered: dict[str, list[dict[str, Any]]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("objects://").strip("/")

    def request(self, kind: str, name: str, num_bytes: int = 0) -> None:
        time.sleep(self.latency_s)
        ObjectStore.requests.append((kind, name, num_bytes))
        if ObjectStore.fault is not None:
            ObjectStore.fault(kind, name)

    def file(self, name: str) -> Path:
        return self.root / quote(name, safe="")

    def put(self, name: str, content: bytes) -> None:
        self.request("put", name, len(content))
        part = self.root / f"%part-{uuid.uuid4().hex}"
        part.write_bytes(content)
        part.rename(self.file(name))
        self.remembered.clear()
        if ObjectStore.fault is not None:
            ObjectStore.fault("done", name)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.remembered.clear()

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        path = self._strip_protocol(path)
        if path not in self.remembered:
            self.request("list", path)
            self.remembered[path] = self._listed(path)
        entries = self.remembered[path]
        return entries if detail else [entry["name"] for entry in entries]

    def _listed(self, path: str) -> list[dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = {}
        prefix = f"{path}/" if path else ""
        for file in self.root.iterdir():
            name = unquote(file.name)
            if file.name.startswith("%part-"):
                continue
            if name == path:
                return [{"name": name, "size": file.stat().st_size, "type": "file"}]
            if name.startswith(prefix):
                child, _, below = name.removeprefix(prefix).partition("/")
                kind = "directory" if below else "file"
                size = 0 if below else file.stat().st_size
                entries[prefix + child] = {"name": prefix + child, "size": size, "type": kind}
        if not entries:
            raise FileNotFoundError(path)
        return list(entries.values())

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if path not in self.remembered:
            self.request("head", path)
            if self.file(path).exists():
                return {"name": path, "size": self.file(path).stat().st_size, "type": "file"}
        entries = self.ls(path)
        if entries[0]["name"] == path:
            return dict(entries[0])
        return {"name": path, "size": 0, "type": "directory"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        path = self._strip_protocol(path)
        try:
            content = self.file(path).read_bytes()[start:end]
        except FileNotFoundError:
            raise FileNotFoundError(path) from None
        self.request("get", path, len(content))
        return content

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self.put(self._strip_protocol(path), bytes(value))

    def _rm(self, path: str) -> None:
        path = self._strip_protocol(path)
        self.request("delete", path)
        self.file(path).unlink(missing_ok=True)
        self.remembered.clear()

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        return _Object(self, path, mode, block_size=1 << 16, **options)

    def mv(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError("a store of objects renames nothing")

    rename = move = cp_file = mv


class _Object(AbstractBufferedFile):  # type: ignore[misc]
    """Uploaded in parts; an object when the last one is there."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        content = self.buffer.getvalue()
        self.fs.request("part", self.path, len(content))
        self.parts.append(content)
        if final:
            self.fs.put(self.path, b"".join(self.parts))
        return True

    def discard(self) -> None:
        self.fs.request("abort", self.path)
        self.parts = []


def use_store(root: Path) -> str:
    """Registers the store, empty, over a folder; gives the address of a run in it."""
    fsspec.register_implementation("objects", ObjectStore, clobber=True)
    ObjectStore.clear_instance_cache()
    root.mkdir(exist_ok=True)
    ObjectStore.root, ObjectStore.fault, ObjectStore.latency_s = root, None, 0.0
    ObjectStore.requests.clear()
    return "objects://bucket/run"


def names(below: str = "") -> list[str]:
    """Names of all objects whose name begins so."""
    found = (unquote(file.name) for file in ObjectStore.root.iterdir() if not file.name.startswith("%part"))
    return sorted(name for name in found if name.startswith(below))


def file_of(suffix: str) -> Path:
    """The one object whose name ends so."""
    (name,) = [name for name in names() if name.endswith(suffix)]
    return ObjectStore.root / quote(name, safe="")


def fail(kind: str, part: str, error: BaseException) -> None:
    """Lets the requests of one kind for names with `part` in them fail, in this process."""

    def fault(asked: str, name: str) -> None:
        if asked == kind and part in name:
            raise error

    ObjectStore.fault = staticmethod(fault)


def die(kind: str, part: str, after: int = 0) -> None:
    """Ends this process without a word at such a request, when `after` of them went well."""
    left = [after]

    def fault(asked: str, name: str) -> None:
        if asked == kind and part in name:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), 9)

    ObjectStore.fault = staticmethod(fault)
