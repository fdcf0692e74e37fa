# SPDX-License-Identifier: Apache-2.0
"""Moments in 8 bits: as near to one process as 8 bits are to 32, as small as they should be, also from checkpoints."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_3d.errors import CheckpointError, SupportError
from lightning_3d.estimator import STATE_BYTES
from lightning_3d.strategies.support import check_optimizers
from tests.engine.runs import (
    DP2,
    PP2,
    Batches,
    Module,
    Run,
    alone,
    be_quiet,
    check,
    errors,
    fit,
    make_trainer,
    mlp,
    relative_error,
    strategy_of,
    token_batches,
    whole,
    world_of,
)
from tests.harness import run_ranks
from tests.models import decoder

pytest.importorskip("torchao")

DP2_TP2 = {"dp_shard": 2, "tp": 2}
BATCHES = token_batches(4)
NEAR = 0.05
"""Of the largest weight, after two steps on moments that were rounded otherwise."""


class LowBit(Module):
    """Weights of 4096 values and more on each of four ranks, but for those of keys and values."""

    def __init__(self, optimizer="AdamW8bit"):
        super().__init__(decoder(n_layers=2, dim=128, hidden_dim=256), optimizer)

    def configure_optimizers(self):
        from torchao import optim

        # Uncompiled: the first step is otherwise a minute of compilation on a CPU.
        torch.compiler.set_stance("force_eager")
        kinds = {"AdamW8bit": optim.AdamW8bit, "AdamW": torch.optim.AdamW}
        return kinds[self.optimizer](self.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)


RUN = Run(module=LowBit, batches=BATCHES[:3], options={"gradient_clip_val": 1.0})


@pytest.fixture(autouse=True)
def _compiles_again():
    yield
    torch.compiler.set_stance("default")


@pytest.mark.parametrize(("layout", "share"), [(DP2, 0.5), (PP2, 0.5), (DP2_TP2, 2.0)], ids=str)
def test_as_near_to_one_process_as_8_bits_are_to_32(layout, share):
    """Blocks of 256 lie on a rank. Cut between them nothing rounds otherwise; cut through them two roundings differ."""
    in_32_bits = fit(replace(RUN, module=lambda: LowBit("AdamW")))
    rounding = max(errors(alone(RUN), in_32_bits, ("parameters",)).values())
    assert 1e-4 < rounding < 0.1
    run = replace(RUN, reference=RUN, compare=("parameters",), tolerance=share * rounding)
    check(layout, {"8 bits": run})


def train(layout, folder, *, optimizer="AdamW8bit", resume=None, steps):
    """Trains, saves, and returns the parameters and the tensors that hold the moments."""
    be_quiet()
    module = LowBit(optimizer)
    trainer = make_trainer(strategy_of(layout), world_of(layout), max_steps=steps)
    trainer.fit(module, Batches(BATCHES), ckpt_path=resume)
    assert trainer.global_step == steps
    trainer.save_checkpoint(folder)
    values = [
        value.to_local() if hasattr(value, "to_local") else value
        for state in trainer.optimizers[0].state.values()
        for key, value in state.items()
        if key != "step"
    ]
    moments = [part for value in values for part in parts_of(value)]
    return {name: whole(p) for name, p in module.named_parameters()}, moments


def parts_of(moment):
    return [moment.codes, moment.scale] if hasattr(moment, "codes") else [moment]


def test_through_a_checkpoint_and_back(tmp_path):
    half, wide = tmp_path / "half", tmp_path / "in 32 bits"

    def two_ranks():
        train(DP2, half, steps=2)
        return [
            train(DP2, tmp_path / "whole", steps=4),
            train(DP2, tmp_path / "resumed", steps=4, resume=half),
            train(DP2, wide, steps=3, resume=half, optimizer="AdamW"),
            train(DP2, tmp_path / "back", steps=4, resume=wide),
        ]

    results = run_ranks(2, two_ranks, init=False, timeout_s=140)
    for (expected, expected_moments), (resumed, moments), *_ in results:
        assert all(torch.equal(resumed[name], value) for name, value in expected.items())
        assert len(moments) == len(expected_moments)
        assert all(map(torch.equal, moments, expected_moments))  # codes and scales, bit for bit
        # A byte a moment and a scale for 256 of them; small tensors are as they are.
        num_bytes = sum(part.numel() * part.element_size() for part in moments)
        count = sum(p.numel() for p in LowBit().parameters()) / 2
        assert num_bytes == pytest.approx(STATE_BYTES["adam8bit"].optimizer * count, rel=0.06)
    others = run_ranks(
        4, lambda: train(DP2_TP2, tmp_path / "4", steps=4, resume=half), init=False, timeout_s=140
    )
    expected = results[0][0][0]
    for parameters, _ in (*others, *(result[3] for result in results)):
        for name, value in parameters.items():
            assert relative_error(value, expected[name]) < NEAR, name


class Named(torch.optim.AdamW):
    """Stands for an optimizer of a package that is not installed."""


def named(name, module):
    return type(name, (Named,), {"__module__": module})


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (named("AdamW4bit", "torchao.optim.adam"), "torchao's AdamW4bit.*AdamW8bit"),
        (named("AdamWFp8", "torchao.optim.adam"), "torchao's AdamWFp8.*AdamW8bit"),
        (named("CPUOffloadOptimizer", "torchao.optim.cpu_offload"), "CPUOffloadOptimizer.*offload='cpu'"),
        (named("AdamW8bit", "bitsandbytes.optim.adamw"), "bitsandbytes' AdamW8bit.*torchao.optim"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_sharded_is_refused_by_name(optimizer, words):
    module = mlp()
    with pytest.raises(SupportError, match=words):
        check_optimizers([optimizer(module.parameters())], {}, module)


def test_other_tensors_of_a_kind_of_their_own_are_not_stored():
    from torchao.optim.subclass_4bit import OptimState4bit

    from lightning_3d.checkpoint.shards import sharded

    with pytest.raises(CheckpointError, match=r"OptimState4bit.*AdamW8bit"):
        sharded("moment", OptimState4bit.zeros((64, 64)))
    assert sharded("weight", nn.Parameter(torch.ones(2))).box == "0:2"
