# SPDX-License-Identifier: Apache-2.0
"""Which rows of a global tensor a rank holds, whatever its placements.

[Note: why not torch's own offsets] `compute_local_shape_and_global_offset` gives one box per rank and reads
FSDP over tensor parallel left to right. Both are wrong for shapes that do not divide (61 rows over tp 4 and
dp 2: the last shard has 7 rows, not 8) and for interleaved shards (a fused gate/up weight, of which a rank holds
one piece of each half). Here a dim is split in the order in which the data was split, into as many runs as it
takes.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_3d.compat import StridedShard

Runs = list[tuple[int, int]]
"""Rows of one tensor dim, in local order, as (global start, length)."""


def local_part(whole: Tensor, sharded: DTensor) -> Tensor:
    """The part of `whole` that a DTensor of its shape holds on this rank.

    Args:
        whole: the global tensor, plain.
        sharded: says how the tensor is placed.
    """
    coordinate = sharded.device_mesh.get_coordinate()
    if coordinate is None:
        return whole.new_empty(sharded.to_local().shape)
    part = whole
    for dim, runs in enumerate(
        local_runs(sharded.shape, sharded.device_mesh.shape, coordinate, sharded.placements)
    ):
        if runs != [(0, whole.shape[dim])]:
            rows = [part.narrow(dim, start, length) for start, length in runs]
            part = torch.cat(rows, dim) if rows else part.narrow(dim, 0, 0)
    return part


def local_runs(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> list[Runs]:
    """The rows of every dim that the rank at `coordinate` holds, in the order in which it holds them."""
    runs: list[Runs] = [[(0, size)] for size in shape]
    for dim in range(len(shape)):
        for axis in _split_order(dim, mesh_shape, placements):
            placement = placements[axis]
            interleaved = isinstance(placement, StridedShard) and not _is_outer(axis, mesh_shape, placements)
            factor = int(placement.split_factor) if interleaved else 1  # type: ignore[attr-defined]
            runs[dim] = _take(runs[dim], mesh_shape[axis], coordinate[axis], factor)
    return runs


def _split_order(dim: int, mesh_shape: Sequence[int], placements: Sequence[Placement]) -> list[int]:
    """Mesh axes that shard `dim`, in the order in which its data was split."""
    axes = [axis for axis, placement in enumerate(placements) if _shards(placement, dim)]
    late = [axis for axis in axes if _is_outer(axis, mesh_shape, placements)]
    return [axis for axis in axes if axis not in late] + late[::-1]


def _is_outer(axis: int, mesh_shape: Sequence[int], placements: Sequence[Placement]) -> bool:
    """Whether this axis comes before others on the mesh but split the data after them (FSDP over tp)."""
    placement = placements[axis]
    if not isinstance(placement, StridedShard):
        return False
    factors = (
        mesh_shape[later]
        for later in range(axis + 1, len(placements))
        if _shards(placements[later], placement.dim)
    )
    return placement.split_factor > 1 and placement.split_factor in set(
        itertools.accumulate(factors, int.__mul__)
    )


def _shards(placement: Placement, dim: int) -> bool:
    return isinstance(placement, (Shard, StridedShard)) and placement.dim == dim


def _take(runs: Runs, parts: int, index: int, factor: int) -> Runs:
    """Part `index` of `parts`, as `torch.chunk` cuts; with a factor, piece `index` of each of `factor` groups."""
    total = sum(length for _, length in runs)
    size = math.ceil(total / (parts * factor))
    taken: Runs = []
    for group in range(factor):
        begin = min((group * parts + index) * size, total)
        taken += _cut(runs, begin, min(begin + size, total))
    return taken


def _cut(runs: Runs, begin: int, end: int) -> Runs:
    """Local rows [begin, end) of a list of runs."""
    result: Runs = []
    position = 0
    for start, length in runs:
        low, high = max(begin, position), min(end, position + length)
        if low < high:
            result.append((start + low - position, high - low))
        position += length
    return result
