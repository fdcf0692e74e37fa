# SPDX-License-Identifier: Apache-2.0
"""Starting the ranks of a check: forked here, or already started by torchrun or a cluster's launcher."""

import logging
import os
import socket
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_3d.plan import AXES, ParallelPlan
from lightning_3d.selfcheck.oracle import Errors, Record, Task, compare, run_case

T = TypeVar("T")

LAYOUT_TIMEOUT_S = 600.0
"""Limit for all cases of one layout."""


def started_world() -> int | None:
    """Number of ranks that a launcher has started this process among; None if it stands alone."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return world_size if world_size > 1 and "RANK" in os.environ else None


def run_alone(task: Task, precision: str = "32-true") -> Record:
    """Runs a task on this process alone: a launcher's variables, which name other ranks, are put aside."""
    names = [
        name
        for name in os.environ
        if name in ("WORLD_SIZE", "RANK", "LOCAL_RANK") or name.startswith("TORCHELASTIC")
    ]
    saved = {name: os.environ.pop(name) for name in names}
    try:
        return run_case(task, strategy="auto", devices=1, precision=precision)
    finally:
        os.environ.update(saved)


def run_layout_here(
    plan: ParallelPlan, cases: Sequence[Task], references: dict[Task, Record], precision: str = "32-true"
) -> list[Errors]:
    """Runs the cases of a layout in this process, one of the layout's ranks."""
    from lightning_3d.strategies import ThreeDStrategy

    be_quiet()
    options: dict[str, Any] = {axis: plan.size(axis) for axis in AXES}
    options |= {"schedule": plan.schedule, "virtual_stages": plan.virtual_stages}
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", plan.world_size))
    return [
        compare(
            run_case(case, strategy=ThreeDStrategy(**options), devices=devices, precision=precision),
            references[case],
        )
        for case in cases
    ]


def run_layout_forked(
    plan: ParallelPlan, cases: Sequence[Task], references: dict[Task, Record], precision: str = "32-true"
) -> list[Errors]:
    """Runs the cases of a layout on forked ranks of this machine.

    Raises:
        RuntimeError: a rank failed; the message has its traceback.
    """
    return run_forked(plan, lambda: run_layout_here(plan, cases, references, precision))


def run_forked(plan: ParallelPlan, body: Callable[[], T], limit_s: float = LAYOUT_TIMEOUT_S) -> T:
    """Runs `body` on one forked process for each rank of a layout; gives the first rank's result.

    Raises:
        RuntimeError: a rank failed; the message has its traceback.
    """
    context = mp.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    port = _free_port()
    processes = [
        context.Process(target=_rank, args=(rank, plan, body, port, sender), daemon=True)
        for rank in range(plan.world_size)
    ]
    for process in processes:
        process.start()
    try:
        if not receiver.poll(limit_s):
            raise RuntimeError(f"{plan.describe()} did not finish within {limit_s:.0f} s.")
        failure, outcome = receiver.recv()
    finally:
        for process in processes:
            process.join(timeout=0.5)
            process.kill()
    if failure:
        raise RuntimeError(failure)
    return cast(T, outcome)


def _rank(rank: int, plan: ParallelPlan, body: Callable[[], Any], port: int, sender: Connection) -> None:
    torch.set_num_threads(1)  # a fork does not inherit the threads of a pool
    os.environ.update(
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        LOCAL_WORLD_SIZE=str(plan.world_size),
    )
    try:
        outcome = body()
        if rank == 0:
            sender.send(("", outcome))
        if dist.is_initialized():
            dist.barrier()
    except BaseException:
        sender.send((f"rank {rank} of {plan.describe()}:\n{traceback.format_exc()}", None))
    finally:
        os._exit(0)


def be_quiet() -> None:
    """Leaves only the table and failures on the screen."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
