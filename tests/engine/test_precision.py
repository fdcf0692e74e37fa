# SPDX-License-Identifier: Apache-2.0
"""Precision: 16 bits as close as they are on one process, 64 bits exact, and a scaler that all ranks follow."""

import itertools

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import nn
from torch.amp import GradScaler

from lightning_3d.errors import SupportError
from lightning_3d.parallel.gradients import SharedGradScaler
from tests.engine.runs import (
    DP2,
    PP2,
    TP2,
    Batches,
    Module,
    Regression,
    Run,
    be_quiet,
    check,
    lm,
    make_trainer,
    mlp,
    name_of,
    seeded,
    strategy_of,
    token_batches,
    vector_batches,
)
from tests.harness import run_ranks


class Rotated(nn.Module):
    """Turns its hidden state by large angles, given in fp32."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, angles):
        return x + torch.tanh(self.linear(x)) * torch.cos(angles).to(x.dtype)


class Angles(Regression):
    def __init__(self):
        super().__init__(nn.ModuleList(Rotated() for _ in range(4)))

    def training_step(self, batch, batch_idx):
        x, angles = batch["x"], torch.arange(16.0) * 1001.3
        for block in self.model:
            x = block(x, angles)
        return F.mse_loss(x, batch["y"])


class FrozenStart(Module):
    """The optimizer of the first stage has nothing to do."""

    def __init__(self, model, optimizer):
        super().__init__(model, optimizer)
        model.tok_embeddings.requires_grad_(False)
        model.layers[:3].requires_grad_(False)


def rounded(precision, module=lm, batches=None, tolerance=0.06, **options):
    return Run(
        module=module,
        batches=token_batches() if batches is None else batches,
        options={"precision": precision, **options},
        tolerance=tolerance,
        compare=("losses", "parameters"),
    )


RUNS = {
    "bf16-mixed": rounded("bf16-mixed", gradient_clip_val=0.5),
    "bf16-true": rounded("bf16-true", lambda: mlp("adamw"), vector_batches()),
    "bf16-mixed, angles": rounded("bf16-mixed", lambda: seeded(Angles), vector_batches(), 0.02),
    "64-true": Run(
        module=lambda: lm("adamw", tied=True),
        batches=token_batches(),
        options={"precision": "64-true", "gradient_clip_val": 0.1},
        compare=("gradients", "parameters"),
        tolerance=1e-10,
    ),
    "64-true, frozen start": Run(
        module=lambda: lm(cls=FrozenStart),
        batches=token_batches(),
        options={"precision": "64-true", "gradient_clip_val": 0.1},
        compare=("gradients", "parameters"),
        tolerance=1e-10,
    ),
}


@pytest.mark.parametrize("layout", [PP2, DP2, TP2], ids=name_of)
def test_precisions(layout):
    # Tensor parallelism needs layers whose names it knows.
    names = [name for name in RUNS if layout is not TP2 or name not in ("bf16-mixed, angles", "bf16-true")]
    check(layout, {name: RUNS[name] for name in names})


class Overflow(pl.Callback):
    """Makes one gradient of one rank infinite in the second step, and keeps what the scaler did."""

    def __init__(self, rank):
        self.rank, self.scales, self.weights = rank, [], []

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_rank == self.rank and trainer.global_step == 1 and not self.weights[1:]:
            gradient = next(p.grad for p in pl_module.parameters() if p.grad is not None)
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).view(-1)[0] = torch.inf

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.scales.append(trainer.precision_plugin.scaler.get_scale())
        weights = [p.to_local() if hasattr(p, "to_local") else p for p in pl_module.parameters()]
        self.weights.append(torch.cat([w.detach().flatten().clone() for w in weights]))


def overflowing(layout, rank, fused):
    """Whether each step changed the weights, and the scale after it."""
    be_quiet()
    overflow = Overflow(rank)
    plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2.0**10))
    module = mlp()
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=0.01, fused=fused)
    trainer = make_trainer(strategy_of(layout), 2, plugins=[plugin], callbacks=[overflow])
    trainer.fit(module, Batches(vector_batches(4)))
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(overflow.weights)]
    return type(trainer.precision_plugin.scaler), moved, overflow.scales


@pytest.mark.parametrize("layout", [PP2, DP2, {**DP2, "offload": "cpu"}], ids=name_of)
def test_an_overflow_on_one_rank_skips_the_step_on_all(layout):
    def body():
        return [overflowing(layout, rank, fused) for rank in (0, 1) for fused in (False, True)]

    for of_rank in run_ranks(2, body, init=False, timeout_s=120):
        for scaler, moved, scales in of_rank:
            assert scaler is SharedGradScaler
            assert moved == [False, True, True]
            assert scales == [1024, 512, 512, 512]


class OwnPrecision(Precision):
    pass


class OwnScaler(GradScaler):
    pass


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        (OwnPrecision, "OwnPrecision"),
        (lambda: MixedPrecision("16-mixed", "cpu", OwnScaler("cpu")), "OwnScaler"),
    ],
)
def test_precision_of_ones_own_is_refused(plugin, words):
    def body():
        be_quiet()
        with pytest.raises(SupportError, match=words):
            make_trainer(strategy_of(DP2), 2, plugins=[plugin()]).fit(mlp(), Batches(vector_batches(1)))

    run_ranks(2, body, init=False, timeout_s=120)


def test_bf16_has_no_scaler():
    def body():
        be_quiet()
        trainer = make_trainer(strategy_of(DP2), 2, precision="bf16-mixed")
        trainer.fit(mlp(), Batches(vector_batches(1)))
        return trainer.precision_plugin.scaler

    assert run_ranks(2, body, init=False, timeout_s=120) == [None, None]
