# SPDX-License-Identifier: Apache-2.0
"""The pieces of a global tensor that a rank holds: what a checkpoint needs to know of a layout, and all it knows."""

import itertools
from dataclasses import dataclass
from typing import cast

import torch
from torch.distributed.tensor import DTensor, Partial

from lightning_3d.boxes import Runs, local_runs
from lightning_3d.checkpoint.flat import FlatShard
from lightning_3d.compat import is_wrapper_subclass
from lightning_3d.compat_torchao import LOW_BIT_OPTIMIZERS, plain_weight
from lightning_3d.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of a global tensor."""

    offsets: tuple[int, ...]
    """Where the box begins in the global tensor."""
    local: torch.Tensor
    """The box's data: a view of this rank's plain tensor, so that writing to it writes to the model."""


@dataclass(frozen=True, kw_only=True)
class ShardedTensor:
    """A global tensor and the pieces of it that this rank holds (none at all is fine)."""

    shape: torch.Size
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def box(self) -> str:
        """Where this rank's pieces lie, as text: `0,32:16,64` begins at row 0 and column 32 and is 16 x 64."""
        return "+".join(
            f"{','.join(map(str, piece.offsets))}:{','.join(map(str, piece.local.shape))}"
            for piece in self.pieces
        )

    def copied(self, into: "ShardedTensor | None" = None) -> "ShardedTensor":
        """The same pieces in memory of their own on the CPU.

        Copies from a GPU are only queued: synchronise before using them.

        Args:
            into: an earlier copy, whose memory is used again where it fits.
        """
        rooms = (
            into.pieces
            if into is not None and len(into.pieces) == len(self.pieces)
            else [None] * len(self.pieces)
        )
        pieces = tuple(_copied(piece, room) for piece, room in zip(self.pieces, rooms, strict=True))
        return ShardedTensor(shape=self.shape, dtype=self.dtype, pieces=pieces)


def _copied(piece: Piece, room: Piece | None) -> Piece:
    source = piece.local
    target = room.local if room is not None else None
    if target is None or (target.shape, target.dtype) != (source.shape, source.dtype):
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
    target.copy_(source, non_blocking=True)
    return Piece(offsets=piece.offsets, local=target)


def sharded(name: str, tensor: torch.Tensor, data: torch.Tensor | None = None) -> ShardedTensor:
    """Describes a plain tensor, a DTensor or a `FlatShard`; shares its memory.

    Args:
        name: for errors.
        tensor: what to describe.
        data: this rank's data, if not that of the tensor itself.

    Raises:
        CheckpointError: the tensor has no data (meta device), pending sums, or a layout that does not add up.
    """
    if isinstance(tensor, FlatShard):
        pieces = tuple(Piece(offsets=offsets, local=view) for offsets, view in tensor.boxes())
        return ShardedTensor(shape=tensor.shape, dtype=tensor.dtype, pieces=pieces)
    if tensor.device.type == "meta":
        raise CheckpointError(
            f"{name} is on the meta device and has no data. Materialise the model before its checkpoint."
        )
    if not tensor.layout == torch.strided:
        raise CheckpointError(f"{name} has layout {tensor.layout}; a checkpoint holds dense tensors only.")
    dtype = tensor.dtype if data is None else data.dtype
    if not isinstance(tensor, DTensor):
        piece = Piece(
            offsets=(0,) * tensor.dim(), local=_plain(name, tensor.detach() if data is None else data)
        )
        return ShardedTensor(shape=tensor.shape, dtype=dtype, pieces=(piece,))
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ShardedTensor(shape=tensor.shape, dtype=dtype, pieces=())
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise CheckpointError(
            f"{name} is placed as {tensor.placements}: its sum over ranks is pending. Redistribute it first."
        )
    local = _plain(name, cast(DTensor, tensor.detach()).to_local() if data is None else data)
    if tensor.numel() == 0:
        piece = Piece(offsets=(0,) * tensor.dim(), local=local.new_empty(tensor.shape))
        return ShardedTensor(shape=tensor.shape, dtype=dtype, pieces=(piece,))
    runs = local_runs(tensor.shape, tensor.device_mesh.shape, coordinate, tensor.placements)
    held = tuple(sum(length for _, length in dim_runs) for dim_runs in runs)
    if held != tuple(local.shape):
        raise CheckpointError(
            f"{name}: a tensor of shape {tuple(tensor.shape)} placed as {tensor.placements} on a mesh of "
            f"{tuple(tensor.device_mesh.shape)} should have a shard of {held} at {tuple(coordinate)}, "
            f"but this rank holds {tuple(local.shape)}."
        )
    return ShardedTensor(shape=tensor.shape, dtype=dtype, pieces=tuple(_pieces(local, runs)))


def _plain(name: str, local: torch.Tensor) -> torch.Tensor:
    """This rank's data as an ordinary tensor: files hold no other kind, and reading fills no other kind."""
    local = plain_weight(local)
    if is_wrapper_subclass(local):
        raise CheckpointError(
            f"{name} is a {type(local).__name__}, which a checkpoint cannot hold. Of low-bit optimizers, those with"
            f" 8-bit states can be stored: {' and '.join(LOW_BIT_OPTIMIZERS)} of torchao."
        )
    return local


def _pieces(local: torch.Tensor, runs: list[Runs]) -> list[Piece]:
    """One piece per combination of runs; neighbouring runs are one."""
    pieces = []
    for box in itertools.product(*(_placed(_merged(dim_runs)) for dim_runs in runs)):
        view = local
        for dim, (position, _, length) in enumerate(box):
            view = view.narrow(dim, position, length)
        pieces.append(Piece(offsets=tuple(start for _, start, _ in box), local=view))
    return pieces


def _merged(runs: Runs) -> Runs:
    result: Runs = []
    for start, length in runs:
        if result and sum(result[-1]) == start:
            result[-1] = (result[-1][0], result[-1][1] + length)
        else:
            result.append((start, length))
    return result


def _placed(runs: Runs) -> list[tuple[int, int, int]]:
    """Runs as (local position, global start, length)."""
    positions = itertools.accumulate((length for _, length in runs), initial=0)
    return [(position, start, length) for position, (start, length) in zip(positions, runs, strict=False)]
