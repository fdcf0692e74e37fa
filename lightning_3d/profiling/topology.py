# SPDX-License-Identifier: Apache-2.0
"""`Topology`: whom this rank talks with on each axis, and what the ranks of the world are called.

The one view that measurements need of a run, whatever built its process groups: this package's mesh, a mesh of
Lightning's, or the world alone.
"""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.mesh import ParallelMesh
from lightning_3d.plan import AXES

WORLD = "world"
"""Name of the group of all ranks, where no axis spans them."""
OTHER = "other"
"""Name of a group that no axis has."""
DATA = "dp"
"""The flattened data-parallel axis, and the world under plain data parallelism."""
_AXES_OF_LIGHTNING = {"data_parallel": "dp_shard", "tensor_parallel": "tp"}
"""Names in the mesh of Lightning's `ModelParallelStrategy`, whose data axis FSDP2 shards over."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Groups of this rank, and names and stages of all ranks."""

    axes: Mapping[str, dist.ProcessGroup]
    """This rank's group on every axis of more than one rank, from the slowest link to the fastest."""
    device: torch.device
    rank: int = 0
    stages: tuple[int, ...] = (0,)
    """Pipeline stage of every rank of the world (of its first stage, where a rank has several)."""
    names: tuple[str, ...] = ("rank 0",)
    """What messages call every rank: `rank 5 on node-b (pp=1 tp=0)`."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """Name of a process group -> axis; more than `axes`, which leaves out axes that are joined from others."""

    @property
    def world_size(self) -> int:
        """Ranks."""
        return len(self.names)

    @property
    def stage(self) -> int:
        """This rank's pipeline stage."""
        return self.stages[self.rank]

    def axis_of(self, group: dist.ProcessGroup) -> str:
        """The axis along which a group lies: by the group itself, or by its ranks; else `world` or `other`."""
        name = self.groups.get(str(group.group_name))
        if name is not None:
            return name
        ranks = set(dist.get_process_group_ranks(group))
        for axis, own in self.axes.items():
            if set(dist.get_process_group_ranks(own)) == ranks:
                return axis
        return WORLD if len(ranks) == self.world_size else OTHER


def topology_of_mesh(mesh: ParallelMesh, device: torch.device) -> Topology:
    """The topology of a run of this package; collective over the world."""
    axes = {axis: mesh.group(axis) for axis in AXES if mesh.size(axis) > 1}
    groups = {str(group.group_name): axis for axis, group in axes.items()}
    if mesh.dp_size > 1:
        groups.setdefault(str(mesh.dp_group.group_name), DATA)
    where = " ".join(f"{axis}={mesh.rank(axis)}" for axis in axes)
    return _described(axes, groups, device, stage=mesh.pp_size - 1 - mesh.pp_rank, where=where)


def topology_of_device_mesh(mesh: DeviceMesh, device: torch.device) -> Topology:
    """The topology of a run whose strategy has a named mesh of its own; collective over the world."""
    names = [name for name in mesh.mesh_dim_names or () if mesh[name].size() > 1]
    axes = {_AXES_OF_LIGHTNING.get(name, name): mesh.get_group(name) for name in names}
    where = " ".join(f"{_AXES_OF_LIGHTNING.get(name, name)}={mesh.get_local_rank(name)}" for name in names)
    groups = {str(group.group_name): axis for axis, group in axes.items()}
    return _described(axes, groups, device, stage=0, where=where)


def topology_of_world(device: torch.device) -> Topology:
    """The topology of plain data parallelism, or of one process; collective over the world, if there is one."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Topology(axes={}, device=device, names=(f"rank 0 on {socket.gethostname()}",))
    world = dist.group.WORLD
    assert world is not None
    return _described({DATA: world}, {str(world.group_name): DATA}, device, stage=0, where="")


def _described(
    axes: Mapping[str, dist.ProcessGroup],
    groups: Mapping[str, str],
    device: torch.device,
    *,
    stage: int,
    where: str,
) -> Topology:
    rank = dist.get_rank()
    name = f"rank {rank} on {socket.gethostname()}" + (f" ({where})" if where else "")
    rows = gather_objects((name, stage))
    return Topology(
        axes=axes,
        device=device,
        rank=rank,
        stages=tuple(row[1] for row in rows),
        names=tuple(row[0] for row in rows),
        groups=groups,
    )


def gather_objects(value: Any) -> list[Any]:
    """A picklable value of every rank; collective over the world."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_rows(row: Sequence[float], device: torch.device) -> list[list[float]]:
    """As many numbers of every rank, in one small collective over the world."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [list(row)]
    mine = torch.tensor(row, dtype=torch.float64, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return [each.tolist() for each in rows]
