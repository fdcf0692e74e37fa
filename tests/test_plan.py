# SPDX-License-Identifier: Apache-2.0
"""A plan that cannot be is refused with its values, the rule and the remedy, without torch."""

import subprocess
import sys

import pytest

from lightning_3d.errors import Lightning3DError, PlanError
from lightning_3d.plan import ParallelPlan, check_microbatches
from lightning_3d.shape import ModelShape


def shape(**changes):
    values = {
        "num_layers": 8,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 100,
    }
    return ModelShape(**{**values, **changes})


@pytest.mark.parametrize(
    ("plan", "world", "per_node", "expected"),
    [
        ({}, 8, 8, {"dp_shard": 8, "dp_replicate": 1}),
        ({}, 32, 8, {"dp_shard": 8, "dp_replicate": 4}),
        ({"tp": 4}, 32, 8, {"dp_shard": 2, "dp_replicate": 4}),
        ({"pp": 2, "tp": 2}, 8, 8, {"dp_shard": 2, "dp_replicate": 1}),
        ({"dp_shard": 2}, 8, 8, {"dp_replicate": 4}),
        ({"dp_replicate": 2}, 8, 4, {"dp_shard": 4}),
        ({"tp": 3}, 12, 4, {"dp_shard": 1, "dp_replicate": 4}),
        (
            {"pp": "auto", "tp": "auto", "cp": "auto", "ep": "auto"},
            6,
            None,
            {"pp": 1, "tp": 1, "dp_shard": 6},
        ),
    ],
)
def test_resolve_shards_in_the_node_and_replicates_across(plan, world, per_node, expected):
    resolved = ParallelPlan(**plan).resolve(world, per_node)
    assert resolved.world_size == world
    assert {axis: resolved.size(axis) for axis in expected} == expected


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ParallelPlan(tp=0), ["tp=0", ">= 1"]),
        (lambda: ParallelPlan(pp=True), ["pp=True"]),
        (lambda: ParallelPlan(dp_shard=2.0), ["dp_shard=2.0"]),
        (lambda: ParallelPlan(schedule="zigzag"), ["zigzag", "1f1b"]),
        (lambda: ParallelPlan(pp=2, schedule="interleaved"), ["virtual_stages=2"]),
        (lambda: ParallelPlan(pp=2, virtual_stages=2), ["interleaved"]),
        (lambda: ParallelPlan(pp=3).resolve(8), ["pp=3", "8", "divides"]),
        (lambda: ParallelPlan(dp_shard=3).resolve(8), ["dp_shard=3", "1, 2, 4 or 8"]),
        (lambda: ParallelPlan(pp=2, dp_shard=2, dp_replicate=1, tp=1).resolve(8), ["4 ranks", "8"]),
        (
            lambda: resolved(tp=8).check_model(shape(num_attention_heads=4)),
            ["num_attention_heads=4", "tp=1, 2 or 4"],
        ),
        (lambda: resolved(tp=8).check_model(shape(num_key_value_heads=3)), ["num_key_value_heads=3", "tp=1"]),
        (
            lambda: resolved(tp=8).check_model(shape(intermediate_size=100)),
            ["intermediate_size=100", "tp=1, 2 or 4"],
        ),
        (
            lambda: resolved(tp=2).check_model(shape(), sequence_length=7),
            ["7", "8", "sequence_parallel=False"],
        ),
        (lambda: resolved(tp=8).check_model(shape(vocab_size=5)), ["vocab_size=5"]),
        (lambda: resolved(pp=4).check_model(shape(num_layers=3)), ["4 pipeline stages", "num_layers=3"]),
        (
            lambda: check_microbatches(resolved(pp=4, num_microbatches=2)),
            ["num_microbatches=2", "pp=4", ">= 4"],
        ),
        (lambda: check_microbatches(resolved(num_microbatches=4)), ["pp=1", "accumulate_grad_batches=4"]),
        (lambda: resolved(pp=2, num_microbatches=4).check_batch(6), ["num_microbatches=4", "6", "2, 3 or 6"]),
        (lambda: resolved(tp=8).check_cluster(4, strict=True), ["tp=8", "4 ranks", "tp <= 4"]),
        (lambda: ParallelPlan().size("dp_shard"), ["dp_shard", "resolve"]),
    ],
)
def test_refusals_name_value_rule_and_remedy(make, words):
    with pytest.raises(PlanError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, Lightning3DError)


def resolved(**degrees):
    axes = {axis: degrees.get(axis, 1) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    return ParallelPlan(**{**degrees, **axes})


def test_topology_warns_with_the_cost():
    (warning,) = resolved(tp=8).check_cluster(4)
    assert "cross the network" in warning
    assert resolved(tp=4, pp=2).check_cluster(4) == []


@pytest.mark.parametrize("batch", range(1, 20))
@pytest.mark.parametrize("asked", ["auto", 2, 4, 6])
def test_microbatches_divide_every_batch(batch, asked):
    plan = resolved(pp=2, num_microbatches=asked)
    parts = plan.microbatches_for(batch)
    assert batch % parts == 0
    assert 1 <= parts <= (8 if asked == "auto" else asked)


def test_no_torch():
    code = (
        "import sys, lightning_3d, lightning_3d.plan, lightning_3d.planner; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
