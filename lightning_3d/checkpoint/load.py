# SPDX-License-Identifier: Apache-2.0
"""Loading: refuse what is not whole, find what this rank wants in the file, agree, read, hand over."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from lightning_3d.checkpoint.agreement import Ranks, describe
from lightning_3d.checkpoint.commit import recover
from lightning_3d.checkpoint.folder import (
    METADATA,
    RANKS,
    STATE,
    Manifest,
    check_contents,
    check_sizes,
    files_of,
    newest_whole,
    read_manifest,
    refusal,
    whole_manifest,
)
from lightning_3d.checkpoint.matching import Match, compare, match_model
from lightning_3d.checkpoint.metadata import read_document
from lightning_3d.checkpoint.model_state import (
    BESIDE_PREFIX,
    EXTRA_PREFIX,
    PREFIX,
    ModelState,
    beside_state,
    load_entries,
    load_extras,
    model_state,
)
from lightning_3d.checkpoint.names import parameter_names
from lightning_3d.checkpoint.optimizer_restore import OptimizerRestore, plan_restore
from lightning_3d.checkpoint.optimizer_state import StoredOptimizer
from lightning_3d.checkpoint.places import PathLike, Place, place_of
from lightning_3d.checkpoint.safe_index import read_index
from lightning_3d.checkpoint.save import NamedState
from lightning_3d.checkpoint.shards import sharded
from lightning_3d.checkpoint.tensor_files import Target, read_tensors
from lightning_3d.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """The indices of a whole checkpoint folder."""

    folder: Place
    """Where the files are."""
    index: Metadata
    names: NamedState

    @classmethod
    def read(cls, folder: Place, manifest: Manifest) -> "StoredState":
        """Reads the indices.

        Raises:
            CheckpointError: one of them is damaged or not safe.
        """
        folder = files_of(folder, manifest)
        try:
            document = json.loads((folder / STATE).read_bytes())
            optimizers = [StoredOptimizer(**stored) for stored in document["optimizers"]]
            names = NamedState(aliases=document["aliases"], extras=document["extras"], optimizers=optimizers)
        except Exception as error:
            raise CheckpointError(f"{folder / STATE} does not read: {describe(error)}") from error
        return cls(folder=folder, index=read_index(folder, manifest.files), names=names)

    def tensor(self, key: str) -> TensorStorageMetadata:
        """Shape and dtype of a tensor in the file."""
        entry = self.index.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{self.folder} is damaged: {key} is named in it but has no data.")
        return entry

    def model_keys(self) -> dict[str, TensorStorageMetadata]:
        """The model's tensors by name."""
        entries = self.index.state_dict_metadata.items()
        return {
            key.removeprefix(PREFIX): entry
            for key, entry in entries
            if key.startswith(PREFIX) and isinstance(entry, TensorStorageMetadata)
        }


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """What this rank takes from the file, before anything is changed."""

    model: ModelState
    match: Match
    restores: list[OptimizerRestore]
    extra_tensors: dict[str, torch.Tensor]
    beside: dict[str, torch.Tensor]

    def targets(self) -> list[Target]:
        """Everything to fill, and its name in the file."""
        model = [(PREFIX + stored, self.model.tensors[own]) for own, stored in self.match.found.items()]
        optimizers = [item for restore in self.restores for item in restore.tensors]
        return [
            Target(source=key, tensor=sharded(key, tensor))
            for key, tensor in (*model, *self.extra_tensors.items(), *self.beside.items(), *optimizers)
        ]


