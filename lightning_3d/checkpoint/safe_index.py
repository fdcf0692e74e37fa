# SPDX-License-Identifier: Apache-2.0
"""Torch's index of tensors, read without running what it says.

Torch reads `.metadata` with pickle, which calls whatever the file names. An index of tensors consists of a few
classes; here an unpickler knows these and refuses all else.
"""

import io
import pickle
from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from lightning_3d.checkpoint.agreement import describe
from lightning_3d.checkpoint.folder import DCP_INDEX
from lightning_3d.checkpoint.places import Place
from lightning_3d.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_METADATA_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_ALLOWED = frozenset(
    {
        *((_METADATA, name) for name in _METADATA_CLASSES),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
    }
)


def read_index(folder: Place, files: Collection[str]) -> Metadata:
    """The index of a folder's tensors; safe on a hostile file.

    Args:
        folder: the checkpoint.
        files: names of the checkpoint's files, from its manifest.

    Raises:
        CheckpointError: the index is missing, damaged, or asks for a class that no index needs.
    """
    try:
        index = _IndexUnpickler(io.BytesIO((folder / DCP_INDEX).read_bytes())).load()
    except CheckpointError:
        raise
    except Exception as error:  # a broken pickle raises anything
        raise CheckpointError(f"{folder / DCP_INDEX} does not read: {describe(error)}") from error
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise CheckpointError(f"{folder / DCP_INDEX} is not an index of tensors.")
    for place in index.storage_data.values():
        name = getattr(place, "relative_path", None)
        if name not in files or getattr(place, "transform_descriptors", None):
            raise CheckpointError(f"{folder / DCP_INDEX} is not safe: it points to {name!r}.")
    return index


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise CheckpointError(
            f"the checkpoint is not safe: {DCP_INDEX} asks for {module}.{name}, which no index of tensors needs."
        )
