# SPDX-License-Identifier: Apache-2.0
"""Recomputation changes what is kept and how much is computed, and no number."""

import re
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d.errors import PlanError
from lightning_3d.levers import parse_recompute
from lightning_3d.models import load_shape, shape_of_module
from lightning_3d.parallel.gate import BlockGate, hidden_of
from lightning_3d.parallel.recompute import Recompute
from lightning_3d.plan import ParallelPlan
from lightning_3d.planner.activation_budget import ActivationBudget
from tests.engine.runs import (
    DP2,
    PP2,
    PP2_DP2,
    PP2_INTERLEAVED,
    TP2,
    Module,
    Run,
    check,
    fit,
    lm,
    name_of,
    token_batches,
    world_of,
)
from tests.harness import run_ranks
from tests.models import decoder, tokens

BUDGET = f"{136 / 1024 / 1024}GiB"
"""136 KiB: for activations of all blocks it is too little in most layouts of the trials, and never for those of one."""
MODES = ("selective", "full", "0.5", BUDGET)


@pytest.mark.parametrize("layout", [DP2, TP2, PP2, PP2_DP2, {"dp_shard": 2, "tp": 2}], ids=name_of)
def test_same_as_one_process(layout):
    runs = {
        f"{mode} {optimizer}": Run(
            module=lambda optimizer=optimizer: lm(optimizer, tied=optimizer == "sgd"),
            batches=token_batches(2),
            strategy={"recompute": mode},
        )
        for mode, optimizer in zip(MODES, ("sgd", "adamw", "adamw", "sgd"), strict=True)
    }
    check(layout, runs)


@pytest.mark.parametrize(
    "layout", [TP2, {"tp": 2, "sequence_parallel": False}, PP2, PP2_INTERLEAVED], ids=name_of
)
def test_dropout_is_the_same_in_both_forwards(layout):
    def losses(mode):
        run = Run(
            module=lambda: lm(dropout=0.3, attention_dropout=0.3),
            batches=token_batches(3),
            strategy={"recompute": mode},
        )
        return torch.stack(fit(run, layout).losses)

    def body():
        return [losses(mode) for mode in ("none", *MODES)]

    for kept, *others in run_ranks(world_of(layout), body, init=False, timeout_s=120):
        for mode, losses_then in zip(MODES, others, strict=True):
            assert torch.allclose(losses_then, kept, rtol=1e-6), mode


class CountProducts(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def work_and_memory(mode):
    model = decoder()
    stages = [range(4)]
    recompute = None if mode == "none" else Recompute(parse_recompute(mode), stages, stop_early=False)
    BlockGate(tuple(model.layers), recompute=recompute)
    ids, _ = tokens()
    kept = []

    def pack(tensor):
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(ids)
    with CountProducts() as products:
        out.sum().backward()
    return products.count, sum(kept)


def test_what_is_computed_again_and_what_is_kept():
    (kept_work, kept_bytes), (full_work, full_bytes) = work_and_memory("none"), work_and_memory("full")
    selective_work, _ = work_and_memory("selective")
    blocks, products = 4, 7  # q, k, v, o, w1, w2, w3
    assert full_work - kept_work == blocks * products
    assert selective_work - kept_work == blocks * (products // 2)
    assert full_bytes < kept_bytes / 4
    half_work, half_bytes = work_and_memory("0.5")
    assert half_work - kept_work == blocks // 2 * products
    assert half_bytes == pytest.approx((full_bytes + kept_bytes) / 2, rel=0.01)


def recomputed_blocks(layout, recompute, batches):
    """The blocks of this rank that a run recomputed, batch by batch, out of those that it has."""
    seen, call = [], BlockGate.call_block

    def watch(gate, index, *arguments):
        again = gate._recompute
        if torch.is_grad_enabled():  # the first batch runs once more beside training
            seen[-1].update({index: again.applies_to(index, lambda: hidden_of(*arguments[1:]))})
        return call(gate, index, *arguments)

    class Watched(Module):
        def on_train_batch_start(self, batch, batch_idx):
            seen.append({})

    BlockGate.call_block = watch  # in this forked rank only
    fit(Run(module=lambda: lm(cls=Watched), batches=batches, strategy={"recompute": recompute}), layout)
    return seen


@pytest.mark.parametrize(
    ("layout", "recompute", "expected"),
    [
        (DP2, 0.5, [[1, 3], [1, 3]]),
        (PP2, "0.5", [[3], [1]]),  # of each stage, the last of which is on rank 0
        (PP2_INTERLEAVED, 0.25, [[1, 3], [0, 2]]),  # one at least
    ],
)
def test_a_share_is_spread_over_each_stage(layout, recompute, expected):
    by_rank = run_ranks(2, recomputed_blocks, layout, recompute, token_batches(1), init=False, timeout_s=120)
    assert [[block for block, again in seen[0].items() if again] for seen in by_rank] == expected


def test_a_budget_is_kept_with_as_few_blocks_as_that_needs():
    """More for a longer batch, more on the first of two stages, and always within what was asked for."""
    batches = [*token_batches(1, length=8), *token_batches(1, length=32)]
    plan = ParallelPlan(pp=2, dp_replicate=1, dp_shard=1, tp=1, num_microbatches=4, recompute="0.0002GiB")
    found = run_ranks(2, recomputed_blocks, PP2, plan.recompute, batches, init=False, timeout_s=120)
    solver = ActivationBudget(plan, shape_of_module(lm()), [2, 2], precision="32-true", dropout=False)
    for rank, seen in enumerate(found):
        stage = 1 - rank
        counts = [sum(blocks.values()) for blocks in seen]
        assert counts == [solver.num_recomputed(stage, 2 * 8), solver.num_recomputed(stage, 2 * 32)]
    first, last = ([sum(blocks.values()) for blocks in found[rank]] for rank in (1, 0))
    assert first[0] < first[1]
    assert last[1] <= first[1]


def test_a_budget_that_cannot_be_kept_says_what_would_do():
    plan = ParallelPlan(pp=1, dp_replicate=1, dp_shard=1, recompute="0.001 GiB")
    solver = ActivationBudget(plan, load_shape("llama-3-8b"), [32], precision="bf16-mixed", dropout=False)
    with pytest.raises(
        PlanError, match=r"all 32 blocks .* 4096 tokens still take \d.*Use recompute='"
    ) as error:
        solver.num_recomputed(0, 4096)
    enough = re.search(r"recompute='([^']+)'.*recompute='([^']+)'", str(error.value))[2]
    plan = replace(plan, recompute=enough)
    again = ActivationBudget(plan, load_shape("llama-3-8b"), [32], precision="bf16-mixed", dropout=False)
    assert again.num_recomputed(0, 4096) == 32


@pytest.mark.parametrize("asked", [-0.5, 1.5, True, "half", "0GiB", None, "2GB"])
def test_what_is_neither_mode_share_nor_budget_is_refused(asked):
    with pytest.raises(PlanError, match=r"recompute=.*is unknown"):
        ParallelPlan(recompute=asked)


def test_unknown_mode_is_refused_with_those_there_are():
    with pytest.raises(PlanError, match=r"recompute='some'.*'none', 'selective', 'full'"):
        ParallelPlan(recompute="some")
