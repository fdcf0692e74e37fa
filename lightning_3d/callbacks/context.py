# SPDX-License-Identifier: Apache-2.0
"""What measuring callbacks read of a Trainer, whatever its strategy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.mesh import ParallelMesh
from lightning_3d.profiling.topology import (
    Topology,
    topology_of_device_mesh,
    topology_of_mesh,
    topology_of_world,
)

C = TypeVar("C", bound=Callback)


def topology_of(trainer: Trainer) -> Topology:
    """The process groups of a run and the names of its ranks; collective over the world, once they have met."""
    strategy = trainer.strategy
    mesh = getattr(strategy, "mesh", None)
    if isinstance(mesh, ParallelMesh):
        return topology_of_mesh(mesh, strategy.root_device)
    device_mesh = getattr(strategy, "device_mesh", None)
    if isinstance(device_mesh, DeviceMesh) and device_mesh.mesh_dim_names:
        return topology_of_device_mesh(device_mesh, strategy.root_device)
    return topology_of_world(strategy.root_device)


def output_folder(trainer: Trainer, dirpath: str | Path | None) -> Path:
    """Where a callback writes: what the user says, else beside the logs; the same on all ranks (collective)."""
    return Path(dirpath or trainer.log_dir or trainer.default_root_dir)


def log_scalars(trainer: Trainer, values: Mapping[str, float]) -> None:
    """Sends numbers to the loggers at once: for what is measured once, not at the steps that loggers wait for."""
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(dict(values), step=trainer.global_step)


def find_callback(trainer: Trainer, kind: type[C]) -> C | None:
    """The first callback of a kind."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def local_blocks(module: nn.Module) -> int:
    """Blocks whose parameters this rank holds, of the longest list of modules."""
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList)]
    longest = max(lists, key=len, default=())
    return sum(next(block.parameters(), None) is not None for block in longest)
