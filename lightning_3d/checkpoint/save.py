# SPDX-License-Identifier: Apache-2.0
"""Saving: take this rank's state, write it beside, give it its name."""

import io
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_3d.checkpoint.agreement import Ranks
from lightning_3d.checkpoint.codec import Json
from lightning_3d.checkpoint.commit import Staging, commit, naming, open_staging
from lightning_3d.checkpoint.folder import (
    DCP_INDEX,
    METADATA,
    RANKS,
    STATE,
    FileRecord,
    write_durably,
)
from lightning_3d.checkpoint.metadata import Document, encode_metadata, joined
from lightning_3d.checkpoint.model_state import PREFIX, beside_state, encode_extras, model_state
from lightning_3d.checkpoint.names import parameter_names
from lightning_3d.checkpoint.optimizer_state import StoredOptimizer, merged, optimizer_state
from lightning_3d.checkpoint.places import PathLike, place_of
from lightning_3d.checkpoint.shards import ShardedTensor, sharded
from lightning_3d.checkpoint.tensor_files import write_tensors


@dataclass(frozen=True, kw_only=True)
class NamedState:
    """What `state.json` says: everything about the state that is not a tensor."""

    aliases: dict[str, str]
    """Other names of tied tensors."""
    extras: dict[str, Json]
    """Model entries that are no tensors."""
    optimizers: list[StoredOptimizer]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that one rank brings to a checkpoint."""

    tensors: dict[str, ShardedTensor]
    names: NamedState
    metadata: Document | None
    """Lightning's dict, on the first rank."""
    rank_metadata: Document

    volatile: frozenset[str]
    """Names in `tensors` that a forward pass may change (buffers); the others change in an optimizer step only."""

    def of(self, tensors: dict[str, ShardedTensor]) -> "Snapshot":
        """The same with other tensors (copies)."""
        return replace(self, tensors=tensors)


def save_checkpoint(
    path: PathLike,
    *,
    model: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    metadata: Mapping[str, Any],
    process_group: dist.ProcessGroup | None = None,
    rank_metadata: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
    model_keys: Collection[str] | None = None,
    entries: Mapping[str, Any] | None = None,
    beside: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
) -> None:
    """Saves a checkpoint folder that any layout can load; collective, atomic.

    The folder has its name when it is whole, and not before. What had the name stays untouched until then.

    Args:
        path: the folder, on a mounted file system or at an address that fsspec knows (`s3://...`). May exist as an
            older checkpoint.
        model: this rank's module; with pipeline parallelism it has the parameters of its stages only, under the
            names that they have in the whole model.
        optimizers: in the same order on every rank; empty saves weights only.
        metadata: Lightning's checkpoint dict without model and optimizer state; the first rank's is stored.
        process_group: the ranks that save, with a CPU backend. The default group if None, no group needed.
        rank_metadata: values of this rank alone (random state, data position) under names that say whose they are in
            any layout, e.g. `"rng.pp0.dp3.tp1"`. Of two ranks' values of one name the first is kept.
        aliases: names to the names of the tensors that they are tied to, where the two live on different ranks.
        model_keys: only these entries of the model's state dict; all if None.
        entries: values in place of those of the model's state dict, or beside them (averaged weights).
        beside: tensors that are no part of the model, by label and by their name in the model; loaded by whoever asks
            for the label.

    Raises:
        CheckpointError: on every rank, with the same text, when anything failed on any of them: state that has no
            safe form, a full disk, a folder that cannot be written. The previous checkpoint is untouched.
    """
    ranks = Ranks.of(process_group)
    snapshot = ranks.together(
        f"collecting the state for {path}",
        lambda: take_snapshot(
            model,
            optimizers,
            metadata if ranks.is_first else None,
            rank_metadata=rank_metadata,
            aliases=aliases,
            model_keys=model_keys,
            entries=entries,
            beside=beside,
        ),
    )
    write_snapshot(path, snapshot, ranks)