def load_checkpoint(
    path: PathLike,
    *,
    model: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
    aliases: Mapping[str, str] | None = None,
    beside: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
) -> dict[str, Any]:
    """Loads a checkpoint into a model and optimizers of any layout, in place; collective.

    Nothing is changed before the folder has proved whole and its contents fit. Parameters and buffers are filled in
    place, without the module's `load_state_dict`; only entries that are no parameters or buffers pass through it.

    Args:
        path: a folder that `save_checkpoint` wrote.
        model: this rank's module, as for `save_checkpoint`, with data (not on the meta device).
        optimizers: as many as were saved, in the same order; empty loads the model only.
        strict: refuse missing and unexpected entries; otherwise load what is there and warn.
        process_group: see `save_checkpoint`.
        aliases: see `save_checkpoint`.
        beside: tensors to fill, as for `save_checkpoint`; those of a label that it has not stay as they are.

    Returns:
        The metadata that was saved.

    Raises:
        CheckpointError: on every rank, with the same text, when the checkpoint is partial, damaged, unsafe or does
            not fit.
    """
    ranks = Ranks.of(process_group)
    folder, manifest = _whole_folder(path, ranks)
    stored = ranks.together(f"opening {folder}", lambda: StoredState.read(folder, manifest))
    metadata = ranks.together(f"opening {folder}", lambda: read_document(stored.folder, METADATA))
    plan = ranks.together(
        f"comparing the model with {folder}", lambda: _plan(stored, model, optimizers, aliases, beside)
    )
    compare(plan.match, plan.restores, stored.names.optimizers, folder, ranks, strict=strict)
    targets = ranks.together(f"comparing the model with {folder}", plan.targets)
    read_tensors(stored.folder, stored.index, targets, ranks)
    ranks.together(f"restoring the state of {folder}", lambda: _apply(plan, stored, model))
    return metadata


def _whole_folder(path: PathLike, ranks: Ranks) -> tuple[Place, Manifest]:
    """The folder, once all ranks see the same whole one."""
    folder = ranks.together("reading the path", lambda: place_of(path))
    ranks.together(f"opening {folder}", lambda: recover(folder) if ranks.is_first else None)
    ranks.together(f"opening {folder}", lambda: recover(folder))  # on disks that the first rank does not see
    manifest = ranks.together(f"opening {folder}", lambda: _manifest(folder))
    views = ranks.all_gather((manifest.save_id, manifest.here))
    saves = sorted({save_id for save_id, _ in views})
    if len(saves) > 1:
        raise CheckpointError(
            f"{ranks.broadcast(folder)} is not one checkpoint: ranks see the saves {', '.join(saves)}. "
            "Every rank must see the same folder, or its node's part of the same save."
        )
    peers = [rank for rank, view in enumerate(views) if view == views[ranks.rank]]
    share = manifest.here[peers.index(ranks.rank) :: len(peers)]
    ranks.together(f"checking {folder}", lambda: _contents(folder, manifest, share))
    return folder, manifest


def _manifest(folder: Place) -> Manifest:
    try:
        manifest = read_manifest(folder)
        check_sizes(folder, manifest)
    except CheckpointError as error:
        raise refusal(folder, str(error)) from None
    return manifest


def _contents(folder: Place, manifest: Manifest, names: Sequence[str]) -> None:
    try:
        check_contents(folder, manifest, names)
    except CheckpointError as error:
        raise refusal(folder, str(error)) from None


def _plan(
    stored: StoredState,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    aliases: Mapping[str, str] | None,
    beside: Mapping[str, Mapping[str, torch.Tensor]] | None,
) -> LoadPlan:
    state = model_state(model, aliases)
    match = match_model(state, stored.model_keys(), stored.names.extras, stored.names.aliases)
    if optimizers and len(optimizers) != len(stored.names.optimizers):
        saved = len(stored.names.optimizers)
        reason = "it holds weights only" if saved == 0 else f"it holds {saved}"
        raise CheckpointError(
            f"{len(optimizers)} optimizers cannot be resumed from {stored.folder}: {reason}. "
            "Load the model alone (optimizers=[]), or resume from a checkpoint of the same training."
        )
    names = parameter_names(model, aliases or {})
    restores = [
        plan_restore(optimizer, number, stored.names.optimizers[number], stored.index, names, match.found)
        for number, optimizer in enumerate(optimizers)
    ]
    return LoadPlan(
        model=state,
        match=match,
        restores=restores,
        extra_tensors=_extra_tensors(stored, match),
        beside=_beside(stored, beside or {}, state.aliases),
    )


