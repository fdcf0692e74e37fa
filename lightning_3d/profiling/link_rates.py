# SPDX-License-Identifier: Apache-2.0
"""How fast this rank multiplies and how fast its links are, measured in a second or so before training.

Message sizes follow the speed: they grow until one takes `TARGET_S` on the slowest rank, so that fast links are
measured beyond their latency and slow ones do not take minutes. All ranks measure with the same sizes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.profiling.topology import Topology, gather_rows

TARGET_S = 0.03
"""Seconds that one measured operation should take."""
REPEATS = 5
"""Of each measured operation; their median counts."""
LATENCY_REPEATS = 10
MATRIX_SIZES = (256, 512, 1024, 2048, 4096, 8192)
MESSAGE_BYTES = tuple(1 << power for power in (16, 19, 22, 25, 28))
"""64 KiB, 512 KiB, 4, 32 and 256 MiB."""
HOST_MESSAGE_BYTES = 1 << 25
"""Largest message without a GPU."""
MATMUL, LINK, NEXT_STAGE = "matmul", "link", "next_stage"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
LATENCY = "latency"

# Torch 2.13 deprecates the longer names.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Rates = dict[str, float]
"""By name: `matmul` in operations a second, `link`, `next_stage` and `<axis>/<collective>` in bytes a second of the
message (algorithm bandwidth), `<axis>/latency` in seconds of an all-reduce of one number."""


def bus_factor(collective: str, size: int) -> float:
    """Bus over algorithm bandwidth: what a ring sends for each byte of the message (nccl-tests, PERFORMANCE.md).

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4)
    (1.5, 0.75)
    """
    return (2 if collective == "all_reduce" else 1) * (size - 1) / size


@dataclass(frozen=True, kw_only=True)
class Meter:
    """Times operations on this rank."""

    topology: Topology
    slowdown: float = 1.0
    """This rank takes so many times as long for everything measured, by idling: to see what a slow rank looks like."""

    def seconds(self, run: Callable[[], object], repeats: int = REPEATS) -> float:
        """Median seconds of an operation, after one that warms up."""
        self._once(run)
        return median(self._once(run) for _ in range(repeats))

    def _once(self, run: Callable[[], object]) -> float:
        self._synchronize()
        start = time.perf_counter()
        run()
        self._synchronize()
        if self.slowdown > 1:
            time.sleep((self.slowdown - 1) * (time.perf_counter() - start))
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.topology.device.type == "cuda":
            torch.cuda.synchronize(self.topology.device)

    def slowest(self, seconds: float) -> float:
        """The longest of all ranks' times; collective over the world."""
        return max(row[0] for row in gather_rows([seconds], self.topology.device))


def measure_rates(topology: Topology, slowdown: float = 1.0) -> Rates:
    """Rates of this rank; collective over the world, every rank measuring at the same time.

    Args:
        topology: with whom.
        slowdown: see `Meter.slowdown`.
    """
    meter = Meter(topology=topology, slowdown=slowdown)
    rates = {MATMUL: _matmul(meter)}
    world = dist.group.WORLD if topology.world_size > 1 else None
    if world is not None:
        rates[LINK] = max(_links(meter, world, ring=True).values())
    for axis, group in topology.axes.items():
        rates |= _collectives(meter, axis, group)
        if axis == "pp":
            to_next = _links(meter, group, ring=False).get(
                group.rank() - 1
            )  # stages run backwards over ranks
            rates |= {} if to_next is None else {NEXT_STAGE: to_next}
    return rates


def _matmul(meter: Meter) -> float:
    """Operations a second of a square product: fp32 on the CPU, bf16 on a GPU."""
    device = meter.topology.device
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    def seconds_of(size: int, repeats: int) -> float:
        left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
        product = torch.empty_like(left)
        return meter.seconds(lambda: torch.mm(left, right, out=product), repeats)

    size = MATRIX_SIZES[0]
    for larger in MATRIX_SIZES[1:]:
        if 8 * meter.slowest(seconds_of(size, 1)) > TARGET_S:
            break
        size = larger
    with torch.no_grad():
        return 2.0 * size**3 / seconds_of(size, REPEATS)


