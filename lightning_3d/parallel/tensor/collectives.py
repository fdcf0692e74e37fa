# SPDX-License-Identifier: Apache-2.0
"""The collectives of tensor parallelism as differentiable functions on plain tensors.

[Note: replicated or partial]
Every tensor in the model is one of four things on the ranks of a tp group: *replicated* (equal everywhere), *sharded*
along a dim, *partial* (the true value is the sum over ranks), and so is every gradient. The gradient of a replicated
tensor used by sharded computation is partial; whoever takes it back to replicated computation must sum it. Each
function here names what it takes and gives in the forward; its backward does the transpose:

| function | forward | backward |
|---|---|---|
| `copy_to_shards` | replicated -> replicated, sharded use follows | sum |
| `sum_shards` | partial -> replicated | identity |
| `gather_sequence` | sequence shards -> whole, sharded use follows | sum, keep own shard |
| `sum_scatter_sequence` | partial -> sequence shards of the sum | gather |
| `split_sequence` | replicated -> own shard of the sequence | gather |
| `join_sequence` | sequence shards -> replicated | keep own shard |

A sequence length that tp does not divide is padded with zeros where it is split and cut where it is gathered, so the
padding is only ever seen by what works token by token.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Group = dist.ProcessGroup


# [Note: no views] What a custom Function returns must not be a view, or the user's code cannot write into it.


def _gather(shard: Tensor, length: int, group: Group) -> Tensor:
    """[B, ceil(S/tp), ...] -> [B, S, ...]."""
    size, (batch, part, *rest) = group.size(), shard.shape
    whole = shard.new_empty((batch, size * part, *rest))
    if batch == 1:
        dist.all_gather_into_tensor(whole.view(size, part, *rest), shard.contiguous(), group=group)
    else:
        gathered = shard.new_empty((size * batch, part, *rest))
        dist.all_gather_into_tensor(gathered, shard.contiguous(), group=group)
        whole.view(batch, size, part, *rest).copy_(gathered.view(size, batch, part, *rest).transpose(0, 1))
    return whole if length == size * part else whole[:, :length].clone()


def _split(whole: Tensor, group: Group) -> Tensor:
    """[B, S, ...] -> own [B, ceil(S/tp), ...], zeros behind the end."""
    size, rank, length = group.size(), group.rank(), whole.shape[1]
    part = -(-length // size)
    shard = whole[:, rank * part : (rank + 1) * part]
    if shard.shape[1] < part:
        return _pad_sequence(shard, part)
    return shard.clone(memory_format=torch.contiguous_format)


def _sum_scatter(partial: Tensor, group: Group) -> Tensor:
    """[B, S, ...] -> own shard [B, ceil(S/tp), ...] of the sum over ranks."""
    size, batch = group.size(), partial.shape[0]
    part = -(-partial.shape[1] // size)
    padded = _pad_sequence(partial, part * size) if partial.shape[1] < part * size else partial
    stacked = padded.reshape(batch, size, part, *partial.shape[2:]).transpose(0, 1).contiguous()
    shard = partial.new_empty((batch, part, *partial.shape[2:]))
    dist.reduce_scatter_tensor(shard, stacked.view(size * batch, part, *partial.shape[2:]), group=group)
    return shard


def _pad_sequence(value: Tensor, length: int) -> Tensor:
    return F.pad(value, (0, 0) * (value.dim() - 2) + (0, length - value.shape[1]))


class _CopyToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)  # other nodes may use the same gradient
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _SumShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(value)
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, length: int, group: Group) -> Tensor:
        ctx.group = group
        return _gather(shard, length, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _sum_scatter(grad, ctx.group), None, None


class _SumScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.length = group, partial.shape[1]
        return _sum_scatter(partial, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.length, ctx.group), None


class _SplitSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.length = group, whole.shape[1]
        return _split(whole, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.length, ctx.group), None


class _JoinSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, length: int, group: Group) -> Tensor:
        ctx.group = group
        return _gather(shard, length, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _split(grad, ctx.group), None, None


class _KeepSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.length = group, whole.shape[1]
        return _split(whole, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        size, rank, part = ctx.group.size(), ctx.group.rank(), grad.shape[1]
        whole = grad.new_zeros((grad.shape[0], size * part, *grad.shape[2:]))
        whole[:, rank * part : (rank + 1) * part] = grad
        return whole[:, : ctx.length], None


def copy_to_shards(value: Tensor, group: Group) -> Tensor:
    """Hands a replicated tensor to sharded computation; the gradient is summed over ranks."""
    return _CopyToShards.apply(value, group)  # type: ignore[no-untyped-call]


def sum_shards(value: Tensor, group: Group) -> Tensor:
    """Sums partial values over ranks, in place; the result is replicated."""
    return _SumShards.apply(value, group)  # type: ignore[no-untyped-call]


def gather_sequence(shard: Tensor, length: int, group: Group) -> Tensor:
    """Sequence shards [B, ceil(S/tp), ...] -> [B, S, ...] for sharded computation."""
    return _GatherSequence.apply(shard, length, group)  # type: ignore[no-untyped-call]


def sum_scatter_sequence(partial: Tensor, group: Group) -> Tensor:
    """Partial [B, S, ...] -> own sequence shard [B, ceil(S/tp), ...] of the sum."""
    return _SumScatterSequence.apply(partial, group)  # type: ignore[no-untyped-call]


def split_sequence(whole: Tensor, group: Group) -> Tensor:
    """Replicated [B, S, ...] -> own sequence shard; the gradient is gathered."""
    return _SplitSequence.apply(whole, group)  # type: ignore[no-untyped-call]


def join_sequence(shard: Tensor, length: int, group: Group) -> Tensor:
    """Sequence shards -> replicated [B, S, ...]; the gradient is this rank's part of a replicated gradient."""
    return _JoinSequence.apply(shard, length, group)  # type: ignore[no-untyped-call]


def keep_sequence(whole: Tensor, group: Group) -> Tensor:
    """Own sequence shard of what every rank computed in full behind `gather_sequence`; the gradient is partial."""
    return _KeepSequence.apply(whole, group)  # type: ignore[no-untyped-call]
