# SPDX-License-Identifier: Apache-2.0
"""What a layout cannot do is said in one line, by the error of its kind, before or in the first step."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.errors import Lightning3DError, ModelError, PlanError, StepError, SupportError
from tests.engine.runs import (
    Batches,
    Module,
    Regression,
    Run,
    be_quiet,
    fit,
    make_trainer,
    mlp,
    seeded,
    strategy_of,
    token_batches,
    token_loss,
    vector_batches,
    world_of,
)
from tests.harness import RanksError, run_ranks


def failure_of(module, batches, layout, **options):
    """The error of this package that a fit ends in, by type and text, on this rank."""
    be_quiet()
    try:
        trainer = make_trainer(strategy_of(layout), world_of(layout), **options)
        trainer.fit(module, Batches(batches))
    except Lightning3DError as error:
        return type(error), str(error)
    return None


PP2 = {"pp": 2}


class TwoCalls(Regression):
    def training_step(self, batch, batch_idx):
        return (self.model(batch["x"]) + self.model(batch["y"])).mean()


class NoCall(Regression):
    def training_step(self, batch, batch_idx):
        return batch["x"].mean()


class NoLoss(Regression):
    def training_step(self, batch, batch_idx):
        self.model(batch["x"])


class WrongLoss(Regression):
    def training_step(self, batch, batch_idx):
        return self.model(batch["x"])


class Manual(Regression):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False


class Skips(Regression):
    """Leaves a layer out."""

    def training_step(self, batch, batch_idx):
        x = batch["x"]
        for index in (0, 1, 3):
            x = self.model.layers[index](x)
        return x.mean()


@pytest.mark.parametrize(
    ("degrees", "devices", "words"),
    [
        ({"pp": 2}, 3, ("pp=2", "3")),
        ({"pp": 2, "tp": 2}, 2, ("pp=2", "tp=2", "4", "2")),
        ({"dp_shard": 3}, 4, ("dp_shard=3", "4")),
        ({"dp_shard": 2, "dp_replicate": 3}, 4, ("6", "4")),
        ({"pp": 2, "num_microbatches": 1}, 2, ("num_microbatches=1", "pp=2")),
        ({"pp": 1, "num_microbatches": 4}, 1, ("num_microbatches=4", "pp=1", "accumulate_grad_batches=4")),
        ({"pp": 2, "num_microbatches": 3, "schedule": "interleaved", "virtual_stages": 2}, 2, ("3", "pp=2")),
        ({"pp": 1, "schedule": "interleaved", "virtual_stages": 2}, 1, ("virtual_stages=2", "pp=1")),
    ],
)
def test_degrees_are_refused_where_the_trainer_is_made(degrees, devices, words):
    with pytest.raises(PlanError) as error:
        make_trainer(strategy_of(degrees), devices)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "degrees", [{"pp": 0}, {"tp": 1.5}, {"schedule": "zigzag"}, {"virtual_stages": 2}, {"cp": 2}]
)
def test_what_is_no_plan_is_refused_where_it_is_written(degrees):
    with pytest.raises(PlanError):
        strategy_of(degrees)


INTERLEAVED = {**PP2, "schedule": "interleaved", "virtual_stages": 2}


class HeadFirst(Module):
    """Defines its head before its layers."""

    def __init__(self):
        super().__init__(nn.Identity())
        self.head = nn.Linear(16, 64)
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def training_step(self, batch, batch_idx):
        hidden = self.embed(batch["ids"])
        for layer in self.layers:
            hidden = layer(hidden)
        return token_loss(self.head(hidden), batch["labels"])


class OneBlock(Regression):
    """One layer, four times."""

    def __init__(self):
        super().__init__()
        self.model.layers = nn.ModuleList([self.model.layers[0]] * 4)


class SharedWeight(Regression):
    """The first and the last layer share a weight."""

    def __init__(self):
        super().__init__()
        self.model.layers[3].weight = self.model.layers[0].weight


class AuxiliaryBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        x = self.linear(x)
        return x, x.square().mean()


class Auxiliary(Regression):
    """Every block returns a part of the loss."""

    def __init__(self):
        super().__init__(nn.ModuleList(AuxiliaryBlock() for _ in range(4)))

    def training_step(self, batch, batch_idx):
        x, total = batch["x"], []
        for block in self.model:
            x, part = block(x)
            total.append(part)
        return nn.functional.mse_loss(x, batch["y"]) + torch.stack(total).sum()


class RunningAuxiliary(Auxiliary):
    """The same, added up on the way."""

    def training_step(self, batch, batch_idx):
        x, total = batch["x"], 0
        for block in self.model:
            x, part = block(x)
            total = total + part
        return nn.functional.mse_loss(x, batch["y"]) + total


class Reentrant(Regression):
    """Recomputes layers in the way that hides their gradients from what unwinds a stage."""

    def training_step(self, batch, batch_idx):
        x = batch["x"].requires_grad_()
        for layer in self.model.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return nn.functional.mse_loss(x, batch["y"])


@pytest.mark.parametrize(
    ("module", "batches", "kind", "words"),
    [
        (lambda: mlp(cls=TwoCalls), vector_batches(1), "StepError", "called again in one step"),
        (lambda: mlp(cls=NoLoss), vector_batches(1), "StepError", "training_step returned None"),
        (lambda: mlp(cls=WrongLoss), vector_batches(1), "StepError", "Return a scalar"),
        (lambda: seeded(HeadFirst), token_batches(1), "ModelError", "last_stage_modules=('head',)"),
        (lambda: seeded(Auxiliary), vector_batches(1), "StepError", "beside its hidden state"),
    ],
)
def test_the_rank_of_the_loss_says_what_the_step_does_wrong(module, batches, kind, words):
    with pytest.raises(RanksError) as error:
        run_ranks(2, lambda: fit(Run(module=module, batches=batches), PP2), init=False)
    failure = error.value.failures[0]  # the last stage is on rank 0
    assert failure.type_name == kind
    assert words in failure.message


class SecondOrder(Regression):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


def test_reentrant_recomputation_is_refused_where_a_stage_ends():
    with pytest.raises(RanksError) as error:
        run_ranks(
            2, lambda: fit(Run(module=lambda: mlp(cls=Reentrant), batches=vector_batches(1)), PP2), init=False
        )
    failures = error.value.failures.values()
    assert any("use_reentrant=False" in failure.message for failure in failures)


REFUSED = {
    "LBFGS": (lambda: mlp(cls=SecondOrder), {"dp_shard": 2}, SupportError, ("LBFGS",)),
    "manual optimization, pp": (lambda: mlp(cls=Manual), PP2, SupportError, ("Manual optimization", "pp=2")),
    "manual optimization, tp": (
        lambda: mlp(cls=Manual),
        {"tp": 2},
        SupportError,
        ("Manual optimization", "tp=2"),
    ),
    "one layer": (lambda: mlp(depth=1), PP2, PlanError, ("pp=2", "num_layers=1")),
    "two layers, four stages": (
        lambda: mlp(depth=2),
        INTERLEAVED,
        PlanError,
        ("4 pipeline stages", "num_layers=2"),
    ),
    "three layers, four stages": (
        lambda: mlp(depth=3),
        INTERLEAVED,
        PlanError,
        ("4 pipeline stages", "num_layers=3"),
    ),
    "one layer four times": (lambda: seeded(OneBlock), PP2, ModelError, ("same module",)),
    "one layer four times, tp": (lambda: seeded(OneBlock), {"tp": 2}, ModelError, ("same module",)),
    "stages share a weight": (
        lambda: seeded(SharedWeight),
        PP2,
        ModelError,
        ("'weight' of block 3", "shared"),
    ),
    "no call of the model": (lambda: mlp(cls=NoCall), PP2, StepError, ("exactly once",)),
    "a layer left out": (lambda: mlp(cls=Skips), PP2, StepError, ("in order",)),
    "sum of what blocks return": (
        lambda: seeded(RunningAuxiliary),
        PP2,
        StepError,
        ("beside its hidden state",),
    ),
}


def test_every_rank_says_what_it_cannot_do():
    def body():
        return {
            name: failure_of(make(), vector_batches(1), layout)
            for name, (make, layout, *_) in REFUSED.items()
        }

    found = run_ranks(2, body, init=False, timeout_s=120)
    for name, (_, _, kind, words) in REFUSED.items():
        for each in (by_name[name] for by_name in found):
            assert each is not None, f"{name}: it trained"
            assert issubclass(each[0], kind), (name, each)
            for word in words:
                assert word in each[1], (name, each)
