# SPDX-License-Identifier: Apache-2.0
"""Weights gathered in 8 bits: bytes on the wire, how far off the numbers are, and what is refused."""

import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_3d.checkpoint import load_full_state_dict
from lightning_3d.errors import ModelError, PlanError, SupportError
from lightning_3d.levers import check_levers
from lightning_3d.parallel.float8 import convert_blocks
from lightning_3d.plan import ParallelPlan
from tests.engine.runs import (
    DP2,
    PP2_DP2,
    Batches,
    Run,
    alone,
    be_quiet,
    errors,
    fit,
    lm,
    make_trainer,
    name_of,
    strategy_of,
    token_batches,
    world_of,
)
from tests.harness import run_ranks

FLOAT8 = {"float8_all_gather": True}
GRADIENT_NOISE = 0.25
"""Of a gradient, over its largest value: 8 bits have three for the mantissa."""
LOSS_NOISE = 0.02
"""Of a loss, over three steps."""


RUN = Run(module=lambda: lm("adamw"), batches=token_batches(3), options={"precision": "bf16-mixed"})


@pytest.mark.parametrize("layout", [DP2, PP2_DP2], ids=name_of)
def test_numbers_are_as_near_as_8_bits_allow(layout):
    pytest.importorskip("torchao")

    def body():
        return [fit(replace(RUN, strategy=strategy), layout) for strategy in ({}, FLOAT8)]

    exact = alone(RUN)
    for records in run_ranks(world_of(layout), body, init=False, timeout_s=120):
        noises = []
        for record in records:
            loss = torch.stack(record.losses) / torch.stack(exact.losses) - 1
            assert loss.abs().max() < LOSS_NOISE
            noise = errors(record, exact, ("gradients",))
            noises.append(max(value for name, value in noise.items() if name.endswith("step 0")))
        plain, rounded = noises
        assert 2 * plain < rounded < GRADIENT_NOISE


def test_a_block_is_gathered_in_half_the_bytes():
    """What two more blocks add to the gathers; the rest is outside the blocks."""
    pytest.importorskip("torchao")

    def body():
        return {
            (len(strategy), depth): gathered_by(depth, strategy)[1]
            for strategy in ({}, FLOAT8)
            for depth in (2, 4)
        }

    for sent in run_ranks(2, body, init=False, timeout_s=120):
        plain, float8 = (sent[levers, 4] - sent[levers, 2] for levers in (0, 1))
        assert float8 / plain == pytest.approx(0.5, abs=0.02)  # norms stay in 16 bits


def gathered_by(depth, strategy):
    """A trainer after one step, and the bytes that this rank sent into gathers of parameters."""
    be_quiet()
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, sent = getattr(dist, name), []

    def count(output, input, *args, **kwargs):
        sent.append(input.numel() * input.element_size())
        return gather(output, input, *args, **kwargs)

    setattr(dist, name, count)  # in this forked rank only
    trainer = make_trainer(strategy_of({**DP2, **strategy}), 2, precision="bf16-mixed", max_steps=1)
    trainer.fit(lm(n_layers=depth), Batches(token_batches(2)))
    setattr(dist, name, gather)
    return trainer, sum(sent)


def test_a_checkpoint_holds_plain_weights_under_the_same_names(tmp_path):
    pytest.importorskip("torchao")

    def save():
        trainer, _ = gathered_by(2, FLOAT8)
        trainer.save_checkpoint(tmp_path / "saved")
        weights = {n: p.full_tensor() for n, p in trainer.lightning_module.named_parameters()}
        again = make_trainer(strategy_of({**DP2, **FLOAT8}), 2, precision="bf16-mixed", max_steps=2)
        again.fit(lm(n_layers=2), Batches(token_batches(2)), ckpt_path=tmp_path / "saved")
        return weights, again.global_step

    found = run_ranks(2, save, init=False, timeout_s=120)
    saved = load_full_state_dict(tmp_path / "saved")
    assert saved.keys() == lm(n_layers=2).state_dict().keys()
    for weights, step in found:
        assert step == 2
        for name, value in weights.items():
            assert type(value) is torch.Tensor
            assert torch.equal(saved[name], value), name


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"tp": 2, "dp_shard": 2}, "float8_all_gather=True with tp=2.*Use tp=1"),
        ({"dp_shard": 1, "dp_replicate": 2}, "no effect with dp_shard=1.*dp_shard >= 2"),
    ],
)
def test_layouts_without_gathers_in_8_bits_are_refused(degrees, words):
    plan = ParallelPlan(**{"pp": 1, "dp_replicate": 1, "tp": 1, **degrees}, float8_all_gather=True)
    with pytest.raises(PlanError, match=words):
        check_levers(plan)


def test_models_and_precisions_without_8_bits_are_refused(monkeypatch):
    device = torch.device("cpu")
    odd = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8))
    with pytest.raises(ModelError, match="multiples of 16"):
        convert_blocks(odd, [odd], device, "bf16-mixed")
    block = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(SupportError, match=r"precision='16-mixed'.*bf16-mixed"):
        convert_blocks(block, [block], device, "16-mixed")
    monkeypatch.setitem(sys.modules, "torchao.float8", None)  # importing it now raises
    with pytest.raises(SupportError, match=r"torchao, which is not installed.*fp8"):
        convert_blocks(block, [block], device, "bf16-mixed")


def test_shared_and_special_layers_stay_as_they_are():
    pytest.importorskip("torchao")

    class Own(nn.Linear):
        """A forward of its own."""

    block = nn.Sequential(nn.Linear(16, 16), Own(16, 16), nn.Linear(16, 24), nn.Linear(16, 16))
    model = nn.ModuleDict({"block": block, "head": nn.Linear(16, 16)})
    model["head"].weight = block[3].weight
    assert convert_blocks(model, [block], torch.device("cpu"), "bf16-mixed") == 1
    assert [type(layer).__name__ for layer in block] == ["Float8Linear", "Own", "Linear", "Linear"]
    assert model["head"].weight is block[3].weight
