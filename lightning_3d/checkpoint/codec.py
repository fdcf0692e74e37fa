# SPDX-License-Identifier: Apache-2.0
"""Plain Python values as JSON and back, without pickle: reading a document cannot run code.

JSON's own values stay as they are. What JSON lacks is written as `{"$": kind, "v": ...}`. Tensors go wherever the
caller's `put_tensor` takes them; the document keeps what it returns.
"""

import base64
import datetime
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from lightning_3d.errors import CheckpointError

Json = Any
"""None, bool, int, float, str, a list or a dict of them."""

_TAG = "$"


class PutTensor(Protocol):
    """Takes a tensor away and returns what the document says in its place."""

    def __call__(self, tensor: torch.Tensor, /) -> Json:
        """Takes one tensor."""


GetTensor = Callable[[Json], torch.Tensor]


class UnsafeValueError(Exception):
    """A value that has no safe form; `path` says where it was."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} ({why})")
        self.path = path


def encode(value: Any, path: str, put_tensor: PutTensor) -> Json:
    """`value` as JSON.

    Args:
        value: numbers, text, bytes, containers, paths, dates, dtypes, devices, arrays, tensors, in any nesting.
        path: the value's name, for errors.
        put_tensor: where tensors go.

    Raises:
        UnsafeValueError: something that only pickle could store, with its path.
    """
    return _Encoder(put_tensor).encode(value, path)


class _Encoder:
    def __init__(self, put_tensor: PutTensor) -> None:
        self.put_tensor = put_tensor
        self.open: set[int] = set()

    def encode(self, value: Any, path: str) -> Json:
        if value is None or isinstance(value, (bool, int, str, float)):
            return _scalar(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, (Mapping, list, tuple, set, frozenset)):
            if id(value) in self.open:
                raise UnsafeValueError(path, "contains itself")
            self.open.add(id(value))
            try:
                return self._container(value, path)
            finally:
                self.open.discard(id(value))
        if type(value).__module__ == "numpy":
            return self._numpy(value, path)
        simple = _simple(value)
        if simple is None:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise UnsafeValueError(path, f"a {kind}")
        return simple

    def _container(self, value: Any, path: str) -> Json:
        if isinstance(value, Mapping):
            plain = all(type(key) is str for key in value) and _TAG not in value
            if plain and not isinstance(value, OrderedDict):
                return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
            kind = "ordered" if isinstance(value, OrderedDict) else "dict"
            items = [
                [self.encode(key, f"{path}.{key!r}"), self.encode(item, f"{path}.{key}")]
                for key, item in value.items()
            ]
            return {_TAG: kind, "v": items}
        if isinstance(value, torch.Size):
            return {_TAG: "size", "v": list(value)}
        items = [self.encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, list):
            return items
        kind = "tuple" if isinstance(value, tuple) else "set" if isinstance(value, set) else "frozenset"
        return {_TAG: kind, "v": items}

    def _tensor(self, tensor: torch.Tensor, path: str) -> Json:
        if isinstance(tensor, DTensor):
            raise UnsafeValueError(
                path, "a DTensor: store tensor.full_tensor(), or the local shard of each rank"
            )
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            raise UnsafeValueError(path, f"a tensor with layout {tensor.layout} on {tensor.device}")
        return {_TAG: "tensor", "v": self.put_tensor(tensor.detach())}

    def _numpy(self, value: Any, path: str) -> Json:
        if not hasattr(value, "shape") or value.dtype.kind not in "biufc":
            raise UnsafeValueError(path, f"a numpy {type(value).__name__}")
        if value.shape == ():
            return (
                {_TAG: "complex", "v": [value.item().real, value.item().imag]}
                if value.dtype.kind == "c"
                else _scalar(value.item())
            )
        return {_TAG: "array", "v": self.put_tensor(torch.from_numpy(value.copy()))}


def _scalar(value: Any) -> Json:
    """Subclasses (an IntEnum, a numpy float) become their base; JSON has no nan or infinity."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "v": repr(float(value))}
    return int(value) if isinstance(value, int) else str.__str__(value)


def _simple(value: Any) -> Json | None:
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: "bytes", "v": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, PurePath):
        return {_TAG: "path", "v": str(value)}
    if isinstance(value, datetime.timedelta):
        return {_TAG: "timedelta", "v": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, datetime.datetime):
        return {_TAG: "datetime", "v": value.isoformat()}
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "v": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {_TAG: "device", "v": str(value)}
    if isinstance(value, complex):
        return {_TAG: "complex", "v": [value.real, value.imag]}
    return None


def decode(document: Json, get_tensor: GetTensor) -> Any:
    """The value that `encode` wrote.

    Raises:
        CheckpointError: the document is not one of `encode`'s.
    """
    if isinstance(document, list):
        return [decode(item, get_tensor) for item in document]
    if not isinstance(document, dict):
        return document
    if _TAG not in document:
        return {key: decode(item, get_tensor) for key, item in document.items()}
    kind, value = document[_TAG], document.get("v")
    try:
        if kind == "tensor":
            return get_tensor(value)
        if kind == "array":
            return get_tensor(value).numpy()
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](decode(value, get_tensor))
        return _SIMPLE[kind](value)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"A value of kind {kind!r} does not read ({error}): the file is damaged."
        ) from error


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is not a dtype")
    return dtype


_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_SIMPLE: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "size": torch.Size,
    "bytes": base64.b64decode,
    "path": Path,
    "timedelta": lambda parts: datetime.timedelta(*parts),
    "datetime": datetime.datetime.fromisoformat,
    "dtype": _dtype,
    "device": torch.device,
    "complex": lambda parts: complex(*parts),
}


def inline_tensor(tensor: torch.Tensor) -> Json:
    """A small tensor as numbers in the document itself (a learning rate)."""
    if tensor.numel() > 64 or tensor.is_complex():
        raise CheckpointError(f"A tensor of {tensor.numel()} elements is no hyperparameter of an optimizer.")
    values = tensor.cpu().double().tolist() if tensor.is_floating_point() else tensor.cpu().tolist()
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "values": values}


def outline_tensor(document: Json) -> torch.Tensor:
    """The tensor that `inline_tensor` wrote."""
    return torch.tensor(document["values"], dtype=_dtype(document["dtype"]))
