# SPDX-License-Identifier: Apache-2.0
"""`self.log` under a pipeline: gathered over microbatches where the loss is, then known to every stage."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.errors import StepError
from lightning_3d.mesh import ParallelMesh


class LogCall(NamedTuple):
    """One call of `self.log`."""

    name: str
    value: Any
    options: dict[str, Any]


def merge_microbatches(calls: list[LogCall]) -> list[LogCall]:
    """Turns the calls of all microbatches into one call a name, as if the step had seen the whole batch.

    Values are reduced by the call's own `reduce_fx` (mean weighted by `batch_size` where it is given); metric objects
    keep their last call, since they accumulate by themselves.

    Args:
        calls: in order of execution.

    Raises:
        StepError: a `reduce_fx` that cannot be applied to parts.
    """
    by_name: dict[str, list[LogCall]] = {}
    for call in calls:
        by_name.setdefault(call.name, []).append(call)
    return [_merge(same) for same in by_name.values()]


def _merge(calls: list[LogCall]) -> LogCall:
    last = calls[-1]
    if len(calls) == 1 or not isinstance(last.value, Tensor | float | int):
        return last
    values = torch.stack([torch.as_tensor(call.value).detach().double().reshape(()) for call in calls])
    sizes = [call.options.get("batch_size") for call in calls]
    options = dict(last.options)
    if all(size is not None for size in sizes):
        options["batch_size"] = sum(sizes)
    merged = _reduction(last)(values, torch.tensor([float(size or 1) for size in sizes], dtype=torch.float64))
    dtype = (
        last.value.dtype
        if isinstance(last.value, Tensor) and last.value.is_floating_point()
        else torch.float32
    )
    return LogCall(last.name, merged.to(dtype), options)


def _reduction(call: LogCall) -> Callable[[Tensor, Tensor], Tensor]:
    reduce_fx = call.options.get("reduce_fx", "mean")
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", repr(reduce_fx))
    known: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "mean": lambda values, weights: (values * weights).sum() / weights.sum(),
        "avg": lambda values, weights: (values * weights).sum() / weights.sum(),
        "sum": lambda values, weights: values.sum(),
        "max": lambda values, weights: values.max(),
        "min": lambda values, weights: values.min(),
    }
    if name not in known:
        raise StepError(
            f"self.log({call.name!r}, reduce_fx={name}) cannot be reduced over microbatches under pipeline parallelism."
            f" Use one of {', '.join(known)}, or log it with on_step=False from a torchmetrics metric."
        )
    return known[name]


class Publisher:
    """Sends the last stage's numbers to the other stages of its replica; collective over pp.

    The layout of a message (which names, which options) rarely changes, so it travels once as an object and later only
    as its number, beside the values.
    """

    _CAPACITY = 61
    _HEADER = 3

    def __init__(self, mesh: ParallelMesh, device: torch.device) -> None:
        self._mesh, self._device = mesh, device
        self._layouts: list[Any] = []

    def publish(self, layout: Any, values: list[Tensor | float]) -> tuple[Any, list[float]]:
        """Broadcasts a layout and its numbers.

        Args:
            layout: a picklable, comparable description; only read on the last stage.
            values: numbers, sent in fp64; only read on the last stage.

        Returns:
            The layout and numbers of the last stage, on every rank.
        """
        message = torch.zeros(self._HEADER + self._CAPACITY, dtype=torch.float64, device=self._device)
        group, source = self._mesh.group("pp"), self._mesh.loss_rank
        numbers: list[float] = []
        if self._mesh.holds_loss:
            number, known = self._number_of(layout)
            if len(values) <= self._CAPACITY:
                message[self._HEADER : self._HEADER + len(values)] = torch.tensor(
                    [float(value) for value in values], dtype=torch.float64
                )
            message[: self._HEADER] = torch.tensor(
                [number, float(not known), len(values)], dtype=torch.float64
            )
        dist.broadcast(message, src=source, group=group)
        number, is_new, count = (int(x) for x in message[: self._HEADER].tolist())
        if is_new or count > self._CAPACITY:
            payload = [(layout, [float(value) for value in values]) if self._mesh.holds_loss else None]
            dist.broadcast_object_list(payload, src=source, group=group, device=self._device)
            layout, numbers = payload[0]  # type: ignore[misc]
            if is_new and not self._mesh.holds_loss:
                self._layouts.append(layout)
            return layout, numbers
        return self._layouts[number], message[self._HEADER : self._HEADER + count].tolist()

    def _number_of(self, layout: Any) -> tuple[int, bool]:
        if layout in self._layouts:
            return self._layouts.index(layout), True
        self._layouts.append(layout)
        return len(self._layouts) - 1, False
