# SPDX-License-Identifier: Apache-2.0
"""`MemoryMeter`: every tensor's storage from its birth to its death, on any device.

[Note: what a storage was for]
Operators say when a storage is made, a weak reference says when it goes; what it was *for* is known only later. A
storage that was made in the forward and that the backward still found is an activation; one that went before is
temporary. So the meter writes down births and deaths, and `MemoryMeter.stop` sorts them into categories at the end.
Memory inside one operator (a workspace) is not seen; the device's allocator, where there is one, sees it.
"""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.compat import TorchDispatchMode, in_backward, leave_mode, tree_tensors, watch_resizes
from lightning_3d.trace import CATEGORIES, OUTSIDE, Moment, SpanTrace, thinned

MOST_MOMENTS = 1000
"""Moments kept of a span's timeline."""
_INDEX = {category: index for index, category in enumerate(CATEGORIES)}
_PLAIN = (Tensor, nn.Parameter)


@dataclass(slots=True, eq=False)
class _Life:
    """One storage."""

    num_bytes: int
    category: str
    """Empty until it is known; see [Note: what a storage was for]."""
    block: str
    born_in: str
    died_in: str = ""
    was_resized: bool = False
    was_there: bool = False
    """Whether no operator made it in the span: a receive buffer, a backend's workspace."""


