# SPDX-License-Identifier: Apache-2.0
"""Which samples each rank reads, and uneven data."""

import random

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from tests.trainer_features.matrix import Module, Place, Samples, everybody, numbers, parameters_of


class Reads(Module):
    """Remembers the numbers of the samples of every batch, and a random number of the worker that made it."""

    def __init__(self, loader) -> None:
        super().__init__()
        self.make_loader = loader
        self.read: list[list[int]] = []

    def train_dataloader(self):
        return self.make_loader(self)


class Watch(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.read.append(sorted(batch["number"].tolist()) + batch.get("random", torch.zeros(0)).tolist())


class Stream(IterableDataset):
    """Every rank sees all samples and takes those of its replica, as the docs say."""

    def __init__(self, where, counts=None) -> None:
        self.where, self.counts = where, counts

    def __iter__(self):
        rank, replicas = self.where["rank"], self.where["num_replicas"]
        samples = Samples()
        mine = range(rank, len(samples), replicas)
        return iter([samples[index] for index in mine][: self.counts[rank] if self.counts else None])


class Augmented(Samples):
    """Draws random numbers in the process that reads."""

    def __getitem__(self, index):
        noise = torch.rand(1) + random.random()
        return {**super().__getitem__(index), "random": noise[0]}


def where_of(module):
    return module.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}


def read_by(place: Place, loader, **options) -> tuple[Reads, list[list[list[int]]], int]:
    """Trains an epoch; the batches that every rank read, and this rank's replica."""
    module = Reads(loader)
    trainer = place.trainer(max_epochs=1, callbacks=[Watch()], **options)
    trainer.fit(module)
    return module, everybody(module.read), everybody(where_of(module)["rank"])


def verdict(read, replicas, *, disjoint=True) -> dict[str, bool]:
    """Whether ranks of a replica read the same, and replicas different samples that together are all."""
    by_replica: dict[int, list] = {}
    for mine, replica in zip(read, replicas, strict=True):
        by_replica.setdefault(replica, []).append(mine)
    same = all(each == group[0] for group in by_replica.values() for each in group)
    seen = [number for group in by_replica.values() for batch in group[0] for number in batch]
    return {
        "same in a replica": same,
        "all samples": {int(number) for number in seen} >= set(range(24)) if disjoint else True,
        "disjoint": len(seen) == len(set(seen)) if disjoint else True,
    }


def reading(place: Place):
    size = 8 // place.replicas

    def custom(module):
        class Own(BatchSampler):
            pass

        sampler = SequentialSampler(Samples())
        return DataLoader(Samples(), batch_sampler=Own(sampler, size, False))

    loaders = {
        "DataLoader(shuffle=True)": (lambda m: DataLoader(Samples(), batch_size=size, shuffle=True), {}),
        "custom batch sampler": (custom, {}),
        "IterableDataset": (lambda m: DataLoader(Stream(where_of(m)), batch_size=size), {}),
    }
    found = {}
    for name, (loader, options) in loaders.items():
        _, read, replicas = read_by(place, loader, **options)
        found[f"{name}: ids read"] = verdict(read, replicas)
    _, read, replicas = read_by(
        place, lambda m: DataLoader(Samples(), batch_size=8, shuffle=True), use_distributed_sampler=False
    )
    found["use_distributed_sampler=False: ids read"] = verdict(read, replicas, disjoint=False)
    torch.manual_seed(100 + (dist.get_rank() if place.is_parallel else 0))  # ranks that start differently
    random.seed(dist.get_rank() if place.is_parallel else 0)
    _, read, replicas = read_by(place, lambda m: DataLoader(Augmented(), batch_size=size))
    found["random augmentation, equal in a replica"] = verdict(read, replicas, disjoint=False)
    torch.manual_seed(1)
    return found


