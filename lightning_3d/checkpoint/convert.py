# SPDX-License-Identifier: Apache-2.0
"""Weights in from, and out to, the formats of others; no process holds a model that it does not have already."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_3d.checkpoint.agreement import Ranks
from lightning_3d.checkpoint.commit import remove_checkpoint
from lightning_3d.checkpoint.folder import remove
from lightning_3d.checkpoint.load import load_full_state_dict, open_checkpoint, read_metadata
from lightning_3d.checkpoint.matching import compare, match_model
from lightning_3d.checkpoint.model_state import PREFIX, load_entries, model_state
from lightning_3d.checkpoint.places import PathLike, Place, RemotePath, place_of
from lightning_3d.checkpoint.save import save_checkpoint
from lightning_3d.checkpoint.shards import sharded
from lightning_3d.checkpoint.tensor_files import Target, read_tensors
from lightning_3d.checkpoint.weight_files import (
    INDEX,
    SINGLE,
    described,
    open_weights,
    split_by_size,
    write_safetensors,
)
from lightning_3d.errors import CheckpointError

Rename = Callable[[str], str | None]
"""A name to the name on the other side; None leaves the tensor out."""

MAX_FILE_BYTES = 5 * 10**9


def load_weights(
    path: PathLike,
    *,
    model: nn.Module,
    rename: Rename | None = None,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Fills a model of any layout from a file of a whole model; collective. Each rank reads its own shards only.

    Args:
        path: a Hugging Face folder, a `.safetensors` file, a torch file of a state dict, or a Lightning checkpoint
            file. Every rank must see it.
        model: this rank's module, with data (not on the meta device).
        rename: a name in the file to the model's name, e.g. `lambda name: "model." + name`.
        strict: refuse missing and unexpected entries.
        process_group: see `save_checkpoint`.
        aliases: see `save_checkpoint`.

    Raises:
        CheckpointError: on every rank, when the file does not read or does not fit.
    """
    ranks = Ranks.of(process_group)
    folder = ranks.together("reading the path", lambda: place_of(path))
    weights = ranks.together(f"opening {folder}", lambda: _renamed(open_weights(folder), rename))
    state = ranks.together(f"comparing the model with {folder}", lambda: model_state(model, aliases))
    match = match_model(state, described(weights), {}, {})
    compare(match, [], [], folder, ranks, strict=strict)

    def fill() -> None:
        for own, stored in match.found.items():
            for piece in sharded(own, state.tensors[own]).pieces:
                source = weights[stored]
                for dim, (start, length) in enumerate(zip(piece.offsets, piece.local.shape, strict=True)):
                    source = source.narrow(dim, start, length)
                piece.local.copy_(source)
        load_entries(model, {name: state.tensors[name] for name in state.detached if name in match.found})

    ranks.together(f"reading {folder}", fill)


def find_prefix(path: PathLike, model: nn.Module, process_group: dist.ProcessGroup | None = None) -> str:
    """What a file's names lack in front to be this model's (`model.` for a file of `self.model`); collective.

    Returns:
        A child's name with a dot, or nothing, whichever makes more names fit.

    Raises:
        CheckpointError: on every rank, when the file does not read.
    """
    ranks = Ranks.of(process_group)
    names = ranks.together(f"opening {path}", lambda: set(open_weights(place_of(path))))
    own = set(model_state(model).tensors)
    prefixes = ["", *(f"{name}." for name, _ in model.named_children())]
    votes = ranks.all_gather({prefix: sum(prefix + name in own for name in names) for prefix in prefixes})
    return max(prefixes, key=lambda prefix: sum(vote.get(prefix, 0) for vote in votes))


def _renamed(weights: dict[str, torch.Tensor], rename: Rename | None) -> dict[str, torch.Tensor]:
    if rename is None:
        return weights
    named = ((rename(name), tensor) for name, tensor in weights.items())
    return {name: tensor for name, tensor in named if name is not None}


def export_safetensors(
    path: PathLike,
    folder: PathLike,
    *,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    copy: Sequence[PathLike] = (),
) -> None:
    """Writes a checkpoint's model as safetensors, as `from_pretrained` reads it; local, holds one tensor at a time.

    Tied weights are written once. The folder has its name when it is complete.

    Args:
        path: a checkpoint folder.
        folder: where to write. Replaced if it exists and is an older export; at a remote address it must not exist.
        rename: a name in the checkpoint to the name in the export, e.g. one that strips the Lightning module's
            `model.`; None leaves a tensor out.
        dtype: of floating point tensors in the export; as stored if None.
        max_file_bytes: size of a file, in bytes, at which the next one begins.
        copy: files to put beside (`config.json`, the tokenizer's).

    Raises:
        CheckpointError: the checkpoint is not whole, damaged or unsafe, or `folder` holds something else.
    """
    target = place_of(folder)
    if target.exists() and not ((target / INDEX).exists() or (target / SINGLE).exists()):
        raise CheckpointError(f"{target} exists and is no export of safetensors. Give another folder.")
    rename = rename or (lambda name: name)
    if isinstance(target, RemotePath):
        _export_remotely(path, target, rename, dtype, max_file_bytes, copy)
        return
    staging = target.parent / f".{target.name}.exporting"
    remove_checkpoint(staging)
    staging.mkdir(parents=True)
    try:
        _export(path, staging, rename, dtype, max_file_bytes)
        for file in copy:
            shutil.copy(file, staging)
        remove_checkpoint(target)
        staging.rename(target)
    except BaseException:
        remove_checkpoint(staging)
        raise