@dataclass(slots=True)
class _Event:
    change: int
    life: _Life
    phase: str
    block: str


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Meters what runs inside `start` ... `stop`; see [Note: what a storage was for].

    Args:
        device: where the tensors live that count.
        limit_bytes: raise `torch.OutOfMemoryError` beyond it, as a device of that size would; None for no limit.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "other"
        self.block = OUTSIDE
        self._device, self._limit = device.type, limit_bytes
        self._lives: dict[Any, _Life] = {}
        self._events: list[_Event] = []
        self._alive = 0
        self._num_before = 0  # events of storages that were there before the span
        self._is_entered = False
        self._undo: Any = None

    # --- a span -----------------------------------------------------------------------------------------------------

    def start(self, known: Mapping[str, Iterable[Any]], owners: Mapping[str, Iterable[Any]]) -> None:
        """Begins a span.

        Args:
            known: tensors that are there already, by category.
            owners: parameters by the name of the block that they belong to.
        """
        self._lives, self._events, self._alive = {}, [], 0
        self.block = OUTSIDE
        block_of = {id(parameter): name for name, parameters in owners.items() for parameter in parameters}
        for category, tensors in known.items():
            for tensor in tensors:
                self._note(tensor, category, block_of.get(id(tensor), OUTSIDE))
        self._num_before = len(self._events)
        self._undo = watch_resizes(self._resized)
        # A callback's hooks begin and end a span: no `with` reaches from one to the other.
        self.__enter__()  # type: ignore[no-untyped-call]
        self._is_entered = True
        self._check_limit(0)

    def stop(self, name: str, known: Mapping[str, Iterable[Any]]) -> SpanTrace:
        """Ends a span and sorts what was seen.

        Args:
            name: of the span.
            known: gradients and optimizer state that have come into being, by category.
        """
        leave_mode(self)
        self._is_entered = False
        self._undo()
        for category, tensors in known.items():
            self.mark(tensors, category)
        return self._sorted(name)

    def mark(self, tensors: Iterable[Any], category: str) -> None:
        """Says what tensors are for that were made inside the span (gradients, before they are dropped)."""
        for tensor in tensors:
            life = self._life_of(_local(tensor))
            if life is not None and life.category not in ("parameters", "optimizer"):
                life.category = category

    def watch(self, blocks: Mapping[str, nn.Module]) -> list[Any]:
        """Hooks blocks, to know which one runs, in both directions; returns the handles of the hooks."""
        handles = []
        for name, block in blocks.items():
            handles.append(block.register_forward_pre_hook(lambda module, args, name=name: self._enter(name)))
            handles.append(
                block.register_forward_hook(lambda module, args, output, name=name: self._leave(name, output))
            )
        return handles

    def _enter(self, name: str) -> None:
        self.block = name

    def _leave(self, name: str, output: Any) -> None:
        if in_backward():
            return  # recomputed inside the backward of this very block
        self.block = OUTSIDE
        for tensor in tree_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._enter(name))  # type: ignore[no-untyped-call]
                break

    # --- operators --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator and notes the storages of its results; a DTensor is seen as the local tensors inside."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        for tensor in tree_tensors(args):
            self._note(tensor, "", was_there=True)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_tensors(result):
            self._note(tensor, "")
        return result

    def _note(self, tensor: Any, category: str, block: str | None = None, was_there: bool = False) -> None:
        tensor = _local(tensor)
        if type(tensor) not in _PLAIN or tensor.device.type != self._device:
            return
        storage = tensor.untyped_storage()
        life = self._lives.get(weakref.ref(storage))
        if life is not None:
            self._resized(storage)
            return
        life = self._begin(storage, category, self.block if block is None else block)
        life.was_there = was_there
        self._change(life, storage.nbytes())

    def _begin(self, storage: Any, category: str, block: str) -> _Life:
        life = _Life(0, category, block, self._phase())
        self._lives[weakref.ref(storage, self._freed)] = life
        return life

    def _change(self, life: _Life, num_bytes: int) -> None:
        change, life.num_bytes = num_bytes - life.num_bytes, num_bytes
        self._alive += change
        self._events.append(_Event(change, life, self._phase(), self.block))
        if change > 0 and self._is_entered:
            self._check_limit(change)

    def _check_limit(self, change: int) -> None:
        if self._limit is not None and self._alive > self._limit:
            raise torch.OutOfMemoryError(
                f"{self._alive:,} bytes of tensors are alive, the limit is {self._limit:,}: tried to allocate"
                f" {change:,} bytes in {self._phase()}, {self.block}."
            )

    def _resized(self, storage: Any) -> None:
        life = self._lives.get(weakref.ref(storage)) or self._begin(storage, "", self.block)
        if life.num_bytes != storage.nbytes():
            life.was_resized = True
            self._change(life, storage.nbytes())

    def _freed(self, reference: Any) -> None:
        life = self._lives.pop(reference, None)
        if life is not None:
            life.died_in = self._phase()
            self._alive -= life.num_bytes
            self._events.append(_Event(-life.num_bytes, life, life.died_in, self.block))

    def _life_of(self, tensor: Any) -> _Life | None:
        return self._lives.get(weakref.ref(tensor.untyped_storage())) if type(tensor) in _PLAIN else None

    def _phase(self) -> str:
        return "backward" if in_backward() else self.phase

    # --- the end ----------------------------------------------------------------------------------------------------

    def _sorted(self, name: str) -> SpanTrace:
        alive = [0] * len(CATEGORIES)
        for event in self._events[: self._num_before]:
            alive[_INDEX[_category(event.life)]] += event.change
        moments = [Moment(phase=self.phase, block=OUTSIDE, num_bytes=tuple(alive))]
        highest, peak_at = 0, 0
        for position, event in enumerate(self._events[self._num_before :], start=1):
            alive[_INDEX[_category(event.life)]] += event.change
            moments.append(Moment(phase=event.phase, block=event.block, num_bytes=tuple(alive)))
            if moments[-1].total > highest:
                highest, peak_at = moments[-1].total, position
        by_phase: dict[str, Moment] = {}
        for moment in moments:
            if moment.phase not in by_phase or moment.total > by_phase[moment.phase].total:
                by_phase[moment.phase] = moment
        return SpanTrace(
            name=name,
            timeline=thinned(moments, MOST_MOMENTS),
            peak=moments[peak_at],
            peak_of_phase=by_phase,
            blocks_at_peak=self._blocks_until(peak_at),
        )

    def _blocks_until(self, position: int) -> dict[str, dict[str, int]]:
        blocks: dict[str, dict[str, int]] = {}
        for event in self._events[: self._num_before + position]:
            of_block = blocks.setdefault(event.life.block, dict.fromkeys(CATEGORIES, 0))
            of_block[_category(event.life)] += event.change
        return {block: values for block, values in blocks.items() if any(values.values())}


def _category(life: _Life) -> str:
    if life.category:
        return life.category
    if life.was_resized:
        return "gathered"  # FSDP2 empties and refills the storages of whole parameters
    if life.was_there and not life.died_in:
        return "buffers"
    lived_on = life.died_in != life.born_in and not life.was_there
    return "activations" if life.born_in == "forward" and lived_on else "temporary"


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
