# SPDX-License-Identifier: Apache-2.0
"""Files of whole models that other software wrote, read box by box: safetensors and torch's own.

Both are mapped into memory, so that a rank touches the pages of its own shards and no more. The safetensors format
is a length, a JSON header and the data; reading and writing it takes no dependency.
"""

import json
import math
import mmap
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from lightning_3d.checkpoint.agreement import describe
from lightning_3d.checkpoint.places import BLOCK_BYTES, Place, RemotePath
from lightning_3d.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100 << 20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def open_weights(path: Place) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, of a Hugging Face folder, or of a torch file; backed by the files.

    A Lightning checkpoint file gives its `state_dict`. Remote files are copied to the temporary folder first, where
    they have no name any more once they are mapped.

    Raises:
        CheckpointError: the file is of no known kind, damaged, or not safe.
    """
    if isinstance(path, RemotePath):
        with tempfile.TemporaryDirectory(prefix="lightning_3d-") as folder:
            return open_weights(_fetched(path, Path(folder)))
    try:
        if path.is_dir():
            return _open_folder(path)
        if path.suffix == ".safetensors":
            return open_safetensors(path)
        content: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} does not read as weights: {describe(error)}") from error
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a state dict.")
    return {name: tensor for name, tensor in content.items() if isinstance(tensor, torch.Tensor)}


def _fetched(path: RemotePath, folder: Path) -> Path:
    """A copy of a file, or of a folder's weights, on a disk."""
    target = folder / path.name
    if path.is_file():
        _fetch(path, target)
        return target
    target.mkdir()
    for name in path.sizes():
        if name == INDEX or name.endswith(".safetensors"):
            _fetch(path / name, target / name)
    return target


def _fetch(path: RemotePath, target: Path) -> None:
    with path.open() as source, target.open("wb") as stream:
        shutil.copyfileobj(source, stream, BLOCK_BYTES)


def is_weights(path: Place) -> bool:
    """Whether a path is a file, or a Hugging Face folder: something for `open_weights`."""
    return path.is_file() or (path / INDEX).exists() or (path / SINGLE).exists()


def _open_folder(folder: Path) -> dict[str, torch.Tensor]:
    files = {SINGLE}
    if (folder / INDEX).exists():
        files = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    elif not (folder / SINGLE).exists():
        raise CheckpointError(
            f"{folder} has neither {INDEX} nor {SINGLE}. Give a Hugging Face folder or a file."
        )
    if any("/" in file or file.startswith(".") for file in files):
        raise CheckpointError(f"{folder / INDEX} is not safe: it names files outside the folder.")
    return {
        name: tensor for file in sorted(files) for name, tensor in open_safetensors(folder / file).items()
    }


def open_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one safetensors file, mapped.

    Raises:
        CheckpointError: a header that does not fit the file.
    """
    with path.open("rb") as stream:
        (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
        size = path.stat().st_size
        if length > min(_MAX_HEADER_BYTES, size - _LENGTH.size):
            raise CheckpointError(
                f"{path} is damaged: its header of {length} bytes does not fit into {size}."
            )
        header = json.loads(stream.read(length))
        content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    start = _LENGTH.size + length
    header.pop("__metadata__", None)
    return {name: _mapped(path, name, entry, content, start) for name, entry in header.items()}


def _mapped(path: Path, name: str, entry: Mapping[str, Any], content: mmap.mmap, start: int) -> torch.Tensor:
    dtype = DTYPES.get(entry["dtype"])
    begin, end = entry["data_offsets"]
    count = math.prod(entry["shape"])
    if dtype is None:
        raise CheckpointError(
            f"{path}: {name} has dtype {entry['dtype']}, which is not one of {', '.join(DTYPES)}."
        )
    if end - begin != count * dtype.itemsize or begin < 0 or start + end > len(content):
        raise CheckpointError(f"{path} is damaged: {name} does not lie where its header says.")
    if count == 0:
        return torch.empty(entry["shape"], dtype=dtype)
    return torch.frombuffer(content, dtype=dtype, count=count, offset=start + begin).view(entry["shape"])


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorStorageMetadata]:
    """Shapes and dtypes, as a checkpoint's index has them."""
    return {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=tensor.dtype), size=tensor.shape, chunks=[]
        )
        for name, tensor in tensors.items()
    }


def write_safetensors(
    path: Place, entries: Mapping[str, tuple[torch.Size, torch.dtype]], tensors: Iterable[torch.Tensor]
) -> None:
    """Writes a safetensors file, holding one tensor at a time.

    Args:
        path: the file.
        entries: names with shapes and dtypes.
        tensors: their data in the same order, taken one by one.

    Raises:
        CheckpointError: a dtype that the format does not have.
    """
    with path.open("wb") as stream:
        _write_header(stream, entries)
        for tensor in tensors:
            stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _write_header(stream: BinaryIO, entries: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (shape, dtype) in entries.items():
        if dtype not in _NAMES:
            raise CheckpointError(
                f"{name} has dtype {dtype}, which safetensors does not have. Convert it first."
            )
        end = position + shape.numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    stream.write(_LENGTH.pack(len(content)) + content)


def split_by_size(
    entries: Mapping[str, tuple[torch.Size, torch.dtype]], max_file_bytes: int
) -> Iterator[dict[str, tuple[torch.Size, torch.dtype]]]:
    """Consecutive parts of at most `max_file_bytes` each; a larger tensor is a part by itself."""
    part: dict[str, tuple[torch.Size, torch.dtype]] = {}
    part_bytes = 0
    for name, (shape, dtype) in entries.items():
        num_bytes = shape.numel() * dtype.itemsize
        if part and part_bytes + num_bytes > max_file_bytes:
            yield part
            part, part_bytes = {}, 0
        part[name] = (shape, dtype)
        part_bytes += num_bytes
    if part:
        yield part
