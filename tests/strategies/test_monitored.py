# SPDX-License-Identifier: Apache-2.0
"""Replicas decide on the same monitored values, whichever of them logged one; steps beside others reduce alike."""

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.engine.runs import (
    DP2,
    PP2_DP2,
    Batches,
    Regression,
    be_quiet,
    make_trainer,
    mlp,
    name_of,
    strategy_of,
    vector_batches,
    world_of,
)
from tests.harness import run_ranks


def samples():
    return [{key: value[0] for key, value in batch.items()} for batch in vector_batches(5)]


class Sometimes(Regression):
    """Only the second replica has labels, and only in some batches."""

    options: ClassVar = {}

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.model(batch["x"]), batch["y"])
        if self.trainer.strategy.mesh.dp_rank == 1 and batch_idx > 0:
            self.log("accuracy", torch.tensor(float(batch_idx)), **self.options)
        return loss


@pytest.mark.parametrize("layout", [DP2, PP2_DP2], ids=name_of)
@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 2.0), ({"on_epoch": True, "on_step": False}, 1.5), ({"on_epoch": True, "reduce_fx": "max"}, 2.0)],
    ids=["on_step", "on_epoch", "max"],
)
def test_a_value_that_one_replica_logs(layout, options, expected):
    def body():
        be_quiet()
        Sometimes.options = options
        stop = EarlyStopping("accuracy", check_on_train_epoch_end=True)
        trainer = make_trainer(strategy_of(layout), world_of(layout), callbacks=[stop])
        trainer.fit(mlp(cls=Sometimes), Batches(vector_batches(3)))
        return float(trainer.callback_metrics["accuracy"]), float(stop.best_score)

    found = run_ranks(world_of(layout), body, init=False, timeout_s=30)
    assert found == [(expected, expected)] * world_of(layout)


class Validated(Regression):
    """Logs one value and a metric with options."""

    options: ClassVar = {}

    def __init__(self, model=None, optimizer="sgd"):
        super().__init__(model, optimizer)
        self.mean = MeanMetric()

    def validation_step(self, batch, batch_idx):
        loss = F.mse_loss(self.model(batch["x"]), batch["y"])
        self.mean(loss)
        self.log("val_loss", loss, on_epoch=True, **self.options)
        self.log("mean", self.mean, on_epoch=True, **{**self.options, "reduce_fx": "mean"})


def validate(strategy, devices, folder, options, monitor, precision):
    be_quiet()
    Validated.options = options
    trainer = make_trainer(
        strategy,
        devices,
        use_distributed_sampler=True,
        precision=precision,
        callbacks=[ModelCheckpoint(folder, monitor=monitor)] if monitor else [],
        enable_checkpointing=monitor is not None,
    )
    (found,) = trainer.validate(mlp(cls=Validated), DataLoader(samples()), verbose=False)
    return {name: value for name, value in found.items() if not name.endswith("_step")}


@pytest.mark.parametrize("layout", [DP2, PP2_DP2], ids=name_of)
@pytest.mark.parametrize(
    ("options", "monitor", "precision"),
    [
        ({"on_step": True}, "val_loss", "32-true"),
        ({}, "val_loss", "32-true"),
        ({"on_step": True, "sync_dist": True, "reduce_fx": "max"}, None, "32-true"),
        ({"on_step": True, "sync_dist": True, "reduce_fx": "max"}, "val_loss_epoch", "32-true"),
        ({"on_step": True, "sync_dist": True}, None, "64-true"),
        ({"on_step": True, "sync_dist": True}, "val_loss", "64-true"),
        ({"on_step": True, "sync_dist": True}, None, "bf16-true"),
    ],
    ids=str,
)
def test_a_step_beside_others_reduces_what_they_do(layout, options, monitor, precision, tmp_path):
    """Replicas have 3 and 2 of 5 samples; each counts once."""
    arguments = (tmp_path, options, monitor, precision)
    found = run_ranks(
        world_of(layout),
        lambda: validate(strategy_of(layout), world_of(layout), *arguments),
        init=False,
        timeout_s=30,
    )
    expected = validate("auto", 1, *arguments)
    for mine in found:
        assert mine == pytest.approx(expected, rel=1e-2 if precision == "bf16-true" else 1e-5)
    assert all(mine == found[0] for mine in found)
