# SPDX-License-Identifier: Apache-2.0
"""What ranks must agree on before they compute: how many samples, that they are the same ones, and any other value."""

from collections.abc import Hashable, Sequence
from math import gcd
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.errors import BatchError
from lightning_3d.mesh import ParallelMesh

T = TypeVar("T", bound=Hashable)

_MOST_RANKS = 8
"""How many ranks a message names."""


def by_value(value: T) -> dict[T, list[int]]:
    """Which ranks hold which value, rank 0's first; collective over the world. One entry: all ranks agree.

    Args:
        value: of this rank; small, since every rank is sent every other's.
    """
    values: list[Any] = [value]
    if dist.get_world_size() > 1:
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
    ranks: dict[T, list[int]] = {}
    for rank, each in enumerate(values):
        ranks.setdefault(each, []).append(rank)
    return ranks


def say_ranks(ranks: Sequence[int]) -> str:
    """Ranks for a message.

    >>> say_ranks([3]), say_ranks(range(1, 12))
    ('rank 3', 'ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more')
    """
    rest = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_MOST_RANKS]))}{rest}"


def agree(size: int, flag: bool, device: torch.device) -> tuple[int, bool]:
    """Agrees on a divisor of everybody's batch size, and on whether any rank raises a flag; one small collective.

    Args:
        size: samples of this rank's batch.
        flag: something that all ranks must do if one must.
        device: where collectives run.

    Returns:
        The greatest common divisor of all sizes, and the flag of all.
    """
    seen = torch.tensor([size, -size, int(flag)], device=device)
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    largest, smallest, any_flag = seen.tolist()
    if largest == -smallest:
        return size, bool(any_flag)
    sizes = [torch.empty((), dtype=torch.long, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor(size, device=device))
    return gcd(*(int(each) for each in sizes)), bool(any_flag)


def check_same_batch(tensors: list[Tensor], mesh: ParallelMesh, device: torch.device) -> None:
    """Checks that the ranks of one model replica hold the same batch; collective over pp and tp.

    Args:
        tensors: the tensors of this rank's batch.
        mesh: the mesh.
        device: where collectives run.

    Raises:
        BatchError: on every rank of the replica, if two of them differ.
    """
    mine = torch.tensor(_digest(tensors), dtype=torch.float64, device=device)
    seen = torch.cat([mine, -mine])
    for axis in ("tp", "cp", "pp"):
        if mesh.size(axis) > 1:
            dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=mesh.group(axis))
    largest, smallest = seen.chunk(2)
    if not torch.equal(largest, -smallest):
        raise BatchError(
            f"{mesh.describe_rank()}: the ranks of one model replica read different batches."
            " Shard the data by the data-parallel rank, with trainer.distributed_sampler_kwargs (num_replicas,"
            " rank), not by the global rank, and seed random data sets equally within a replica."
        )


def _digest(tensors: list[Tensor]) -> list[float]:
    """Numbers that differ when batches differ: a count and two weighted sums."""
    total = weighted = 0.0
    count = 0
    for tensor in tensors:
        values = tensor.detach().reshape(-1)
        values = values.abs() if values.is_complex() else values
        values = torch.nan_to_num(values.double())
        count += values.numel()
        total += float(values.sum())
        weighted += float(
            (values * torch.arange(1, values.numel() + 1, device=values.device).remainder(997)).sum()
        )
    return [float(count), total, weighted]


def total_over_replicas(value: Any, mesh: ParallelMesh, device: torch.device) -> float:
    """Sum of a number over the data-parallel replicas; collective over dp."""
    total = torch.as_tensor(value, dtype=torch.float64, device=device).clone()
    if mesh.dp_size > 1:
        dist.all_reduce(total, group=mesh.dp_group)
    return float(total)
