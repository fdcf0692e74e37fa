# SPDX-License-Identifier: Apache-2.0
"""What can be done to logits without gathering them: a table from torch functions to functions of one rank's classes.

Each takes the local logits [..., V/tp], the shard and the rest of the arguments, and returns NotImplemented where it
needs the classes of other ranks: then the logits are gathered, and the torch function runs on them.
"""

import math
import numbers
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.parallel.tensor.cross_entropy import can_shard, reduction_of, sharded_cross_entropy
from lightning_3d.parallel.tensor.vocab_shard import VocabShard


class Keep(Enum):
    """What a function's result is."""

    VALUE = "local logits of their own"
    VIEW = "a view of the local logits"
    NOTHING = "no logits"


LocalFunction = Callable[..., Any]
FUNCTIONS: dict[Any, tuple[Keep, LocalFunction]] = {}
"""Torch function -> what it gives, and how it is done on local logits."""


def _register(keep: Keep, *names: str) -> Callable[[LocalFunction], LocalFunction]:
    """Registers a function for what `Tensor` and `torch` call by these names."""

    def register(function: LocalFunction) -> LocalFunction:
        for owner in (Tensor, torch):
            for name in names:
                if hasattr(owner, name):
                    FUNCTIONS[getattr(owner, name)] = (keep, function)
        return function

    return register


def _elementwise(name: str) -> None:
    @_register(Keep.VALUE, name)
    def function(local: Tensor, shard: VocabShard, *args: Any, **kwargs: Any) -> Any:
        return getattr(local, name)(*args, **kwargs)


def _scaling(name: str) -> None:
    @_register(Keep.VALUE, name)
    def function(local: Tensor, shard: VocabShard, other: Any, **kwargs: Any) -> Any:
        return getattr(local, name)(other) if not kwargs and _is_constant(other) else NotImplemented


def _is_constant(value: Any) -> bool:
    """A number, or a scalar tensor without gradient (which would be summed over this rank's classes only)."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.requires_grad
    return isinstance(value, numbers.Number)


def _along_dim(name: str, position: int) -> None:
    @_register(Keep.VIEW, name)
    def function(local: Tensor, shard: VocabShard, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("dim", args[position] if len(args) > position else 0)
        if not isinstance(dim, int) or dim % local.dim() == local.dim() - 1:
            return NotImplemented
        return getattr(local, name)(*args, **kwargs)


for _name in ("float", "double", "half", "bfloat16", "contiguous", "clone", "detach", "tanh", "neg"):
    _elementwise(_name)
for _name in ("mul", "multiply", "div", "divide", "true_divide", "add", "sub"):
    _scaling(_name)
for _name in ("__mul__", "__rmul__", "__truediv__", "__add__", "__radd__", "__sub__"):
    _scaling(_name)
for _name, _position in {"chunk": 1, "split": 1, "unbind": 0, "narrow": 0, "select": 0}.items():
    _along_dim(_name, _position)


@_register(Keep.VALUE, "to", "type")
def _to(local: Tensor, shard: VocabShard, *args: Any, **kwargs: Any) -> Any:
    if not args and not kwargs:
        return NotImplemented
    result = local.to(*args, **kwargs)
    return result if result.device == local.device else NotImplemented


@_register(Keep.VIEW, "view", "reshape")
def _reshape(local: Tensor, shard: VocabShard, *shape: Any, **kwargs: Any) -> Any:
    shape = (kwargs["shape"],) if "shape" in kwargs else shape
    if len(shape) == 1 and isinstance(shape[0], list | tuple):
        shape = tuple(shape[0])
    if not shape or not all(isinstance(length, int) for length in shape):
        return NotImplemented
    classes = shape[-1]
    if classes == -1:
        leading, rows = math.prod(shape[:-1]), math.prod(local.shape[:-1])
        classes = shard.size if leading == rows else -1
    if classes != shard.size:
        return NotImplemented
    return local.reshape(*shape[:-1], local.shape[-1])


@_register(Keep.VIEW, "flatten")
def _flatten(local: Tensor, shard: VocabShard, start_dim: int = 0, end_dim: int = -1) -> Any:
    if local.dim() == 0 or end_dim % local.dim() >= local.dim() - 1:
        return NotImplemented
    return local.flatten(start_dim, end_dim)


@_register(Keep.VIEW, "unsqueeze")
def _unsqueeze(local: Tensor, shard: VocabShard, dim: int) -> Any:
    dim = dim + local.dim() + 1 if dim < 0 else dim
    return local.unsqueeze(dim) if dim < local.dim() else NotImplemented


@_register(Keep.VIEW, "__getitem__")
def _getitem(local: Tensor, shard: VocabShard, index: Any) -> Any:
    return (
        local[index]
        if _leaves_classes(index if isinstance(index, tuple) else (index,), local.dim())
        else NotImplemented
    )


def _leaves_classes(index: tuple[Any, ...], num_dims: int) -> bool:
    """Whether an index leaves the last dim as it is and where it is."""
    everything = slice(None)
    positions = [position for position, item in enumerate(index) if item is Ellipsis]
    if positions:
        behind = index[positions[0] + 1 :]
        return not behind or (isinstance(behind[-1], slice) and behind[-1] == everything)
    if sum(_consumed_dims(item) for item in index) < num_dims:
        return True
    return isinstance(index[-1], slice) and index[-1] == everything


def _consumed_dims(item: Any) -> int:
    if item is None:
        return 0
    if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1


def _cross_entropy(
    local: Tensor,
    shard: VocabShard,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if not can_shard(local, target, weight):
        return NotImplemented
    return sharded_cross_entropy(
        local,
        target,
        shard,
        ignore_index=ignore_index,
        reduction=reduction_of(reduction, size_average, reduce),
        smoothing=label_smoothing,
    )


FUNCTIONS[F.cross_entropy] = (Keep.NOTHING, _cross_entropy)


@_register(Keep.NOTHING, "register_hook")
def _register_hook(local: Tensor, shard: VocabShard, hook: Callable[[Tensor], Any]) -> Any:
    """FSDP2 hooks the outputs of a module; whichever way the gradient comes, it passes the local logits."""
    return local.register_hook(hook)  # type: ignore[no-untyped-call]


_METADATA = {
    *(
        getattr(Tensor, name)
        for name in ("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size")
    ),
    *(
        getattr(Tensor, name)
        for name in ("is_floating_point", "is_complex", "is_contiguous", "get_device", "__len__")
    ),
    *(getattr(Tensor, name) for name in ("is_signed", "is_inference", "requires_grad_", "__hash__")),
    *(
        getattr(torch, name)
        for name in ("numel", "is_floating_point", "is_complex", "is_inference", "is_signed")
    ),
}
_GATHERING_PROPERTIES = {"T", "mT", "H", "mH", "real", "imag", "data"}
_IN_PLACE_OPERATORS = {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "and", "or", "xor")
}


def is_metadata(func: Any) -> bool:
    """Whether a torch function asks for what a tensor is, not for its values."""
    if func in _METADATA:
        return True
    owner = getattr(getattr(func, "__self__", None), "__name__", "")
    return getattr(func, "__name__", "") in ("__get__", "__set__") and owner not in _GATHERING_PROPERTIES


def writes_in_place(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a torch function changes its first argument."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or name in _IN_PLACE_OPERATORS or kwargs.get("out") is not None
