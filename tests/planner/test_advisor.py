# SPDX-License-Identifier: Apache-2.0
"""Advice for runs on paper: decision order, what is on already, what does not help, the first set that fits."""

from dataclasses import replace

import pytest
import yaml

from lightning_3d.advisor import Failure, RunFacts, advise
from lightning_3d.advisor.advise import bound_of
from lightning_3d.advisor.text import advice_table, config_of, headline, yaml_of
from lightning_3d.estimator import STATE_BYTES, Layout, Workload
from lightning_3d.models import load_shape
from lightning_3d.plan import ParallelPlan
from lightning_3d.units import GIB


def run_of(model="llama-3-8b", seq=8192, batch=1, accumulate=1, precision="bf16-mixed", nodes=1, **layout):
    return RunFacts(
        shape=load_shape(model),
        layout=Layout(**{"dp_replicate": 8 * nodes, "zero_stage": 0, "microbatch_size": batch, **layout}),
        workload=Workload(
            seq_len=seq,
            batch_per_replica=batch * accumulate,
            states=STATE_BYTES["fsdp2-mixed" if precision.startswith("bf16") else "fp32"],
            matmul="bf16" if precision.startswith("bf16") else "fp32",
            fused=False,
        ),
        stage=0,
        accumulate=accumulate,
        precision=precision,
        ranks_per_node=8,
        is_cpu=False,
    )


def test_states_of_8b_are_sharded_in_the_node():
    advice = advise(run_of(seq=2048), 80 * GIB)
    assert advice.bound == "states"
    assert advice.first.lever.group == 2
    assert (advice.fitting.layout.dp_shard, advice.fitting.layout.dp_replicate) == (8, 1)
    assert advice.fitting.needed_bytes() < 80 * GIB < advice.needed_bytes


def test_sharding_stays_in_the_node_when_that_is_enough():
    fitting = advise(run_of(seq=2048, nodes=2), 80 * GIB).fitting
    assert (fitting.layout.dp_shard, fitting.layout.dp_replicate) == (8, 2)


def test_activations_are_recomputed_before_the_microbatch_shrinks():
    run = run_of(seq=8192, batch=2, dp_shard=8, dp_replicate=1, zero_stage=3)
    advice = advise(run, 80 * GIB)
    assert advice.bound == "activations"
    assert advice.first.lever.name in ("selective recompute", "full recompute")
    assert advice.fitting.layout.recompute != "none"


def test_one_sequence_that_is_too_long_needs_tensor_parallelism():
    run = run_of(
        "llama-3.1-70b", seq=65536, dp_shard=64, dp_replicate=1, zero_stage=3, recompute="full", nodes=8
    )
    advice = advise(run, 80 * GIB)
    names = [item.lever.name for item in advice.advised if item.in_set]
    assert names == ["tensor parallel in the node"]
    assert advice.fitting.layout.tp <= 8
    assert advice.fitting.layout.world_size == 64


def test_what_offload_makes_needless_is_left_out():
    """70 B parameters on eight devices: tensor parallelism saves something, and offload alone is enough."""
    run = run_of("llama-3.1-70b", seq=4096, dp_shard=8, dp_replicate=1, zero_stage=3, recompute="full")
    advice = advise(run, 80 * GIB)
    assert [item.lever.name for item in advice.advised if item.in_set] == ["offload to the host"]
    assert (advice.fitting.layout.tp, advice.fitting.layout.dp_shard) == (1, 8)


def test_the_order_and_what_is_on_already():
    run = run_of(seq=2048, recompute="full")
    advice = advise(run, 80 * GIB)
    groups = [item.lever.group for item in advice.advised]
    assert groups == sorted(groups)
    on = {item.lever.name: item.refusal for item in advice.advised}
    assert "already on" in on["bf16"]
    assert "already on" in on["full recompute"]
    assert on["smaller microbatch"] == "a microbatch is one sequence already"
    assert "accumulation" in advice_table(advice)


def test_a_failure_lowers_what_is_needed_even_where_the_estimate_fits():
    run = run_of(seq=2048, dp_shard=8, dp_replicate=1, zero_stage=3, batch=4)
    assert run.needed_bytes() < 141 * GIB
    advice = advise(run, 141 * GIB, Failure(rank=3, phase="backward", block="model.layers.7"))
    assert advice.fitting.needed_bytes() <= 0.9 * run.needed_bytes()
    assert headline(advice).startswith("Out of memory on rank 3 in backward of model.layers.7")


def test_a_failure_in_the_optimizer_is_one_of_the_states():
    run = run_of(seq=8192, batch=4)
    assert bound_of(run)[0] == "activations"
    assert bound_of(run, Failure(rank=0, phase="optimizer"))[0] == "states"


def test_nothing_fits_is_said():
    run = run_of("llama-3.1-405b", dp_replicate=1, dp_shard=1)
    advice = advise(run, 80 * GIB)
    assert advice.fitting is None
    assert "fits:" not in advice_table(advice)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_step_keeps_its_sequences(accumulate):
    run = run_of(seq=8192, batch=4, accumulate=accumulate)
    fitting = advise(run, 80 * GIB).fitting
    before = run.batch_size * run.accumulate * run.layout.dp
    assert fitting.batch_size * fitting.accumulate * fitting.layout.dp == before


def test_stages_keep_their_batch_and_what_is_accumulated():
    """Only the microbatches change: the data loader and the Trainer stay as they are."""
    run = run_of(seq=8192, batch=2, dp_shard=4, dp_replicate=1, pp=2, zero_stage=3)
    run = replace(run, workload=replace(run.workload, batch_per_replica=8), accumulate=3)
    fitting = advise(run, 60 * GIB).fitting
    assert fitting.layout != run.layout
    assert (fitting.batch_size, fitting.accumulate, fitting.layout.pp) == (8, 3, 2)


def test_the_config_is_a_plan():
    advice = advise(run_of(seq=8192, batch=4), 80 * GIB)
    config = config_of(advice)
    plan = ParallelPlan(**config["trainer"]["strategy"]["init_args"])
    assert plan.size("dp_shard") == advice.fitting.layout.dp_shard
    text = yaml_of(advice)
    assert yaml.safe_load(text) == config
    assert text.startswith("# This run will not fit")
    assert config_of(advise(replace(run_of(), datamodule_has_batch_size=True), 80 * GIB))["data"] == {
        "batch_size": 1
    }
