# SPDX-License-Identifier: Apache-2.0
"""A tensor of which a rank holds a run of the flattened elements, as ZeRO's partitions are cut.

A run that begins and ends anywhere is not a box of the tensor, but it is a few boxes: a rest of a row, whole rows, and
the beginning of a row, dim by dim. So the shards of ZeRO go into the same files as those of any other layout.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes in the whole tensor."""


class FlatShard(torch.Tensor):
    """Has the shape and dtype of the whole tensor, but no data except the run of this rank."""

    run: torch.Tensor
    """The elements of this rank [L], a view of the memory that they live in."""
    start: int
    """Position of the first of them in the flattened tensor."""
    room: Callable[[tuple[Any, ...], torch.dtype], "FlatShard"]
    """Makes what holds optimizer state of this parameter; takes its path and dtype."""

    @classmethod
    def of(cls, shape: Sequence[int], run: torch.Tensor, start: int) -> "FlatShard":
        """Describes a run; shares its memory.

        Args:
            shape: of the whole tensor.
            run: elements [L], none at all is fine.
            start: position of the first one in the flattened tensor.
        """
        shard = torch.empty(tuple(shape), dtype=run.dtype, device="meta").as_subclass(cls)
        shard.run, shard.start = run.detach(), start
        shard.room = lambda path, dtype: cls.of(shape, torch.zeros_like(run, dtype=dtype), start)
        return shard

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the run is."""
        return self.run.device

    def boxes(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """The run as boxes of the whole tensor: offsets, and the data there as a view."""
        position = 0
        for offsets, sizes in flat_boxes(self.shape, self.start, self.start + self.run.numel()):
            length = math.prod(sizes)
            yield offsets, self.run.narrow(0, position, length).view(sizes)
            position += length


def flat_boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """The boxes of the elements [begin, end) of a flattened tensor, in their order; at most 2 * dims - 1."""
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, last = -(-begin // inner), end // inner
    if first > last:  # within one row
        yield from _in_row(shape, last, begin - last * inner, end - last * inner)
        return
    if first * inner > begin:
        yield from _in_row(shape, first - 1, begin - (first - 1) * inner, inner)
    if last > first:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, end - last * inner)


def _in_row(shape: Sequence[int], row: int, begin: int, end: int) -> Iterator[Box]:
    for offsets, sizes in flat_boxes(shape[1:], begin, end):
        yield (row, *offsets), (1, *sizes)
