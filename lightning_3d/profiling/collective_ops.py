# SPDX-License-Identifier: Apache-2.0
"""Collectives as torch's dispatcher sees them: which they are, over which group, and what a rank sends.

Both forms are known: the operators behind `torch.distributed` (`c10d`), which FSDP2, DDP and pipelines use, and the
functional ones (`_c10d_functional`), which DTensor and compiled code use.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.compat import resolve_group


@dataclass(frozen=True)
class Call:
    """One collective that is about to run."""

    collective: str
    group: dist.ProcessGroup
    num_bytes: float
    """What this rank sends, in ring terms."""


@dataclass(frozen=True)
class _Operator:
    collective: str
    message: Callable[[tuple[Any, ...], int], float]
    """(arguments, ranks of the group) -> bytes of the whole message: what each rank has before or after."""


def _first(args: tuple[Any, ...], size: int) -> float:
    return _bytes(args[0])


def _second(args: tuple[Any, ...], size: int) -> float:
    return _bytes(args[1])


def _second_of_each(args: tuple[Any, ...], size: int) -> float:
    return _bytes(args[1]) * size


def _first_of_each(args: tuple[Any, ...], size: int) -> float:
    return _bytes(args[0]) * size


def _sends_of_batch(args: tuple[Any, ...], size: int) -> float:
    return sum(_bytes(tensor) for name, tensor in zip(args[0], args[3], strict=True) if "send" in name)


def _bytes(value: Any) -> float:
    """Bytes of tensors in any nesting of lists."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(item) for item in value)


ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"
SEND = "send"

_RING: Mapping[str, Callable[[int], float]] = {
    ALL_REDUCE: lambda size: 2 * (size - 1) / size,
    SEND: lambda size: 1.0,
}
"""Share of the message that a rank sends; (n-1)/n where nothing is said; of one-sided ones the mean over ranks."""

_OPERATORS: Mapping[str, _Operator] = {
    "c10d::allreduce_": _Operator(ALL_REDUCE, _first),
    "c10d::allreduce_coalesced_": _Operator(ALL_REDUCE, _first),
    "c10d::_allgather_base_": _Operator(ALL_GATHER, _first),
    "c10d::allgather_": _Operator(ALL_GATHER, _first),
    "c10d::allgather_coalesced_": _Operator(ALL_GATHER, _first),
    "c10d::allgather_into_tensor_coalesced_": _Operator(ALL_GATHER, _first),
    "c10d::_reduce_scatter_base_": _Operator(REDUCE_SCATTER, _second),
    "c10d::reduce_scatter_": _Operator(REDUCE_SCATTER, _second),
    "c10d::reduce_scatter_tensor_coalesced_": _Operator(REDUCE_SCATTER, _second),
    "c10d::alltoall_": _Operator("all_to_all", _second),
    "c10d::alltoall_base_": _Operator("all_to_all", _second),
    "c10d::broadcast_": _Operator("broadcast", _first),
    "c10d::reduce_": _Operator("reduce", _first),
    "c10d::gather_": _Operator("gather", _second_of_each),
    "c10d::scatter_": _Operator("scatter", _first_of_each),
    "c10d::send": _Operator(SEND, _first),
    "_c10d_functional::all_reduce": _Operator(ALL_REDUCE, _first),
    "_c10d_functional::all_reduce_": _Operator(ALL_REDUCE, _first),
    "_c10d_functional::all_reduce_coalesced": _Operator(ALL_REDUCE, _first),
    "_c10d_functional::all_reduce_coalesced_": _Operator(ALL_REDUCE, _first),
    "_c10d_functional::all_gather_into_tensor": _Operator(ALL_GATHER, _first_of_each),
    "_c10d_functional::all_gather_into_tensor_out": _Operator(ALL_GATHER, _first_of_each),
    "_c10d_functional::all_gather_into_tensor_coalesced": _Operator(ALL_GATHER, _first_of_each),
    "_c10d_functional::reduce_scatter_tensor": _Operator(REDUCE_SCATTER, _first),
    "_c10d_functional::reduce_scatter_tensor_out": _Operator(REDUCE_SCATTER, _first),
    "_c10d_functional::reduce_scatter_tensor_coalesced": _Operator(REDUCE_SCATTER, _first),
    "_c10d_functional::all_to_all_single": _Operator("all_to_all", _first),
    "_c10d_functional::broadcast": _Operator("broadcast", _first),
    "_c10d_functional::broadcast_": _Operator("broadcast", _first),
    "_c10d_functional::isend": _Operator(SEND, _first),
    "_c10d_functional::batch_p2p_ops": _Operator(SEND, _sends_of_batch),
}
"""Operators that send; receiving ones and barriers move nothing from this rank."""


def call_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """The collective that an operator starts, or None.

    Args:
        func: an operator, as a `TorchDispatchMode` gets it.
        args: its positional arguments.
        kwargs: its arguments by name.
    """
    operator = _OPERATORS.get(func.name().partition(".")[0])
    if operator is None:
        return None
    group = _group(func, args, kwargs)
    if group is None:
        return None
    size = group.size()
    share = _RING.get(operator.collective, _others)(size)
    return Call(operator.collective, group, share * operator.message(args, size))


def _others(size: int) -> float:
    return (size - 1) / size


def _group(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dist.ProcessGroup | None:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("process_group", "group_name"):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if isinstance(value, torch.ScriptObject):
                return dist.ProcessGroup.unbox(value)
            return resolve_group(value) if isinstance(value, str) else value
    return None