def _message_sizes(meter: Meter) -> list[int]:
    most = HOST_MESSAGE_BYTES if meter.topology.device.type == "cpu" else MESSAGE_BYTES[-1]
    return [size for size in MESSAGE_BYTES if size <= most]


def _fitting_size(meter: Meter, run_of: Callable[[int], Callable[[], object]]) -> int:
    """The largest message that does not take much longer than `TARGET_S` on the slowest rank."""
    sizes = _message_sizes(meter)
    size = sizes[0]
    for larger in sizes[1:]:
        if (larger / size) * meter.slowest(meter.seconds(run_of(size), 1)) > 2 * TARGET_S:
            break
        size = larger
    return size


def _collectives(meter: Meter, axis: str, group: dist.ProcessGroup) -> Rates:
    """Algorithm bandwidth of each collective along an axis, and the latency of a small one."""
    device, size = meter.topology.device, group.size()

    def run_of(collective: str, num_bytes: int) -> Callable[[], object]:
        part = torch.ones(max(1, num_bytes // 4 // size), device=device)
        whole = torch.ones(part.numel() * size, device=device)
        return lambda: _collective(collective, whole, part, group)

    num_bytes = _fitting_size(meter, lambda each: run_of("all_reduce", each))
    rates = {
        f"{axis}/{collective}": num_bytes / meter.seconds(run_of(collective, num_bytes))
        for collective in COLLECTIVES
    }
    rates[f"{axis}/{LATENCY}"] = meter.seconds(run_of("all_reduce", 4), LATENCY_REPEATS)
    return rates


def _collective(name: str, whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    if name == "all_reduce":
        dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)
    elif name == "all_gather":
        _ALL_GATHER(whole, part, group=group)
    else:
        _REDUCE_SCATTER(part, whole, op=dist.ReduceOp.MAX, group=group)


def _links(meter: Meter, group: dist.ProcessGroup, *, ring: bool) -> dict[int, float]:
    """Bytes a second to each neighbour in a group, both ways at once; collective over the world.

    Args:
        meter: times.
        group: ranks in a row.
        ring: whether the last rank is a neighbour of the first.
    """
    size, rank, device = group.size(), group.rank(), meter.topology.device

    def run_of(num_bytes: int, peer: int | None) -> Callable[[], object]:
        if peer is None:
            return lambda: None
        sent, received = (torch.ones(num_bytes // 4, device=device) for _ in range(2))
        return lambda: _exchange(sent, received, peer, group)

    first = rank ^ 1 if rank ^ 1 < size else None
    num_bytes = _fitting_size(meter, lambda each: run_of(each, first))
    rates = {}
    for peer in _neighbours(rank, size, ring=ring):
        seconds = meter.seconds(run_of(num_bytes, peer))
        meter.slowest(seconds)  # a round begins when all pairs are through with the one before
        if peer is not None:
            rates[peer] = num_bytes / seconds
    return rates


def _neighbours(rank: int, size: int, *, ring: bool) -> list[int | None]:
    """Whom a rank talks with in each round, so that every pair of neighbours meets once.

    >>> [_neighbours(rank, 4, ring=True) for rank in range(4)]
    [[1, 3, None], [0, 2, None], [3, 1, None], [2, 0, None]]
    >>> [_neighbours(rank, 3, ring=True) for rank in range(3)]
    [[1, None, 2], [0, 2, None], [None, 1, 0]]
    """
    rounds: list[int | None] = [None, None, None]
    for left in range(size if ring and size > 2 else size - 1):
        right = (left + 1) % size
        number = left % 2 if left < size - 1 or size % 2 == 0 else 2
        if rank in (left, right):
            rounds[number] = right if rank == left else left
    return rounds


def _exchange(sent: Tensor, received: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    operations = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
