# SPDX-License-Identifier: Apache-2.0
"""A process that trains again and again does not pile up communicators."""

import torch.distributed as dist

from lightning_3d.mesh import ParallelMesh
from lightning_3d.plan import ParallelPlan
from tests.harness import run_ranks


def test_equal_meshes_share_their_groups():
    def body():
        plan = ParallelPlan(pp=1, dp_replicate=1, dp_shard=2, tp=1).resolve(2, 2)
        first = ParallelMesh.create(plan, "cpu")
        count = len(dist.distributed_c10d._world.pg_map)
        again = ParallelMesh.create(plan, "cpu")
        other = ParallelMesh.create(ParallelPlan(pp=1, dp_replicate=1, dp_shard=1, tp=2).resolve(2, 2), "cpu")
        return (
            again.dp_group is first.dp_group,
            len(dist.distributed_c10d._world.pg_map) > count,
            (other.dp_size, again.dp_size, other.size("tp")),
        )

    assert run_ranks(2, body) == [(True, True, (1, 2, 2))] * 2