def workers(place: Place):
    pl.seed_everything(3, workers=True, verbose=False)
    size = 8 // place.replicas
    options = {"num_workers": 2, "multiprocessing_context": "fork"}
    _, read, replicas = read_by(
        place, lambda m: DataLoader(Augmented(), batch_size=size, shuffle=True, **options)
    )
    return {"seed_everything(workers=True), num_workers=2": verdict(read, replicas, disjoint=False)}


class Exact(Module):
    def __init__(self, count) -> None:
        super().__init__()
        self.count = count

    def test_dataloader(self):
        return DataLoader(Samples(self.count, seed=3), batch_size=1)

    predict_dataloader = test_dataloader

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss_of(batch), sync_dist=True, batch_size=1)
        self.log("accuracy", (batch["number"] < 4).float().mean(), sync_dist=True, batch_size=1)
        self.log("sum", batch["number"].float().sum(), reduce_fx="sum", sync_dist=True)


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.numbers, self.indices, self.of_epoch = [], [], None

    def write_on_batch_end(
        self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx
    ):
        self.numbers += prediction["number"].tolist()
        self.indices += batch_indices

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.of_epoch = [number for each in predictions for number in each["number"].tolist()]


def predicting(place: Place):
    writer = Writer()
    trainer = place.trainer(callbacks=[writer])
    predicted = trainer.predict(Exact(7))
    written = everybody(writer.numbers)
    found = {
        "predict 7 samples, batch size 1": sorted(number for each in written for number in each),
        "BasePredictionWriter": [writer.numbers == writer.indices, writer.of_epoch in (None, writer.numbers)],
    }
    tested = place.trainer().test(Exact(7), verbose=False)[0]
    found["test 7 samples, batch size 1: exact mean and sum"] = numbers(tested)
    if trainer.is_global_zero:
        found["predictions on rank 0"] = [set(each) == {"number", "logits"} for each in predicted[:3]]
    return found


class Fewer(Module):
    """Replica r has fewer batches the higher r is; nothing tells the Trainer how many."""

    def __init__(self, sized) -> None:
        super().__init__()
        self.sized = sized

    def train_dataloader(self):
        where = where_of(self)
        counts = [8, 4]  # samples of the replicas
        stream = Stream({"rank": 0, "num_replicas": 1}, [counts[where["rank"]]])
        return DataLoader(list(stream) if self.sized else stream, batch_size=4)

    val_dataloader = train_dataloader


def uneven(place: Place):
    found = {}
    for sized in (True, False):
        module = Fewer(sized)
        trainer = place.trainer(max_epochs=2, use_distributed_sampler=False)
        trainer.fit(module)
        expected = 2 if place.replicas > 1 else 4
        name = "of known" if sized else "of unknown"
        found[f"uneven number of batches over replicas, {name} length"] = trainer.global_step == expected
    return found


def several(place: Place):
    """Several loaders in training and in evaluation."""

    class Both(Module):
        def train_dataloader(self):
            return CombinedLoader({"a": self.loader(), "b": self.loader(16, seed=5)}, "max_size_cycle")

        def val_dataloader(self):
            return [self.loader(16, seed=2), self.loader(8, seed=6)]

        predict_dataloader = val_dataloader

        def training_step(self, batch, batch_idx):
            both = {key: torch.cat([batch["a"][key], batch["b"][key]]) for key in batch["a"]}
            loss = self.loss_of(both)
            self.log("loss", loss, sync_dist=True, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("val", self.loss_of(batch), sync_dist=True)

        def predict_step(self, batch, batch_idx, dataloader_idx=0):
            return super().predict_step(batch, batch_idx)

    module = Both()
    trainer = place.trainer(max_epochs=1)
    trainer.fit(module)
    found = {
        "CombinedLoader in fit": parameters_of(module),
        "several validation loaders": {
            k: float(v) for k, v in trainer.callback_metrics.items() if "val" in k
        },
    }
    predicted = trainer.predict(module)
    if trainer.is_global_zero:
        found["several predict loaders"] = [len(each) for each in predicted]
    return found
