# SPDX-License-Identifier: Apache-2.0
"""State in the host's memory: the numbers of one process, wherever parameters, gradients and optimizer live."""

from dataclasses import replace

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.distributed.fsdp import CPUOffloadPolicy

from lightning_3d.errors import PlanError
from lightning_3d.estimator import STATE_BYTES, Layout, MemoryModel, Workload, layout_of_plan
from lightning_3d.hardware import load_cluster
from lightning_3d.models import load_shape, shape_of_module
from lightning_3d.parallel import fsdp
from lightning_3d.plan import ParallelPlan
from lightning_3d.planner import SearchSpace, plan_for
from lightning_3d.planner.auto import only_runnable
from tests.engine.runs import (
    DP2,
    PP2,
    PP2_DP2,
    TP2,
    Batches,
    Run,
    be_quiet,
    check,
    fit,
    lm,
    make_trainer,
    name_of,
    strategy_of,
    token_batches,
    world_of,
)
from tests.harness import run_ranks

OFFLOAD = {"offload": "cpu"}
RUNS = {
    "clipped": Run(
        module=lambda: lm("adamw", bias=True),
        batches=token_batches(),
        options={"gradient_clip_val": 0.1},
        strategy=OFFLOAD,
    ),
    "tied, accumulated, recomputed": Run(
        module=lambda: lm(tied=True),
        batches=token_batches(2),
        options={"accumulate_grad_batches": 2},
        strategy={**OFFLOAD, "recompute": 0.5},
    ),
}


@pytest.mark.parametrize("layout", [{}, DP2, TP2, PP2, {"dp_shard": 2, "tp": 2}, PP2_DP2], ids=name_of)
def test_same_as_one_process(layout):
    check(layout, RUNS)


def test_it_is_the_run_without_offload_bit_for_bit():
    def body():
        found = [fit(replace(RUNS["clipped"], strategy=levers), {**PP2_DP2}) for levers in ({}, OFFLOAD)]
        return [
            torch.stack(record.losses).equal(torch.stack(found[0].losses))
            and all(record.parameters[name].equal(value) for name, value in found[0].parameters.items())
            for record in found
        ]

    assert all(run_ranks(4, body, init=False, timeout_s=120))


def policies_and_bytes(layout):
    """How each part was sharded, the bytes of state that this rank holds, and where they are."""
    be_quiet()
    seen, shard = [], fsdp.fully_shard

    def fully_shard(*args, **kwargs):
        seen.append(kwargs["offload_policy"])
        return shard(*args, **kwargs)

    fsdp.fully_shard = fully_shard  # in this forked rank only
    trainer = make_trainer(strategy_of(layout), world_of(layout), max_steps=1)
    held = []

    def count(trainer, module, optimizer):
        tensors = [t for p in module.parameters() for t in (p, p.grad)]
        held.extend(t.to_local() if hasattr(t, "to_local") else t for t in tensors)

    trainer.callbacks.append(LambdaCallback(on_before_optimizer_step=count))
    trainer.fit(lm("adamw"), Batches(token_batches(1)))
    states = trainer.optimizers[0].state.values()
    held += [t.to_local() for state in states for t in state.values() if t.dim()]
    return seen, sum(t.numel() * t.element_size() for t in held), {t.device.type for t in held}


def test_nothing_is_pinned_without_an_accelerator_and_the_host_holds_what_is_estimated():
    layout = {**DP2, **OFFLOAD}
    for policies, num_bytes, devices in run_ranks(2, policies_and_bytes, layout, init=False, timeout_s=120):
        assert len(policies) == 5  # four blocks and the root
        assert all(isinstance(policy, CPUOffloadPolicy) and not policy.pin_memory for policy in policies)
        assert devices == {"cpu"}
        plan = ParallelPlan(pp=1, dp_replicate=1, tp=1, dp_shard=2, offload="cpu")
        work = Workload(seq_len=8, global_batch=8, states=STATE_BYTES["fp32"])
        estimate = MemoryModel(shape_of_module(lm()), work).peak(layout_of_plan(plan, batch_per_replica=4))
        assert estimate.static_bytes == 0
        assert estimate.host == pytest.approx(num_bytes, rel=0.01)


def test_over_one_rank_blocks_are_still_brought_to_the_device():
    """The device then holds two blocks and what is outside of them, not the model."""
    model = MemoryModel(load_shape("llama-3-8b"), Workload(seq_len=4096, global_batch=1))
    plain, offloaded = (model.peak(Layout(zero_stage=0, offload=kind)) for kind in ("none", "parameters"))
    assert plain.gathered == 0
    assert 0 < offloaded.gathered < 0.5 * plain.parameters
    assert offloaded.host == plain.static_bytes


def test_the_planner_offloads_last():
    shape, cluster = load_shape("llama-3-8b"), load_cluster("8xA100-40")
    space = only_runnable(SearchSpace())
    assert space.offload == ("none", "parameters")
    fits = plan_for(shape, cluster, seq_len=2048, global_batch=64, space=space)
    assert {plan.layout.offload for plan in fits.ranked} == {"none"}
    larger = plan_for(
        load_shape("llama-2-13b"), load_cluster("2xH100"), seq_len=2048, global_batch=64, space=space
    )
    assert {plan.layout.offload for plan in larger.ranked} == {"parameters"}
    plan = larger.best.layout.to_plan(larger.workload)
    assert plan.offload == "cpu"
    assert plan.reshard_after_forward
    huge = plan_for(load_shape("llama-3-70b"), load_cluster("4xH100"), seq_len=2048, global_batch=64)
    assert "host's memory" in huge.nothing_fits()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"offload": "nvme"}, r"offload='nvme'.*'none', 'cpu'.*zero_offload"),
        ({"offload": True}, r"offload=True is unknown"),
    ],
)
def test_unknown_places_are_refused(values, words):
    with pytest.raises(PlanError, match=words):
        ParallelPlan(**values)
