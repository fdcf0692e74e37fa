# SPDX-License-Identifier: Apache-2.0
"""Optimizer state out of a file: make the tensors that a parameter has state in, then hand all over at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_3d.checkpoint.codec import Json, decode, outline_tensor
from lightning_3d.checkpoint.flat import FlatShard
from lightning_3d.checkpoint.low_bit import restored_moment, scales_name
from lightning_3d.checkpoint.optimizer_state import (
    LIKE_OTHER,
    LIKE_PARAMETER,
    StoredOptimizer,
    check_parameters,
    held_parameters,
)
from lightning_3d.checkpoint.shards import sharded
from lightning_3d.compat_torchao import is_low_bit
from lightning_3d.errors import CheckpointError


@dataclass(kw_only=True)
class OptimizerRestore:
    """What becomes of one optimizer when the tensors are read."""

    optimizer: Optimizer
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """Tensors to fill, with their names in the file (two tied parameters that are one there have two)."""
    state: list[tuple[torch.Tensor, dict[Any, Any]]] = field(default_factory=list)
    """The new state of each parameter; an empty one for a parameter that had none."""
    groups: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    """The optimizer's groups and their new hyperparameters."""
    held: set[str] = field(default_factory=set)
    """Parameters in the file that this optimizer holds."""
    missing: set[str] = field(default_factory=set)
    """Parameters that this optimizer holds and that the file's does not."""
    stateless: set[str] = field(default_factory=set)
    """Parameters that the file knows but has no state of."""
    conflicts: list[str] = field(default_factory=list)
    moments: dict[tuple[int, Any], torch.Tensor | None] = field(default_factory=dict)
    """For each parameter's id and key of a moment, the scales of this rank's box of it, if the file has them."""

    def apply(self) -> None:
        """Gives the optimizer its new state; the tensors are filled by now."""
        low_bit = is_low_bit(self.optimizer)
        for parameter, values in self.state:
            if values:
                for key in [key for key in values if (id(parameter), key) in self.moments] if low_bit else ():
                    scale = self.moments[id(parameter), key]
                    values[key] = restored_moment(self.optimizer, parameter, key, values[key], scale)
                self.optimizer.state[parameter] = values
            else:
                self.optimizer.state.pop(parameter, None)
        for group, hyper in self.groups:
            for key, value in hyper.items():
                group[key] = _kept(group.get(key), value)


def plan_restore(
    optimizer: Optimizer,
    number: int,
    stored: StoredOptimizer,
    index: Metadata,
    names: Mapping[int, str],
    file_names: Mapping[str, str],
) -> OptimizerRestore:
    """Finds what the file has for one optimizer, and makes the tensors that will hold it; changes nothing.

    Args:
        optimizer: this rank's.
        number: its position.
        stored: the file's.
        index: of the file's tensors.
        names: a parameter's name by id.
        file_names: this model's names to the file's, where they differ (tied tensors).

    Raises:
        CheckpointError: the optimizer holds parameters that the model does not have, or state that does not fit.
    """
    check_parameters(optimizer, number, names)
    restore = OptimizerRestore(optimizer=optimizer)
    group_of = {name: group for group in stored.groups for name in group["parameters"]}
    for position, group in enumerate(optimizer.param_groups):
        known: list[str] = []
        for parameter in group["params"]:
            own_name = names[id(parameter)]
            name = file_names.get(own_name, own_name)
            if name not in group_of:
                restore.missing.add(own_name)
                continue
            known.append(name)
            restore.state.append(
                (parameter, _new_state(restore, stored.state.get(name, ()), parameter, group, index))
            )
            if name not in stored.state:
                restore.stateless.add(own_name)
        restore.held.update(known)
        hyper = _hyper(number, position, [group_of[name] for name in known], stored.groups, restore.conflicts)
        restore.groups.append((group, decode(hyper, outline_tensor)))
    if not any(stored.state.get(name) for name in restore.held):
        restore.stateless.clear()  # an optimizer without state (SGD), or one that has not stepped: nothing to report
    return restore


