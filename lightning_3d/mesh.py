# SPDX-License-Identifier: Apache-2.0
"""`ParallelMesh`: the one object that knows where this rank sits on every axis, and with whom it talks."""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_3d.compat import flatten_mesh
from lightning_3d.plan import AXES, ParallelPlan

_KNOWN: dict[tuple[str, tuple[int, ...]], tuple[dist.ProcessGroup | None, DeviceMesh]] = {}
"""Meshes of this process and the world that they are of, by device and sizes."""


@dataclass(frozen=True)
class ParallelMesh:
    """A `DeviceMesh` with the axes of `plan.AXES`, and this rank's coordinates on it.

    Global rank = row-major index over (pp, dp_replicate, dp_shard, cp, tp): tensor-parallel peers are neighbours.
    The pp axis runs backwards over stages, so that the last stage, which has the loss, sits on global rank 0, where
    loggers and progress bars live.
    """

    device_mesh: DeviceMesh
    plan: ParallelPlan

    @classmethod
    def create(cls, plan: ParallelPlan, device_type: str) -> "ParallelMesh":
        """Builds the mesh; collective over the world.

        Communicators are never given back: a process that trains again in the same sizes has the same ones.

        Args:
            plan: a resolved plan whose product is the world size.
            device_type: `cpu` or `cuda`.
        """
        sizes = tuple(plan.size(axis) for axis in AXES)
        world, known = _KNOWN.get((device_type, sizes), (None, None))
        if known is None or world is not dist.group.WORLD:
            known = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
            _KNOWN[device_type, sizes] = (dist.group.WORLD, known)
        mesh = cls(known, plan)
        mesh.dp_group  # noqa: B018  (creating a group is collective: do it here, where every rank is)
        return mesh

    def size(self, axis: str) -> int:
        """Number of ranks on an axis."""
        return int(self.device_mesh[axis].size())

    def rank(self, axis: str) -> int:
        """This rank's position on an axis."""
        return int(self.device_mesh.get_local_rank(axis))

    def group(self, axis: str) -> dist.ProcessGroup:
        """This rank's process group along an axis."""
        return self.device_mesh.get_group(axis)

    @cached_property
    def dp_mesh(self) -> DeviceMesh:
        """The flattened data-parallel axis: replicas that read different batches."""
        return flatten_mesh(self.device_mesh["dp_replicate", "dp_shard"], "dp")

    @cached_property
    def dp_group(self) -> dist.ProcessGroup:
        """Ranks that hold the same part of the model and read different batches."""
        return self.dp_mesh.get_group()

    @property
    def dp_size(self) -> int:
        """Number of batches read at once."""
        return int(self.dp_mesh.size())

    @property
    def dp_rank(self) -> int:
        """Which of the batches this rank reads."""
        return int(self.dp_mesh.get_local_rank())

    @cached_property
    def fsdp_mesh(self) -> DeviceMesh | None:
        """The mesh for `fully_shard`: (dp_shard), or (dp_replicate, dp_shard) for HYBRID_SHARD; None with dp 1.

        With offload also over one rank: it is FSDP2 that brings parameters to the device and gradients back.
        """
        if self.dp_size == 1 and self.plan.offload == "none":
            return None
        if self.size("dp_replicate") == 1:
            return self.device_mesh["dp_shard"]
        return self.device_mesh["dp_replicate", "dp_shard"]

    @cached_property
    def tp_mesh(self) -> DeviceMesh | None:
        """The 1-D tensor-parallel mesh, or None."""
        return self.device_mesh["tp"] if self.size("tp") > 1 else None

    @property
    def pp_size(self) -> int:
        """Pipeline ranks of a replica."""
        return self.size("pp")

    @property
    def pp_rank(self) -> int:
        """Position on the pp axis of the mesh; the last stage is at 0."""
        return self.rank("pp")

    def stage_owner(self, stage: int) -> int:
        """Position on the pp axis of the rank that holds a stage. Stages go round the ranks, backwards."""
        return self.pp_size - 1 - stage % self.pp_size

    @property
    def local_stages(self) -> list[int]:
        """Stages of this rank in ascending order."""
        return [stage for stage in range(self.plan.num_stages) if self.stage_owner(stage) == self.pp_rank]

    @property
    def holds_loss(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.pp_rank == 0

    @property
    def holds_input(self) -> bool:
        """Whether this rank holds the first stage."""
        return self.stage_owner(0) == self.pp_rank

    @property
    def loss_rank(self) -> int:
        """Global rank of this replica's last stage (with this rank's dp and tp coordinates)."""
        return int(dist.get_global_rank(self.group("pp"), 0))

    def describe_rank(self) -> str:
        """Coordinates of this rank for messages: `rank 5 (pp=1 dp_shard=0 tp=1)`."""
        parts = [f"{axis}={self.rank(axis)}" for axis in AXES if self.size(axis) > 1]
        where = f" ({' '.join(parts)})" if parts else ""
        return f"rank {dist.get_rank()}{where}"

    def make_tied_group(self) -> dist.ProcessGroup | None:
        """A group of this replica's first and last stage, for gradients of tied embeddings; collective over the world.

        Returns:
            The group, or None on ranks that hold neither stage.
        """
        if self.pp_size == 2:
            return self.group("pp")
        ranks: torch.Tensor = self.device_mesh.mesh
        first, last = ranks[self.stage_owner(0)].flatten(), ranks[0].flatten()
        mine = None
        for pair in zip(first.tolist(), last.tolist(), strict=True):
            group = dist.new_group(list(pair))
            if dist.get_rank() in pair:
                mine = group
        return mine
