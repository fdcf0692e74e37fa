# SPDX-License-Identifier: Apache-2.0
"""torchmetrics compute what one process computes, wherever hooks ask them, whatever their states are."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric

from tests.engine.runs import (
    DP2,
    PP2,
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


class ListMetric(Metric):
    """Keeps one vector a sample, of a length of its own; nothing reduces them."""

    def __init__(self):
        super().__init__()
        self.add_state("values", default=[], dist_reduce_fx=None)

    def update(self, x):
        self.values += [row[: 1 + int(row[0] > 0)] for row in x.detach()]

    def compute(self):
        return torch.stack([row.sum() for row in self.values]).sum()


class Measured(Regression):
    """Computes a running metric after each batch, and a metric of list states after evaluation."""

    def __init__(self, model=None, optimizer="sgd"):
        super().__init__(model, optimizer)
        self.running, self.samples, self.seen = MeanMetric(), ListMetric(), []

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.model(batch["x"]), batch["y"])
        self.running.update(loss.detach())
        return loss

    def on_train_batch_end(self, *args):
        self.seen.append(float(self.running.compute()))

    def validation_step(self, batch, batch_idx):
        self.samples.update(self.model(batch["x"]))
        self.log("samples", self.samples)

    test_step = validation_step


def train(strategy, devices=1):
    be_quiet()
    module, trainer = mlp(cls=Measured), make_trainer(strategy, devices, num_sanity_val_steps=0)
    trainer.fit(module, Batches(vector_batches()))
    copied = copy.deepcopy(module.samples)
    assert copied._sync_dist.__self__ is copied
    return [*module.seen, float(trainer.callback_metrics["samples"])]


@pytest.fixture(scope="module")
def alone():
    return train("auto")


@pytest.mark.parametrize("layout", [DP2, PP2, PP2_DP2], ids=name_of)
def test_hooks_compute_what_one_process_computes(layout, alone):
    """Without a reset, after every batch; and from lists of which only the last stage has elements."""
    found = run_ranks(
        world_of(layout), lambda: train(strategy_of(layout), world_of(layout)), init=False, timeout_s=30
    )
    for mine in found:
        assert mine == pytest.approx(alone, rel=1e-4)


def test_lists_of_other_lengths():
    """Replicas have 3 and 2 of 5 samples."""

    def test(strategy, devices=1):
        be_quiet()
        samples = [{key: value[0] for key, value in batch.items()} for batch in vector_batches(5)]
        trainer = make_trainer(strategy, devices, use_distributed_sampler=True)
        return trainer.test(mlp(cls=Measured), DataLoader(samples), verbose=False)[0]["samples"]

    found = run_ranks(2, lambda: test(strategy_of(DP2), 2), init=False, timeout_s=30)
    assert found == pytest.approx([test("auto")] * 2, rel=1e-5)


class OnStep(Regression):
    """A metric that gathers in each step."""

    def __init__(self, model=None, optimizer="sgd"):
        super().__init__(model, optimizer)
        self.mean = MeanMetric(dist_sync_on_step=True)

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.model(batch["x"]), batch["y"])
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


def test_a_value_of_a_step_stays_that_of_the_replica_under_pp():
    def fit(strategy, devices=1):
        be_quiet()
        trainer = make_trainer(strategy, devices)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(mlp(cls=OnStep), Batches(vector_batches()))
        said = [str(each.message) for each in caught if "dist_sync_on_step" in str(each.message)]
        return float(trainer.callback_metrics["mean"]), said

    found = run_ranks(4, lambda: fit(strategy_of(PP2_DP2), 4), init=False, timeout_s=30)
    assert [value for value, _ in found] == pytest.approx([fit("auto")[0]] * 4, rel=1e-5)
    (message,) = found[0][1]
    assert message.startswith("mean: dist_sync_on_step=True is ignored under pp=2.")
