# SPDX-License-Identifier: Apache-2.0
"""Whether the processes that a launcher started, or left to us, are those that the Trainer was told of."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from lightning_3d.compat_lightning import is_interactive
from lightning_3d.errors import PlanError
from lightning_3d.parallel.agreement import by_value, say_ranks
from lightning_3d.plan import ParallelPlan

_STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS")
"""What srun sets and sbatch does not."""
_LOOK_S = 1.0


def check_launch(environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> None:
    """Checks the environment before a process waits for others that nobody starts.

    Args:
        environment: Lightning's view of the launcher.
        num_processes: the Trainer's `devices`, on each node.
        num_nodes: the Trainer's `num_nodes`.

    Raises:
        PlanError: other processes were started than the Trainer was told of, or cannot be started from here.
    """
    world_size = num_processes * num_nodes
    told = f"devices={num_processes} x num_nodes={num_nodes}"
    if environment.creates_processes_externally and not isinstance(environment, LightningEnvironment):
        _check_slurm_step(environment, world_size)
        if environment.world_size() != world_size:
            raise PlanError(
                f"{type(environment).__name__} has {environment.world_size()} processes, but the Trainer is told of"
                f" {world_size} ({told}). Start as many as that, or set devices and num_nodes to what is started."
            )
    elif world_size > 1 and is_interactive():
        raise PlanError(
            f"A notebook or an interactive interpreter is one process, and {told} needs {world_size}. Save the code as"
            f" a script and start it with `torchrun --nproc-per-node {num_processes} script.py`, or set devices=1."
        )
    if environment.node_rank() >= num_nodes:
        raise PlanError(
            f"This is node {environment.node_rank()}, counted from 0, and num_nodes={num_nodes}. Set num_nodes, or clear"
            " NODE_RANK and GROUP_RANK in the environment if they were left behind."
        )


def check_same_plan(plan: ParallelPlan) -> None:
    """Checks that all ranks have the same plan, before they make groups of it; collective over the world.

    Each rank chooses the degrees that are `auto` for the device that it has.

    Raises:
        PlanError: on every rank, with the plans and their ranks.
    """
    plans = by_value(plan)
    differing = [f.name for f in fields(plan) if len({getattr(each, f.name) for each in plans}) > 1]
    if differing:
        listed = "; ".join(
            f"{' '.join(f'{name}={getattr(each, name)}' for name in differing)} on {say_ranks(ranks)}"
            for each, ranks in plans.items()
        )
        raise PlanError(
            f"Ranks have different plans: {listed}. Give every rank's strategy the same arguments, and where nodes have"
            " different devices set the degrees, or cluster=..., instead of 'auto'."
        )


def _check_slurm_step(environment: ClusterEnvironment, world_size: int) -> None:
    """Without srun, SLURM runs a script once, whatever number of tasks was asked for."""
    inside = any(name in os.environ for name in _STEP_VARIABLES)
    if isinstance(environment, SLURMEnvironment) and world_size > 1 and not inside:
        raise PlanError(
            f"SLURM has started one process, and {world_size} are needed: the script was not started with srun. Use"
            f" `srun --ntasks={world_size} python ...`, or SLURM_JOB_NAME=bash to start the processes yourself."
        )


@contextmanager
def ending_with_parent(end: Callable[[], None]) -> Iterator[None]:
    """Calls `end` if the process that started this one goes meanwhile: who waits for it at the start waits for ever."""
    parent, over = os.getppid(), threading.Event()

    def look() -> None:
        while not over.wait(_LOOK_S):
            if os.getppid() != parent:
                end()

    threading.Thread(target=look, name="lightning_3d parent watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()