def _hyper(
    number: int,
    position: int,
    groups: Sequence[dict[str, Any]],
    all_groups: Sequence[dict[str, Any]],
    conflicts: list[str],
) -> Json:
    """The hyperparameters that the file has for a group's parameters, or by position for a group without any."""
    candidates = groups or [group for group in all_groups if group["position"] == position]
    if not candidates:
        return {}
    first = candidates[0]["hyper"]
    if groups:
        differing = sorted(
            {key for group in groups for key in first if group["hyper"].get(key) != first[key]}
        )
        if differing:
            conflicts.append(
                f"group {position} of optimizer {number} has parameters of several groups of the checkpoint, whose "
                f"{', '.join(differing)} differ"
            )
    return first


def _new_state(
    restore: OptimizerRestore,
    entries: Sequence[dict[str, Any]],
    parameter: torch.Tensor,
    group: Mapping[str, Any],
    index: Metadata,
) -> dict[Any, Any]:
    values: dict[Any, Any] = {}
    for entry in entries:
        *parents, key = entry["path"]
        inner = values
        for parent in parents:
            inner = inner.setdefault(parent, {})
        if "value" in entry:
            inner[key] = decode(entry["value"], outline_tensor)
            continue
        stored = index.state_dict_metadata.get(entry["tensor"])
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(
                f"{entry['tensor']} is named in the checkpoint but not in it: it is damaged."
            )
        low_bit = is_low_bit(restore.optimizer)
        inner[key] = _room(entry, stored.size, parameter, group, low_bit=low_bit)
        restore.tensors.append((entry["tensor"], inner[key]))
        if low_bit and entry["like"] == LIKE_PARAMETER:
            restore.moments[id(parameter), key] = _room_for_scales(
                restore, entry["tensor"], inner[key], index
            )
    return values


def _room_for_scales(
    restore: OptimizerRestore, name: str, moment: torch.Tensor, index: Metadata
) -> torch.Tensor | None:
    """Where the scales of this rank's box of a moment go; None if it was saved in other boxes, or not in 8 bits."""
    name = scales_name(name, sharded(name, moment).box)
    stored = index.state_dict_metadata.get(name)
    if not isinstance(stored, TensorStorageMetadata):
        return None
    room = torch.empty(stored.size, dtype=stored.properties.dtype)
    restore.tensors.append((name, room))
    return room


def _room(
    entry: Mapping[str, Any],
    shape: torch.Size,
    parameter: torch.Tensor,
    group: Mapping[str, Any],
    *,
    low_bit: bool,
) -> torch.Tensor:
    """An empty tensor for an entry, placed as its parameter is; state follows a parameter whose dtype changed.

    Moments pass through fp32 on their way between 8 bits and anything else. See [Note: how 8-bit moments are stored].
    """
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    if entry["like"] == LIKE_PARAMETER:
        if shape != parameter.shape:
            raise CheckpointError(
                f"{entry['tensor']} has shape {tuple(shape)}, its parameter {tuple(parameter.shape)} now. "
                "Build the model as it was when saved."
            )
        if low_bit:
            dtype = torch.float32
        elif entry["dtype"] == entry["parameter_dtype"] or entry.get("low_bit"):
            dtype = parameter.dtype
        if isinstance(parameter, FlatShard):
            return parameter.room(tuple(entry["path"]), dtype)
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if entry["like"] == LIKE_OTHER and isinstance(parameter, DTensor):
        raise CheckpointError(
            f"{entry['tensor']} is sharded in a way that does not follow its parameter (shape {tuple(shape)}). "
            "Load it in one process, or save the optimizer's state replicated."
        )
    on_device = shape != torch.Size([]) or group.get("capturable") or group.get("fused")
    return torch.empty(shape, dtype=dtype, device=parameter.device if on_device else "cpu")


def _kept(current: Any, value: Any) -> Any:
    """A hyperparameter in the form that the optimizer has: a tensor stays the tensor that compiled code knows."""
    if isinstance(current, torch.Tensor):
        current.fill_(value)
        return current
    if isinstance(value, torch.Tensor) and isinstance(current, (int, float)):
        return value.item()
    return value


def all_parameters(stored: StoredOptimizer) -> set[str]:
    """Names of the parameters that the file's optimizer held."""
    return {name for group in stored.groups for name in group["parameters"]}


def needs_state(optimizers: Sequence[Optimizer]) -> bool:
    """Whether any optimizer holds parameters on this rank."""
    return any(held_parameters(optimizer) for optimizer in optimizers)