def _beside(
    stored: StoredState, wanted: Mapping[str, Mapping[str, torch.Tensor]], aliases: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """What the file has of the wanted tensors, under their names there."""
    index = stored.index.state_dict_metadata
    found: dict[str, torch.Tensor] = {}
    for label, tensors in wanted.items():
        prefix = f"{BESIDE_PREFIX}{label}."
        if not any(key.startswith(prefix) for key in index):
            continue
        for key, tensor in beside_state({label: tensors}, aliases).items():
            tied_to = stored.names.aliases.get(key.removeprefix(prefix), "")
            there = next((name for name in (key, prefix + tied_to) if name in index), None)
            if there is None or stored.tensor(there).size != tensor.shape:
                raise CheckpointError(
                    f"{stored.folder} has {label} of another model: {key.removeprefix(prefix)} of shape"
                    f" {tuple(tensor.shape)} is not in it. Build the model as it was when saved."
                )
            found[there] = tensor
    return found


def _extra_tensors(stored: StoredState, match: Match) -> dict[str, torch.Tensor]:
    tensors = {}
    for key in stored.index.state_dict_metadata:
        if any(key.startswith(f"{EXTRA_PREFIX}{name}.") for name in match.extras):
            entry = stored.tensor(key)
            tensors[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return tensors


def _apply(plan: LoadPlan, stored: StoredState, model: nn.Module) -> None:
    load_entries(
        model, {name: plan.model.tensors[name] for name in plan.model.detached if name in plan.match.found}
    )
    load_extras(model, {name: stored.names.extras[name] for name in plan.match.extras}, plan.extra_tensors)
    for restore in plan.restores:
        restore.apply()


def open_checkpoint(path: PathLike) -> StoredState:
    """The indices of a whole checkpoint whose checksums are right; local, no process group.

    Raises:
        CheckpointError: the folder is not a whole checkpoint, or is damaged or unsafe.
    """
    folder, manifest = _whole_folder(path, Ranks(None))
    return StoredState.read(folder, manifest)


def is_checkpoint(path: PathLike) -> bool:
    """Whether a folder is a whole checkpoint: all files there, at their sizes. Reads the manifest only; local."""
    return whole_manifest(place_of(path)) is not None


def read_metadata(path: PathLike) -> dict[str, Any]:
    """The metadata of a whole checkpoint; local, safe on any file.

    Raises:
        CheckpointError: the folder is not a whole checkpoint, or its metadata is damaged.
    """
    return _document(path, METADATA)


def read_rank_metadata(path: PathLike) -> dict[str, Any]:
    """What the ranks of the saving layout added, by the names that they gave; local, empty when they added nothing.

    Raises:
        CheckpointError: the folder is not a whole checkpoint, or the file is damaged.
    """
    return _document(path, RANKS, optional=True)


def _document(path: PathLike, stem: str, *, optional: bool = False) -> dict[str, Any]:
    folder = place_of(path)
    recover(folder)
    manifest = _manifest(folder)
    if optional and f"{stem}.json" not in manifest.here:
        return {}
    _contents(folder, manifest, [name for name in (f"{stem}.json", f"{stem}.pt") if name in manifest.here])
    return read_document(files_of(folder, manifest), stem)


def newest_checkpoint(folder: PathLike) -> Place | None:
    """The whole checkpoint in a folder that was saved last; partial and damaged ones are passed over."""
    return newest_whole(place_of(folder))


def load_full_state_dict(path: PathLike) -> dict[str, torch.Tensor]:
    """The whole model on the CPU of this process, tied names included; local, no process group.

    Raises:
        CheckpointError: the folder is not a whole checkpoint, or is damaged or unsafe.
    """
    stored = open_checkpoint(path)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.model_keys().items()
    }
    targets = [Target(source=PREFIX + name, tensor=sharded(name, tensor)) for name, tensor in tensors.items()]
    read_tensors(stored.folder, stored.index, targets, Ranks(None))
    tied = {name: tensors[target] for name, target in stored.names.aliases.items() if target in tensors}
    return {**tensors, **tied}
