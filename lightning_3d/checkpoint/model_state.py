# SPDX-License-Identifier: Apache-2.0
"""A module's state, shard by shard, under names that do not depend on the layout."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_3d.checkpoint.codec import Json, UnsafeValueError, decode, encode
from lightning_3d.checkpoint.names import canonical, live_tensors
from lightning_3d.checkpoint.shards import ShardedTensor, sharded
from lightning_3d.errors import CheckpointError

PREFIX = "model."
EXTRA_PREFIX = "extra."
BESIDE_PREFIX = "beside."
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """What this rank's module has to save, or wants to be filled."""

    tensors: dict[str, torch.Tensor]
    """Parameters, buffers and what state-dict hooks add, by name, each tied tensor once."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names of tied tensors to the name in `tensors`."""
    extras: dict[str, Any] = field(default_factory=dict)
    """Entries that are no tensors (`get_extra_state`)."""
    detached: frozenset[str] = frozenset()
    """Names in `tensors` that are copies, not the module's own memory: filled through `load_state_dict`."""

    def sharded(self) -> dict[str, ShardedTensor]:
        """The tensors under their names in the file."""
        return {PREFIX + name: sharded(name, tensor) for name, tensor in self.tensors.items()}


def model_state(
    model: nn.Module,
    aliases: Mapping[str, str] | None = None,
    keys: Collection[str] | None = None,
    entries: Mapping[str, Any] | None = None,
) -> ModelState:
    """Reads a module through its `state_dict`, so that its hooks are respected; shares its memory.

    Args:
        model: the module, or the part of it that lives on this rank. FSDP parameters are resharded.
        aliases: see `parameter_names`.
        keys: only these entries, e.g. what `on_save_checkpoint` left; all if None.
        entries: values in place of, or beside, those of the state dict, e.g. what `on_save_checkpoint` put there.

    Raises:
        CheckpointError: two entries have one name.
    """
    live = live_tensors(model)
    wanted = None if keys is None else {canonical(key) for key in keys}
    tensors: dict[str, torch.Tensor] = {}
    extras: dict[str, Any] = {}
    names_of = dict(aliases or {})
    stored: dict[int, str] = {}
    for key, value in {**model.state_dict(keep_vars=True), **(entries or {})}.items():
        name = names_of.get(canonical(key), canonical(key))
        if wanted is not None and canonical(key) not in wanted:
            continue
        if stored.get(id(value)) == name:
            continue
        if name in tensors or name in extras:
            raise CheckpointError(f"Two entries of the state dict are called {name}. Rename one of them.")
        if not isinstance(value, torch.Tensor):
            extras[name] = value
        elif id(value) in stored:
            names_of[name] = stored[id(value)]
        else:
            tensors[name] = value
            stored[id(value)] = name
    detached = frozenset(name for name, tensor in tensors.items() if id(tensor) not in live)
    return ModelState(tensors=tensors, aliases=names_of, extras=extras, detached=detached)


def beside_state(
    beside: Mapping[str, Mapping[str, torch.Tensor]] | None, aliases: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Tensors that are no part of the model, like averages of its weights, under their names in the file.

    Args:
        beside: tensors by label and by their name in the model; tied names have the same tensor.
        aliases: a name to the name under which its tensor is stored.
    """
    return {
        f"{BESIDE_PREFIX}{label}.{aliases.get(canonical(name), canonical(name))}": tensor
        for label, tensors in (beside or {}).items()
        for name, tensor in tensors.items()
    }


def encode_extras(extras: Mapping[str, Any]) -> tuple[dict[str, Json], dict[str, ShardedTensor]]:
    """Entries that are no tensors as a document, and the tensors inside them.

    Raises:
        CheckpointError: an entry that only pickle could store.
    """
    tensors: dict[str, ShardedTensor] = {}
    documents = {}
    for name, value in extras.items():

        def put(tensor: torch.Tensor, name: str = name) -> str:
            key = f"{EXTRA_PREFIX}{name}.{len(tensors)}"
            tensors[key] = sharded(key, tensor)
            return key

        try:
            documents[name] = encode(value, name, put)
        except UnsafeValueError as error:
            raise CheckpointError(
                f"The model's state has something that cannot be stored without pickle: {error}. "
                "Return tensors, numbers, text or containers of them from get_extra_state."
            ) from None
    return documents, tensors


def load_extras(model: nn.Module, documents: Mapping[str, Json], tensors: Mapping[str, torch.Tensor]) -> None:
    """Hands the entries that are not the module's own tensors to the module.

    Args:
        model: the module.
        documents: of `encode_extras`, for this rank's entries.
        tensors: the tensors inside them, by their names in the file.
    """
    values = {name: decode(document, tensors.__getitem__) for name, document in documents.items()}
    load_entries(model, values)


def load_entries(model: nn.Module, values: Mapping[str, Any]) -> None:
    """`load_state_dict` of a few entries, under the names that the wrapped module has now."""
    if not values:
        return
    own = {canonical(key): key for key in model.state_dict(keep_vars=True)}
    model.load_state_dict({own[name]: value for name, value in values.items() if name in own}, strict=False)
