# SPDX-License-Identifier: Apache-2.0
"""What stands for the output of a module that another stage has: the right shapes, without the module's parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def run_on_meta(
    twin: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> Any:
    """Runs a meta copy of a module and returns its output as zeros on `device`, without memory of their own."""
    with torch.no_grad():
        output = twin(*map_tensors(_to_meta, args), **map_tensors(_to_meta, dict(kwargs)))
    return map_tensors(lambda t: torch.zeros((), dtype=t.dtype, device=device).expand(t.shape), output)


def _to_meta(tensor: Tensor) -> Tensor:
    return tensor.detach().to("meta")


def map_tensors(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nesting of containers with every tensor replaced."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, Mapping):
        mapped = {key: map_tensors(fn, item) for key, item in value.items()}
        return type(value)(**mapped) if hasattr(value, "to_tuple") else type(value)(mapped)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(fn, item) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(fn, item) for item in value)
    return value


def poison(tensor: Tensor) -> Tensor:
    """NaN in the shape of a stand-in, with memory of its own; integers stay as they are."""
    return torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor
