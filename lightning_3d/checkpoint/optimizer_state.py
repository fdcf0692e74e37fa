# SPDX-License-Identifier: Apache-2.0
"""Optimizer state by parameter name: what makes it independent of layout, group order and stage.

Every parameter has entries of its own (`optimizers.<i>.state.<parameter>.<key>`), and the hyperparameters are
stored by parameter too, those that share them once. A rank saves the parameters that its optimizers hold, and asks
at load for what the file has on its parameters. A parameter that never had a gradient has no entries and none are
asked for.

The optimizers are read and written directly. `torch.distributed.checkpoint.state_dict` would step each of them to
initialise state that is not there, and asks at load for state of parameters that have none.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_3d.checkpoint.codec import Json, UnsafeValueError, encode, inline_tensor
from lightning_3d.checkpoint.low_bit import stored_moment
from lightning_3d.checkpoint.shards import ShardedTensor, sharded
from lightning_3d.compat_torchao import is_low_bit
from lightning_3d.errors import CheckpointError

_NOT_HYPER = ("params", "param_names")
LIKE_PARAMETER = "parameter"
LIKE_PLAIN = "plain"
LIKE_OTHER = "sharded"

Path = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class StoredOptimizer:
    """One optimizer in the file; a rank's part of it, or (after `merged`) all of it."""

    type_name: str
    groups: list[dict[str, Any]]
    """`{"position": i, "hyper": document, "parameters": [names]}`."""
    state: dict[str, list[dict[str, Any]]]
    """Entries of a parameter: `{"path", "tensor", "like", "dtype", "low_bit"}` or `{"path", "value"}`."""


def optimizer_state(
    optimizers: Sequence[Optimizer], names: Mapping[int, str]
) -> tuple[list[StoredOptimizer], dict[str, ShardedTensor]]:
    """This rank's optimizer state and its tensors, sharing their memory.

    Args:
        optimizers: the same number in the same order on every rank; a rank may hold none of their parameters.
        names: of `parameter_names`.

    Raises:
        CheckpointError: a parameter that the model does not have, or a value with no safe form.
    """
    stored: list[StoredOptimizer] = []
    tensors: dict[str, ShardedTensor] = {}
    for number, optimizer in enumerate(optimizers):
        check_parameters(optimizer, number, names)
        state: dict[str, list[dict[str, Any]]] = {}
        for parameter in held_parameters(optimizer):
            values = optimizer.state.get(parameter)
            if not values:
                continue
            name = names[id(parameter)]
            prefix = f"optimizers.{number}.state.{name}"
            state[name] = []
            for path, value in _leaves(values, prefix):
                entry, found = _entry(prefix, path, value, parameter, low_bit=is_low_bit(optimizer))
                state[name].append(entry)
                tensors |= found
        groups = [
            _group(number, position, group, names) for position, group in enumerate(optimizer.param_groups)
        ]
        kind = type(optimizer)
        stored.append(
            StoredOptimizer(type_name=f"{kind.__module__}.{kind.__qualname__}", groups=groups, state=state)
        )
    return stored, tensors


def held_parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """All parameters of an optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_parameters(optimizer: Optimizer, number: int, names: Mapping[int, str]) -> None:
    """Refuses parameters without a name.

    Raises:
        CheckpointError: the optimizer holds parameters that are not the model's.
    """
    foreign = [parameter for parameter in held_parameters(optimizer) if id(parameter) not in names]
    if foreign:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in foreign[:4])
        raise CheckpointError(
            f"Optimizer {number} ({type(optimizer).__name__}) holds {len(foreign)} parameters that the model does not "
            f"have (shapes {shapes}). Make them attributes of the module, and the optimizer after the model is sharded."
        )


def _leaves(values: Mapping[Any, Any], where: str, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Tensors and values in nested dicts, by path."""
    for key, value in values.items():
        if not isinstance(key, (str, int)):
            raise CheckpointError(
                f"{where} has a key of type {type(key).__name__}; only str and int are stored."
            )
        if isinstance(value, Mapping):
            yield from _leaves(value, where, (*path, key))
        else:
            yield (*path, key), value


def _entry(
    prefix: str, path: Path, value: Any, parameter: torch.Tensor, *, low_bit: bool
) -> tuple[dict[str, Any], dict[str, ShardedTensor]]:
    name = ".".join([prefix, *map(str, path)])
    if not isinstance(value, torch.Tensor):
        return {"path": list(path), "value": _document(value, name)}, {}
    like = LIKE_PLAIN
    if value.shape == parameter.shape and path != ("step",):
        like = LIKE_PARAMETER
    elif isinstance(value, DTensor):
        like = LIKE_OTHER
    if low_bit and like == LIKE_PARAMETER:
        tensors = stored_moment(name, value)
    else:
        tensors = {name: sharded(name, value)}
    entry = {
        "path": list(path),
        "tensor": name,
        "like": like,
        "dtype": str(tensors[name].dtype).removeprefix("torch."),
        "parameter_dtype": str(parameter.dtype).removeprefix("torch."),
        "low_bit": low_bit and like == LIKE_PARAMETER,
    }
    return entry, tensors


def _group(number: int, position: int, group: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    hyper = {
        key: _document(value, f"optimizers.{number}.param_groups.{position}.{key}")
        for key, value in group.items()
        if key not in _NOT_HYPER
    }
    return {
        "position": position,
        "hyper": hyper,
        "parameters": [names[id(parameter)] for parameter in group["params"]],
    }


def _document(value: Any, name: str) -> Json:
    try:
        return encode(value, name, inline_tensor)
    except UnsafeValueError as error:
        raise CheckpointError(
            f"An optimizer has something that cannot be stored without pickle: {error}. "
            "Keep tensors, numbers and text in param_groups and state."
        ) from None


def merged(parts: Sequence[Sequence[StoredOptimizer]]) -> list[StoredOptimizer]:
    """The optimizers of all ranks as one.

    Raises:
        CheckpointError: ranks hold different numbers of optimizers.
    """
    counts = {len(part) for part in parts}
    if len(counts) > 1:
        raise CheckpointError(
            f"Ranks hold {' and '.join(map(str, sorted(counts)))} optimizers. Every rank passes the same number; "
            "one without parameters there may have empty groups."
        )
    return [_merged(optimizers) for optimizers in zip(*parts, strict=True)]


def _merged(parts: Sequence[StoredOptimizer]) -> StoredOptimizer:
    state: dict[str, list[dict[str, Any]]] = {}
    groups: list[dict[str, Any]] = []
    for part in parts:
        for name, entries in part.state.items():
            state.setdefault(name, entries)
        for group in part.groups:
            same = [known for known in groups if _identity(known) == _identity(group)]
            if same:
                same[0]["parameters"] = list(dict.fromkeys([*same[0]["parameters"], *group["parameters"]]))
            else:
                groups.append({**group, "parameters": list(group["parameters"])})
    return StoredOptimizer(type_name=parts[0].type_name, groups=groups, state=state)


def _identity(group: Mapping[str, Any]) -> tuple[int, str]:
    return group["position"], repr(sorted(group["hyper"].items()))
