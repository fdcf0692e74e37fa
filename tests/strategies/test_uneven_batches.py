# SPDX-License-Identifier: Apache-2.0
"""Replicas whose loaders have other numbers of batches than they say, or do not say any, end an epoch together."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, IterableDataset

from tests.engine.runs import DP2, Regression, be_quiet, make_trainer, mlp, strategy_of
from tests.harness import run_ranks


def sample(number):
    return {"x": torch.full((16,), float(number)), "y": torch.ones(16)}


class Shard(IterableDataset):
    """As many samples as it says, or fewer."""

    def __init__(self, count, said):
        self.count, self.said = count, said

    def __len__(self):
        return self.said

    def __iter__(self):
        return iter([sample(number) for number in range(self.count)])


class Buckets:
    """A batch sampler whose number of batches is another one in each epoch, and on each replica."""

    def __init__(self, counts):
        self.counts = counts

    def __len__(self):
        return self.counts[0]

    def __iter__(self):
        count, *self.counts = self.counts
        return iter([[number] for number in range(count)])


class Plain:
    """A loader that is no DataLoader and has no length."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        for number in range(self.count):
            yield {key: value[None] for key, value in sample(number).items()}


class Counting(Regression):
    """Counts the batches of its own; logs a sum over all."""

    def __init__(self, model=None, optimizer="sgd"):
        super().__init__(model, optimizer)
        self.trained, self.seen = 0, []

    def on_train_batch_end(self, *args):
        self.trained += 1

    def validation_step(self, batch, batch_idx):
        self.model(batch["x"])
        self.seen += batch["x"][:, 0].tolist()
        self.log("sum", batch["x"][:, 0].sum(), reduce_fx="sum", sync_dist=True)
        self.log("monitored", batch["x"][:, 0].sum(), reduce_fx="sum")


def shard(replica, sizes=(8, 6)):
    return DataLoader(Shard(sizes[replica], said=8), batch_size=2)


def buckets(replica):
    counts = [[3, 3], [3, 5]][replica]
    return DataLoader([sample(number) for number in range(5)], batch_sampler=Buckets(counts))


def plain(replica):
    return Plain([4, 3][replica])


def generator(replica):
    return iter(Plain([4, 3][replica]))


def replica_of(trainer):
    return trainer.distributed_sampler_kwargs["rank"]


@pytest.mark.parametrize(
    ("loader", "epochs", "expected"), [(shard, 1, 3), (buckets, 2, 6), (plain, 1, 3), (generator, 1, 3)]
)
def test_training_ends_with_the_shortest(loader, epochs, expected):
    def body():
        be_quiet()
        trainer = make_trainer(strategy_of(DP2), 2, max_epochs=epochs)
        module = mlp(cls=Counting)
        module.train_dataloader = lambda: loader(replica_of(trainer))
        trainer.fit(module)
        return module.trained

    assert run_ranks(2, body, init=False, timeout_s=30) == [expected] * 2


@pytest.mark.parametrize(
    ("loader", "limit", "expected"),
    [
        (shard, 1.0, sum(range(8)) + sum(range(6))),
        (plain, 1.0, 6 + 3),
        (plain, 2, 1 + 1),
        (lambda replica: Plain([4, 1][replica]), 3, 3 + 0),
        (lambda replica: Plain([2, 1][replica]), 1.0, 1 + 0),
        (lambda replica: shard(replica, sizes=(4, 2)), 1.0, 6 + 1),
    ],
    ids=[
        "shard",
        "plain",
        "plain, as many as the limit",
        "plain, one beyond the limit",
        "plain, one batch",
        "shard, one batch",
    ],
)
def test_evaluation_reads_everything(loader, limit, expected):
    def body():
        be_quiet()
        stop = EarlyStopping("monitored")
        trainer = make_trainer(strategy_of(DP2), 2, limit_val_batches=limit, callbacks=[stop])
        module = mlp(cls=Counting)
        module.val_dataloader = lambda: loader(replica_of(trainer))
        found = trainer.validate(module, verbose=False)[0]
        return found["sum"], found["monitored"]

    assert run_ranks(2, body, init=False, timeout_s=30) == [(expected, expected)] * 2


def test_says_that_a_length_is_not_met():
    def body():
        be_quiet()
        trainer = make_trainer(strategy_of(DP2), 2)
        module = mlp(cls=Counting)
        module.train_dataloader = lambda: shard(replica_of(trainer))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module)
        return [str(each.message) for each in caught if "by its length" in str(each.message)]

    (message,) = run_ranks(2, body, init=False, timeout_s=30)[0]
    assert "has 4 batches by its length, but a data-parallel replica had 3" in message


class OtherNames(Regression):
    """Names its arguments as it likes; changes batches by loader before they are moved."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "loader": torch.tensor(dataloader_idx)}

    def validation_step(self, data, i, dataloader_idx=0):
        assert dataloader_idx == int(data["loader"])
        self.log("loss", F.mse_loss(self.model(data["x"]), data["y"]), sync_dist=True)

    def test_step(self, data, i):
        self.log("loss", F.mse_loss(self.model(data["x"]), data["y"]), sync_dist=True)

    def predict_step(self, data, *_):
        return self.model(data["x"])


def test_a_step_that_runs_beside_gets_what_lightning_gives():
    """Replicas have 3 and 2 of 5 samples."""

    def body():
        be_quiet()
        samples = [sample(number) for number in range(5)]
        trainer = make_trainer(strategy_of(DP2), 2, use_distributed_sampler=True)
        module = mlp(cls=OtherNames)
        tested = trainer.test(module, DataLoader(samples), verbose=False)
        validated = trainer.validate(module, [DataLoader(samples) for _ in range(2)], verbose=False)
        trainer.predict(module, DataLoader(samples))
        return [*tested[0].values(), *(value for each in validated for value in each.values())]

    first, second = run_ranks(2, body, init=False, timeout_s=30)
    assert first == second
    assert first == pytest.approx(first[:1] * 3)