def _export_remotely(
    path: PathLike,
    target: RemotePath,
    rename: Rename,
    dtype: torch.dtype | None,
    max_file_bytes: int,
    copy: Sequence[PathLike],
) -> None:
    """Into a folder of its own: nothing can be renamed there, so what is there cannot be replaced as a whole."""
    if target.exists():
        raise CheckpointError(f"{target} exists, and a remote export replaces nothing. Give another folder.")
    try:
        for file in map(Path, copy):
            (target / file.name).write_bytes(file.read_bytes())
        _export(path, target, rename, dtype, max_file_bytes)
    except BaseException:
        remove(target)
        raise


_LIGHTNING_KEYS = (
    "epoch",
    "global_step",
    "pytorch-lightning_version",
    "hyper_parameters",
    "hparams_name",
    "datamodule_hyper_parameters",
    "datamodule_hparams_name",
)
"""What `load_from_checkpoint` reads beside the weights."""


def export_lightning(path: PathLike, file: PathLike) -> None:
    """Writes a checkpoint's weights and hyperparameters as one file, for `load_from_checkpoint`; local.

    The whole model is in this process's memory meanwhile: for models that one process can hold.

    Args:
        path: a checkpoint folder.
        file: where to write; has its name when it is complete. An older file is replaced.

    Raises:
        CheckpointError: the checkpoint is not whole, damaged or unsafe, or `file` is a folder.
    """
    target = place_of(file)
    if target.is_dir():
        raise CheckpointError(f"{target} is a folder. Give the name of a file.")
    metadata = read_metadata(path)
    content: dict[str, Any] = {key: metadata[key] for key in _LIGHTNING_KEYS if key in metadata}
    content["state_dict"] = load_full_state_dict(path)
    if isinstance(target, RemotePath):
        with target.open("wb") as stream:  # has its name at the end
            torch.save(content, stream)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.parent / f".{target.name}.exporting"
    try:
        torch.save(content, staging)
        staging.replace(target)
    finally:
        staging.unlink(missing_ok=True)


class _Weights(nn.Module):
    """A module that is nothing but a state dict, backed by files."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._weights = dict(weights)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The weights."""
        return self._weights


def import_weights(
    path: PathLike, folder: PathLike, *, metadata: Mapping[str, Any], rename: Rename | None = None
) -> None:
    """Writes files of weights as a checkpoint that any layout loads; local, mapped from the files.

    Args:
        path: as for `load_weights`.
        folder: the checkpoint.
        metadata: of the checkpoint.
        rename: as for `load_weights`.

    Raises:
        CheckpointError: the file does not read, or the folder cannot be written.
    """
    weights = _renamed(open_weights(place_of(path)), rename)
    save_checkpoint(folder, model=_Weights(weights), metadata=metadata)


def _num_bytes(shape: torch.Size, dtype: torch.dtype) -> int:
    return shape.numel() * dtype.itemsize


def _export(
    path: PathLike, folder: Place, rename: Rename, dtype: torch.dtype | None, max_file_bytes: int
) -> None:
    stored = open_checkpoint(path)
    sources: dict[str, str] = {}
    entries: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for name, entry in stored.model_keys().items():
        new = rename(name)
        if new is None:
            continue
        if new in sources:
            raise CheckpointError(f"{name} and {sources[new]} would both be called {new}.")
        floating = entry.properties.dtype.is_floating_point and dtype is not None
        sources[new] = name
        entries[new] = (entry.size, dtype if floating and dtype is not None else entry.properties.dtype)

    # One buffer for all: malloc keeps freed blocks of changing sizes, and a process would grow by several tensors.
    room = torch.empty(max((_num_bytes(*entry) for entry in entries.values()), default=0), dtype=torch.uint8)

    def read(part: Mapping[str, tuple[torch.Size, torch.dtype]]) -> Iterator[torch.Tensor]:
        for name, (shape, kind) in part.items():
            tensor = room[: _num_bytes(shape, kind)].view(kind).view(shape)
            target = Target(source=PREFIX + sources[name], tensor=sharded(name, tensor))
            read_tensors(stored.folder, stored.index, [target], Ranks(None))
            yield tensor

    parts = list(split_by_size(entries, max_file_bytes))
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = SINGLE if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        write_safetensors(folder / file, part, read(part))
        weight_map |= dict.fromkeys(part, file)
    if len(parts) > 1:
        total = sum(_num_bytes(*entry) for entry in entries.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_bytes(json.dumps(index, indent=2).encode())
