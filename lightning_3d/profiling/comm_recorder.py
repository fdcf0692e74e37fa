# SPDX-License-Identifier: Apache-2.0
"""`CommRecorder`: counts what this rank sends, by axis and collective, and what it computes meanwhile."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from lightning_3d.compat import FakeTensor, TorchDispatchMode
from lightning_3d.profiling.collective_ops import call_of
from lightning_3d.profiling.topology import Topology

_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")
_ATTENTION = "_scaled_dot_product_flash_attention"
_CPU_ATTENTION = ("_for_cpu_backward", "_for_cpu")
"""Endings of the CPU's attention operators, which torch's table of operations leaves out."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What one rank sent with one collective along one axis."""

    axis: str
    collective: str
    count: int
    num_bytes: float
    """In ring terms: (n-1)/n of a gathered or scattered message, twice that of a reduced one, all of a sent one."""


class CommRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered, in the forward and in the backward. Every operator passes through Python then."""

    supports_higher_order_operators = True

    def __init__(self, topology: Topology) -> None:
        """Counts nothing yet.

        Args:
            topology: tells the axis of a process group.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._topology = topology
        self._axes: dict[str, str] = {}
        self._counts: dict[tuple[str, str], tuple[int, float]] = {}
        self.flops = 0.0
        """Operations of matrix products, convolutions and attention (its whole square) that ran here."""

    @property
    def transfers(self) -> list[Transfer]:
        """What was sent, by axis and collective."""
        return [
            Transfer(axis=axis, collective=collective, count=count, num_bytes=num_bytes)
            for (axis, collective), (count, num_bytes) in sorted(self._counts.items())
        ]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Counts a collective or a product, then runs it."""
        kwargs = dict(kwargs or {})
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # nothing is computed
        if any(kind is not torch.Tensor and kind is not torch.nn.Parameter for kind in types):
            return NotImplemented  # a DTensor: what it does with its shards comes by here too
        if getattr(func, "namespace", "") in _COLLECTIVE_NAMESPACES:
            self._count(func, args, kwargs)
        result = func(*args, **kwargs)
        formula = _formula(func)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        call = call_of(func, args, kwargs)
        if call is None or call.group.size() == 1:
            return
        name = str(call.group.group_name)
        if name not in self._axes:
            self._axes[name] = self._topology.axis_of(call.group)
        key = (self._axes[name], call.collective)
        count, num_bytes = self._counts.get(key, (0, 0.0))
        self._counts[key] = (count + 1, num_bytes + call.num_bytes)


def _formula(func: Any) -> Any:
    """Torch's count of an operator's operations, or None."""
    packet = getattr(func, "overloadpacket", None)
    found = flop_registry.get(packet)
    if found is None and packet is not None and packet.__name__.startswith(_ATTENTION):
        for ending in _CPU_ATTENTION:
            if packet.__name__ == _ATTENTION + ending:
                name = _ATTENTION + ending.removeprefix("_for_cpu")
                return flop_registry.get(getattr(torch.ops.aten, name))
    return found
