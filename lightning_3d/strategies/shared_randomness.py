# SPDX-License-Identifier: Apache-2.0
"""Random numbers outside the steps: ranks of one model replica shuffle and augment alike, in workers too."""

import os
import random
from functools import partial
from typing import Any

import numpy
import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function

from lightning_3d.mesh import ParallelMesh


def share_random_state(mesh: ParallelMesh, device: torch.device) -> None:
    """Gives the ranks of a model replica the random state of one of them; collective over the replica.

    They read the same batches, so what draws random numbers on the way (a shuffled sampler, an augmentation, the
    seeds of a loader's workers) must draw the same ones, also where nobody called `seed_everything`.
    """
    state: list[Any] = [(torch.get_rng_state(), random.getstate(), numpy.random.get_state())]
    for axis in ("tp", "cp", "pp"):
        if mesh.size(axis) > 1:
            group = mesh.group(axis)
            dist.broadcast_object_list(state, src=dist.get_global_rank(group, 0), group=group, device=device)
    of_torch, of_python, of_numpy = state[0]
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    numpy.random.set_state(of_numpy)


def seed_workers(loader: Any, replica: int) -> None:
    """Seeds a loader's workers by the replica they read for, where `seed_everything(workers=True)` asked for it.

    Lightning would take the global rank, and each rank of a replica would augment differently.
    """
    if int(os.environ.get("PL_SEED_WORKERS", 0)) and getattr(loader, "worker_init_fn", _NO_WORKERS) is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=replica)


_NO_WORKERS = object()
