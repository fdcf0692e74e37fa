# SPDX-License-Identifier: Apache-2.0
"""The part of a checkpoint that is not model or optimizer state: Lightning's dict, stored without pickle."""

import io
import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_3d.checkpoint.agreement import describe, listed
from lightning_3d.checkpoint.codec import Json, UnsafeValueError, decode, encode
from lightning_3d.checkpoint.places import Place
from lightning_3d.errors import CheckpointError

_DROPPABLE = ("hyper_parameters", "datamodule_hyper_parameters")
"""Entries that training goes on without: they are arguments of the user's own constructor."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """Values as JSON, with the tensors in them beside."""

    values: dict[str, Json]
    tensors: dict[str, torch.Tensor]

    def files(self, stem: str) -> dict[str, bytes]:
        """The document as files by name."""
        files = {f"{stem}.json": json.dumps(self.values).encode()}
        if self.tensors:
            files[f"{stem}.pt"] = self.tensor_bytes()
        return files

    def tensor_bytes(self) -> bytes:
        """The tensors as `torch.save` writes them."""
        buffer = io.BytesIO()
        torch.save(self.tensors, buffer)
        return buffer.getvalue()


def encode_metadata(metadata: Mapping[str, Any], prefix: str = "") -> Document:
    """Lightning's dict, or another one, as a document.

    Hyperparameters that only pickle could store are dropped with a warning; anything else that only pickle could
    store is refused.

    Args:
        metadata: values by name.
        prefix: of the tensors' names, where several documents become one.

    Raises:
        CheckpointError: names every entry that cannot be stored.
    """
    tensors: dict[str, torch.Tensor] = {}

    def put(tensor: torch.Tensor) -> str:
        name = f"{prefix}{len(tensors)}"
        tensors[name] = tensor.to("cpu", copy=True)  # a view would store all of the tensor it looks into
        return name

    values: dict[str, Json] = {}
    refused: list[str] = []
    dropped: list[str] = []
    for key, value in metadata.items():
        if key in _DROPPABLE and isinstance(value, Mapping):
            values[key] = {}
            for name, item in value.items():
                try:
                    values[key][str(name)] = encode(item, f"{key}.{name}", put)
                except UnsafeValueError as error:
                    dropped.append(str(error))
            continue
        try:
            values[key] = encode(value, key, put)
        except UnsafeValueError as error:
            (dropped if key in _DROPPABLE else refused).append(str(error))
    _report(refused, dropped)
    return Document(values=values, tensors=tensors)


def _report(refused: list[str], dropped: list[str]) -> None:
    if refused:
        raise CheckpointError(
            f"Only pickle could store {listed(refused)}, and a checkpoint that is pickled runs code when it is loaded. "
            "Keep tensors, numbers, text and containers of them in the checkpoint (a state_dict(), not the object)."
        )
    if dropped:
        warnings.warn(
            f"The checkpoint leaves out {listed(dropped)}: only pickle could store them. Pass them to "
            "load_from_checkpoint, or name them in save_hyperparameters(ignore=[...]).",
            stacklevel=3,
        )


def joined(documents: Iterable[Document]) -> Document:
    """Several documents as one; of two values of one name the first is kept."""
    values: dict[str, Json] = {}
    tensors: dict[str, torch.Tensor] = {}
    for document in documents:
        values = {**document.values, **values}
        tensors = {**document.tensors, **tensors}
    return Document(values=values, tensors=tensors)


def read_document(folder: Place, stem: str) -> dict[str, Any]:
    """The values of a document of a whole checkpoint folder.

    Raises:
        CheckpointError: a file is damaged or not safe.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        values = json.loads((folder / f"{stem}.json").read_bytes())
        if (folder / f"{stem}.pt").exists():
            stored = io.BytesIO((folder / f"{stem}.pt").read_bytes())
            tensors = torch.load(stored, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{stem}.json of {folder} does not read: {describe(error)}") from error
    result = decode(values, tensors.__getitem__)
    if not isinstance(result, dict):
        raise CheckpointError(f"{stem}.json of {folder} is not a dict.")
    return result
