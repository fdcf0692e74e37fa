# SPDX-License-Identifier: Apache-2.0
"""The check of ranks and links without a Trainer: under torchrun or a cluster's launcher, or on own processes."""

import os
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_3d.errors import LinkError
from lightning_3d.mesh import ParallelMesh
from lightning_3d.plan import ParallelPlan
from lightning_3d.profiling.link_check import check_links
from lightning_3d.profiling.link_report import Limits, LinkReport
from lightning_3d.profiling.topology import topology_of_mesh, topology_of_world

TIMEOUT_S = 120.0
"""Limit for meeting, and for the whole check on own processes."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every rank does."""

    plan: ParallelPlan
    """Resolved against the world."""
    limits: Limits
    slowed_ranks: Mapping[int, float] = field(default_factory=dict)


def started_world() -> tuple[int, int] | None:
    """Ranks of the world and of this node, if a launcher started this process among them."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or "RANK" not in os.environ:
        return None
    return world, int(os.environ.get("LOCAL_WORLD_SIZE", world))


def num_devices() -> int:
    """GPUs of this machine."""
    return torch.cuda.device_count()


def check_started(job: Job) -> LinkReport:
    """The check on the ranks that a launcher started; all of them call this."""
    device = _device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(_backend(device), timeout=timedelta(seconds=TIMEOUT_S))
    try:
        return _check(job, device)
    finally:
        dist.destroy_process_group()


def check_here(job: Job) -> LinkReport:
    """The check on one process for each rank, started and ended here.

    Raises:
        LinkError: a rank failed or did not finish; the message has its traceback.
    """
    if job.plan.world_size == 1:
        return check_links(topology_of_world(_device(0)), job.limits, job.slowed_ranks)
    context: Any = mp.get_context("spawn" if num_devices() else "fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        store = f"file://{Path(folder) / 'store'}"
        processes = [
            context.Process(target=_rank, args=(rank, job, store, sender), daemon=True)
            for rank in range(job.plan.world_size)
        ]
        for process in processes:
            process.start()
        try:
            if not receiver.poll(TIMEOUT_S):
                raise LinkError(
                    f"the check did not finish within {TIMEOUT_S:.0f} s. Look for ranks that hang."
                )
            failure, report = receiver.recv()
        finally:
            for process in processes:
                process.join(timeout=1.0)
                process.kill()
    if failure:
        raise LinkError(failure)
    assert isinstance(report, LinkReport)
    return report


def _rank(rank: int, job: Job, store: str, sender: Connection) -> None:
    """A rank's whole life."""
    world = job.plan.world_size
    # As many threads as training would have: torchrun gives each rank of several one.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        device = _device(rank)
        dist.init_process_group(
            _backend(device),
            init_method=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        report = _check(job, device)
        if rank == 0:
            sender.send(("", report))
        dist.barrier()
    except BaseException:
        sender.send((f"rank {rank} of {world} failed:\n{traceback.format_exc()}", None))
    finally:
        os._exit(0)


def _check(job: Job, device: torch.device) -> LinkReport:
    mesh = ParallelMesh.create(job.plan, device.type)
    return check_links(topology_of_mesh(mesh, device), job.limits, job.slowed_ranks)


def _device(local_rank: int) -> torch.device:
    if not num_devices():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % num_devices())
    torch.cuda.set_device(device)
    return device


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"
