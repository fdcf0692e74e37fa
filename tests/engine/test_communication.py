# SPDX-License-Identifier: Apache-2.0
"""What FSDP2 sends: averages of gradients, once for each sharded part and optimizer step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.engine.runs import (
    DP2,
    PP2,
    PP2_INTERLEAVED,
    Batches,
    be_quiet,
    make_trainer,
    mlp,
    name_of,
    strategy_of,
    vector_batches,
    whole,
    world_of,
)
from tests.harness import run_ranks

HSDP = {"dp_replicate": 2, "dp_shard": 2}


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)], ids=str)
def test_this_torch_averages_gradients(sizes):
    """Everything else rests on it: a backend that sums where it should average was seen."""

    def body():
        names = ("replicate", "shard")[-len(sizes) :]
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        torch.manual_seed(0)
        alone = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model, mesh=mesh)
        world = dist.get_world_size()
        parts = torch.randn(world, 3, 4)
        model(parts[dist.get_rank()]).square().mean().backward()
        torch.stack([alone(part).square().mean() for part in parts]).mean().backward()
        for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), expected.grad)

    run_ranks(sum(sizes) if len(sizes) == 1 else 4, body, timeout_s=120)


def reductions(layout, batches, window):
    """How often this rank reduced over shards, and over replicas, in one epoch."""
    be_quiet()
    counts = {"shards": 0, "replicas": 0}
    scatter = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    over_shards, over_replicas = getattr(dist, scatter), dist.all_reduce
    trainer = make_trainer(strategy_of(layout), world_of(layout), accumulate_grad_batches=window)

    def count_shards(*args, **kwargs):
        counts["shards"] += 1
        return over_shards(*args, **kwargs)

    def count_replicas(tensor, *args, **kwargs):
        replicas = trainer.strategy.mesh.device_mesh["dp_replicate"]
        counts["replicas"] += replicas.size() > 1 and kwargs.get("group") is replicas.get_group()
        return over_replicas(tensor, *args, **kwargs)

    setattr(dist, scatter, count_shards)  # in this forked rank only
    dist.all_reduce = count_replicas
    trainer.fit(mlp(), Batches(vector_batches(batches)))
    return counts


@pytest.mark.parametrize(
    ("layout", "parts"),
    [(DP2, 4), (HSDP, 4), ({**PP2_INTERLEAVED, "dp_shard": 2}, 2), ({**PP2, "dp_shard": 2}, 2)],
)
def test_gradients_are_reduced_once_for_each_optimizer_step(layout, parts):
    replicated = layout.get("dp_replicate", 1) > 1
    for counts in run_ranks(world_of(layout), reductions, layout, 4, 2, init=False, timeout_s=120):
        assert counts == {"shards": 2 * parts, "replicas": 2 * parts * replicated}, name_of(layout)
