# SPDX-License-Identifier: Apache-2.0
"""Validation, test and prediction give what one process gives, on the rank that loggers and callbacks live on."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.engine.runs import (
    DP2,
    PP2,
    PP2_DP2,
    PP2_INTERLEAVED,
    TP2,
    Module,
    be_quiet,
    make_trainer,
    name_of,
    strategy_of,
    token_loss,
    world_of,
)
from tests.harness import run_ranks
from tests.models import decoder, tokens

LAYOUTS = [DP2, TP2, PP2, PP2_INTERLEAVED, PP2_DP2]


class Evaluated(Module):
    """Logs a loss, a torchmetrics metric by object and one by value."""

    def __init__(self) -> None:
        super().__init__(decoder())
        self.accuracy = MulticlassAccuracy(64, average="micro")
        self.mean_logit = MeanMetric()

    def evaluate(self, batch, name):
        ids, labels = batch
        logits = self.model(ids)
        self.accuracy.update(logits.argmax(-1).flatten(), labels.flatten())
        self.mean_logit.update(logits.abs().mean())
        self.log(f"{name}_loss", token_loss(logits, labels), sync_dist=True)
        self.log(f"{name}_accuracy", self.accuracy, on_epoch=True)
        self.log(f"{name}_first", labels[0].float().mean(), reduce_fx="max", sync_dist=True)

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch, "val")

    def on_validation_epoch_end(self):
        self.log("val_logit", self.mean_logit.compute())
        self.mean_logit.reset()

    def test_step(self, batch, batch_idx):
        self.evaluate(batch, "test")

    def predict_step(self, batch, batch_idx):
        return self.model(batch[0]).softmax(-1)


def loader(trainer):
    ids, labels = tokens(batch=16, length=8, seed=3)
    samples = list(zip(ids, labels, strict=True))
    where = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
    sampler = DistributedSampler(samples, shuffle=False, **where)
    return DataLoader(samples, batch_size=8 // where["num_replicas"], sampler=sampler)


def evaluate(strategy, devices):
    be_quiet()
    trainer = make_trainer(strategy, devices)
    module = Evaluated()
    module.val_dataloader = module.test_dataloader = module.predict_dataloader = lambda: loader(trainer)
    validated = trainer.validate(module, verbose=False)[0]
    tested = trainer.test(module, verbose=False)[0]
    predicted = trainer.predict(module)
    parts = None if predicted is None or predicted[0] is None else torch.cat(predicted)
    return validated, tested, parts


@pytest.fixture(scope="module")
def alone():
    return evaluate("auto", 1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_same_as_one_process(layout, alone):
    validated, tested, predicted = alone

    def body():
        mine = evaluate(strategy_of(layout), world_of(layout))
        dist.barrier()
        return mine

    results = run_ranks(world_of(layout), body, init=False, timeout_s=120)
    for rank, (val, test, _) in enumerate(results):
        assert val == pytest.approx(validated, rel=1e-5), f"rank {rank}"
        assert test == pytest.approx(tested, rel=1e-5), f"rank {rank}"
    parts = [part for _, _, part in results if part is not None]
    replicas = layout.get("dp_shard", 1)
    assert results[0][2] is not None, "predictions must be where writers and loggers are: on rank 0"
    unique = parts[:: max(1, len(parts) // replicas)]
    joined = torch.stack(unique, 1).flatten(0, 1) if replicas > 1 else unique[0]
    assert torch.allclose(joined, predicted, rtol=1e-4, atol=1e-6)


def test_evaluation_between_training_steps_leaves_no_stale_weights():
    """A gathered copy that survives an optimizer step would be seen by the next forward."""

    class Watched(Module):
        def validation_step(self, batch, batch_idx):
            self.log("val", token_loss(self.model(batch[0]), batch[1]), sync_dist=True)

    def train(strategy, devices):
        be_quiet()
        module = Watched(decoder(), "sgd")
        trainer = make_trainer(
            strategy, devices, max_steps=3, limit_val_batches=1, val_check_interval=1, num_sanity_val_steps=1
        )
        ids, labels = tokens(batch=24, length=8)
        samples = [{"ids": i, "labels": t} for i, t in zip(ids, labels, strict=True)]
        batches = DataLoader(samples, batch_size=8)
        vals = DataLoader(list(zip(*tokens(batch=8, length=8, seed=9), strict=True)), batch_size=8)
        trainer.fit(module, batches, vals)
        return float(trainer.callback_metrics["val"])

    expected = train("auto", 1)
    for options in (
        {"dp_shard": 2, "reshard_after_forward": False},
        {"pp": 2, "reshard_after_forward": False},
    ):
        values = run_ranks(2, train, strategy_of(options), 2, init=False, timeout_s=120)
        assert list(values) == pytest.approx([expected] * 2, rel=1e-5), options
