# SPDX-License-Identifier: Apache-2.0
"""`self.log`, metrics, loggers, progress bars."""

import csv
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

from tests.trainer_features.matrix import Module, Place, numbers


class Logs(Module):
    """Logs in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(32, average="micro")
        self.seen = CatMetric()
        self.several = MetricCollection({"a": MulticlassAccuracy(32), "p": MulticlassPrecision(32)})
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        number = batch["number"].float()
        self.log("early", number.sum(), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        logits = self.model(batch["ids"])
        loss = self.loss_from(logits, batch)
        self.log("step_and_epoch", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        self.log("epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("largest", number.max(), reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)
        self.log("smallest", number.min(), reduce_fx="min", on_step=False, on_epoch=True, sync_dist=True)
        self.log("total", number.sum(), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        self.log("weighted", loss, batch_size=len(number), on_epoch=True, on_step=False, sync_dist=True)
        self.log("number", 3, sync_dist=True)
        self.log("not logged", loss, logger=False, sync_dist=True)
        self.log_dict({"in a dict": loss, "twice": 2 * loss}, on_epoch=True, on_step=False, sync_dist=True)
        self.mean(loss)
        self.log("object", self.mean, on_step=False, on_epoch=True)
        return {"loss": loss, "numbers": batch["number"]}

    def loss_from(self, logits, batch):
        from tests.engine.runs import token_loss

        return token_loss(logits, batch["labels"])

    def on_train_epoch_end(self):
        self.log("in a hook", float(self.trainer.current_epoch) + 5)

    def validation_step(self, batch, batch_idx):
        self.log("early val", batch["number"].float().sum(), reduce_fx="sum", sync_dist=True)
        logits = self.model(batch["ids"])
        predicted, labels = logits.argmax(-1).flatten(), batch["labels"].flatten()
        self.accuracy.update(predicted, labels)
        self.several.update(predicted, labels)
        self.seen.update(batch["number"].float())
        self.log("accuracy", self.accuracy)
        self.log_dict(self.several)
        self.log("val", self.loss_from(logits, batch), sync_dist=True)

    def on_validation_epoch_end(self):
        self.log("sum of a list state", self.seen.compute().sum())
        self.seen.reset()


class LogsInHooks(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.log("of a callback", outputs["loss"], on_epoch=True, on_step=False, sync_dist=True)
        self.outputs = outputs


class LogsUnevenly(Module):
    """Monitors what differs between replicas, without sync_dist."""

    def validation_step(self, batch, batch_idx):
        value = batch["number"].float().mean() * (1 if self.trainer.current_epoch == 0 else 2)
        self.model(batch["ids"])
        self.log("uneven", value)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "uneven"}}


def monitors(place: Place):
    """Decisions on metrics: the same on all ranks, though each replica has its own value."""
    stop = EarlyStopping("uneven", patience=1)
    keep = ModelCheckpoint(
        place.folder, filename="{epoch}-{uneven:.3f}", monitor="uneven", save_top_k=2, save_last=True
    )
    rates = LearningRateMonitor("epoch")
    trainer = place.trainer(
        max_epochs=5,
        callbacks=[stop, keep, rates],
        enable_checkpointing=True,
        logger=CSVLogger(place.folder, version=0),
    )
    trainer.fit(LogsUnevenly())
    found = {
        "EarlyStopping": [stop.stopped_epoch, float(stop.best_score)],
        "ModelCheckpoint: monitor, save_top_k, save_last": [
            float(keep.best_model_score),
            Path(keep.best_model_path).name,
            sorted(Path(path).name for path in keep.best_k_models),
            sorted(path.name for path in place.folder.glob("*.ckpt")),
        ],
        "ReduceLROnPlateau": trainer.optimizers[0].param_groups[0]["lr"],
        "callback_metrics equal on all ranks": numbers(trainer.callback_metrics),
    }
    if trainer.is_global_zero:
        table = rows(place.folder / "lightning_logs" / "version_0" / "metrics.csv")
        found["LearningRateMonitor"] = [row["lr-SGD"] for row in table if "lr-SGD" in row]
    return found


def rows(path) -> list[dict[str, float | str]]:
    with path.open() as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def logging(place: Place):
    module, hooks = Logs(), LogsInHooks()
    loggers = [CSVLogger(place.folder, version=0), TensorBoardLogger(place.folder, version=1)]
    trainer = place.trainer(
        max_epochs=2, logger=loggers, log_every_n_steps=1, callbacks=[hooks], num_sanity_val_steps=1
    )
    trainer.fit(module)
    metrics = numbers(trainer.callback_metrics)
    of_objects = ("object", "accuracy", "a", "p", "sum of a list state")
    found = {
        "self.log: on_step, on_epoch, reduce_fx, batch_size, sync_dist, log_dict": {
            key: value
            for key, value in metrics.items()
            if key not in (*of_objects, "of a callback", "in a hook")
        },
        "self.log of torchmetrics, MetricCollection, list states": {key: metrics[key] for key in of_objects},
        "self.log in hooks and in callbacks": [metrics["of a callback"], metrics["in a hook"]],
        "outputs in on_train_batch_end": float(trainer.strategy.reduce(hooks.outputs["loss"].detach())),
    }
    if trainer.is_global_zero:
        found["CSVLogger"] = rows(place.folder / "lightning_logs" / "version_0" / "metrics.csv")
        found["TensorBoardLogger"] = any((place.folder / "lightning_logs" / "version_1").glob("events*"))
        found["metrics of the progress bar"] = float(trainer.progress_bar_metrics["step_and_epoch_epoch"])
    return found


def progress_bars(place: Place):
    found = {}
    for bar in (TQDMProgressBar(), RichProgressBar()):
        trainer = place.trainer(max_epochs=1, callbacks=[bar], enable_progress_bar=True)
        trainer.fit(Module())
        found[type(bar).__name__] = float(trainer.callback_metrics["loss"])
    return found