def take_snapshot(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    metadata: Mapping[str, Any] | None,
    *,
    rank_metadata: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
    model_keys: Collection[str] | None = None,
    entries: Mapping[str, Any] | None = None,
    beside: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
) -> Snapshot:
    """This rank's state, sharing the memory of model and optimizers; local.

    Args:
        model: see `save_checkpoint`, like the rest.
        optimizers: as there.
        metadata: on the first rank, else None.
        rank_metadata: as there.
        aliases: as there.
        model_keys: as there.
        entries: as there.
        beside: as there.

    Raises:
        CheckpointError: state that has no safe form.
    """
    state = model_state(model, aliases, model_keys, entries)
    buffers = {
        PREFIX + name for name, tensor in state.tensors.items() if not isinstance(tensor, nn.Parameter)
    }
    extras, extra_tensors = encode_extras(state.extras)
    others = {name: sharded(name, tensor) for name, tensor in beside_state(beside, state.aliases).items()}
    stored, optimizer_tensors = optimizer_state(optimizers, parameter_names(model, aliases or {}))
    return Snapshot(
        tensors={**state.sharded(), **extra_tensors, **others, **optimizer_tensors},
        volatile=frozenset(buffers | extra_tensors.keys() | others.keys()),
        names=NamedState(aliases=state.aliases, extras=extras, optimizers=stored),
        metadata=None if metadata is None else encode_metadata(metadata),
        rank_metadata=joined(
            encode_metadata({name: value}, prefix=f"{name}.") for name, value in (rank_metadata or {}).items()
        ),
    )


def write_snapshot(
    path: PathLike, snapshot: Snapshot, ranks: Ranks, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Writes what all ranks brought; collective.

    Args:
        path: see `save_checkpoint`.
        snapshot: of this rank.
        ranks: everyone who saves.
        on_bytes: told of every write of this rank's tensors, in bytes.

    Raises:
        CheckpointError: see `save_checkpoint`.
    """
    final = ranks.together("reading the path", lambda: place_of(path))
    staging = open_staging(final, ranks)
    try:
        records = write_tensors(staging.folder, snapshot.tensors, ranks, on_bytes)
        names = ranks.gather_distinct(snapshot.names)
        own = _rank_documents(snapshot.rank_metadata, ranks)
        files = ranks.together(f"saving {final}", lambda: _first_rank_files(staging, snapshot, names, own))
        if staging.num_keepers > 1:
            files = ranks.broadcast(files)
        small = ranks.together(f"writing {staging.folder}", lambda: _write_files(staging, files))
        everything = {
            name: record for part in ranks.all_gather({**records, **small}) for name, record in part.items()
        }
        ranks.together(f"committing {final}", lambda: _commit(staging, everything, ranks.size))
    except BaseException:
        if staging.is_keeper:
            naming(staging.final).abandon(staging.folder)
        raise


def _rank_documents(own: Document, ranks: Ranks) -> list[Document]:
    """What each rank added. The tensors travel as `torch.save` writes them: pickle cannot do all dtypes."""
    packed = ranks.gather_distinct((own.values, own.tensor_bytes()) if own.values else None)
    return [
        Document(values=values, tensors=torch.load(io.BytesIO(content), weights_only=True))
        for values, content in packed
    ]


def _first_rank_files(
    staging: Staging, snapshot: Snapshot, names: Sequence[NamedState], own: Sequence[Document]
) -> dict[str, bytes]:
    """The files that are not written shard by shard; made on the first rank."""
    if snapshot.metadata is None:
        return {}
    whole = NamedState(
        aliases={name: target for part in names for name, target in part.aliases.items()},
        extras={name: document for part in names for name, document in part.extras.items()},
        optimizers=merged([part.optimizers for part in names]),
    )
    files = {STATE: json.dumps(asdict(whole)).encode(), **snapshot.metadata.files(METADATA)}
    if own:
        files |= joined(own).files(RANKS)
    if staging.num_keepers > 1:
        files[DCP_INDEX] = (staging.folder / DCP_INDEX).read_bytes()
    return files


def _write_files(staging: Staging, files: Mapping[str, bytes]) -> dict[str, FileRecord]:
    if not staging.is_keeper:
        return {}
    return {name: write_durably(staging.folder / name, content) for name, content in files.items()}


def _commit(staging: Staging, files: dict[str, FileRecord], world_size: int) -> None:
    if staging.is_keeper:
        commit(staging, files, world_size, torch.__version__)
