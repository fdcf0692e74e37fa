# SPDX-License-Identifier: Apache-2.0
"""Loops, hooks, profilers, several runs in one process."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import DeviceStatsMonitor, ModelSummary, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler

from tests.trainer_features.matrix import Module, Place, everybody, numbers, parameters_of


def limits(place: Place):
    def run(**options):
        module = Module()
        trainer = place.trainer(**{"max_epochs": 1, **options})
        trainer.fit(module)
        return {
            "steps": trainer.global_step,
            **numbers(trainer.callback_metrics),
            "parameters": parameters_of(module),
        }

    return {
        "limit_train_batches, limit_val_batches": run(limit_train_batches=2, limit_val_batches=1),
        "limits as fractions": run(limit_train_batches=0.7, limit_val_batches=0.5),
        "accumulate_grad_batches": run(accumulate_grad_batches=2),
        "val_check_interval, sanity check": run(val_check_interval=2, num_sanity_val_steps=1),
        "check_val_every_n_epoch": run(max_epochs=2, check_val_every_n_epoch=2),
        "fast_dev_run": run(fast_dev_run=True),
        "max_steps, min_epochs": run(max_steps=4, max_epochs=-1),
        "gradient_clip_val": run(gradient_clip_val=0.05),
    }


def overfit(place: Place):
    module = Module()
    trainer = place.trainer(max_epochs=3, overfit_batches=1)
    trainer.fit(module)
    return {"overfit_batches": [trainer.global_step, float(trainer.callback_metrics["loss"])]}


def max_time(place: Place):
    trainer = place.trainer(max_epochs=-1, max_time={"seconds": 1}, limit_val_batches=0)
    trainer.fit(Module())
    (timer,) = [each for each in trainer.callbacks if isinstance(each, Timer)]
    return {"max_time": timer.time_elapsed() >= 1 and trainer.global_step > 0}


def stages(place: Place):
    """One Trainer for everything, then new ones for the same module and for another."""
    module = Module()
    trainer = place.trainer(max_epochs=1)
    trainer.fit(module)
    found = {"fit, then validate": numbers(trainer.validate(module, verbose=False)[0])}
    found["fit, then test"] = numbers(trainer.test(module, verbose=False)[0])
    predicted = trainer.predict(module)
    mine = {
        int(number): logits
        for each in predicted
        if each is not None
        for number, logits in zip(each["number"], each["logits"], strict=True)
    }
    found["fit, then predict"] = dict(
        sorted((kv for each in everybody(mine) for kv in each.items()), key=lambda kv: kv[0])
    )
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    found["fit again with the same Trainer"] = parameters_of(module)
    again = place.trainer(max_epochs=1)
    again.fit(module)
    found["fit again with a new Trainer"] = parameters_of(module)
    found["test with a new Trainer"] = numbers(place.trainer().test(module, verbose=False)[0])
    other = Module(lr=0.2)
    place.trainer(max_epochs=1).fit(other)
    found["fit another module in the same process"] = parameters_of(other)
    return found


HOOKS = [
    name
    for name in dir(pl.Callback)
    if name.startswith("on_") and "checkpoint" not in name and "exception" not in name
]


def _recorder(calls):
    def hook_of(name):
        return lambda self, *args, **kwargs: calls.append(name)

    return type("Recorder", (pl.Callback,), {name: hook_of(name) for name in HOOKS})()


def hooks(place: Place):
    calls: list[str] = []
    trainer = place.trainer(
        max_epochs=1, callbacks=[_recorder(calls)], limit_train_batches=1, num_sanity_val_steps=1
    )
    module = Module()
    trainer.fit(module)
    trainer.test(module, verbose=False)
    trainer.predict(module)
    # A pipeline clears the gradients before the step that makes them; Lightning does behind it. Nothing lies between.
    return {"order of hooks": calls}


class Summary(ModelSummary):
    """Keeps what would be printed."""

    shown: tuple = ()

    @staticmethod
    def summarize(summary_data, total_parameters, trainable_parameters, *_, **__):
        Summary.shown = (
            [row[1] for row in summary_data if row[0] == "Params"],
            total_parameters,
            trainable_parameters,
        )


class Watched(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.keys = sorted(outputs)
        self.size = (
            len(batch["ids"]) * (trainer.distributed_sampler_kwargs or {"num_replicas": 1})["num_replicas"]
        )


def watching(place: Place):
    class Told(Module):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "extra": batch["ids"].float().mean()}

    watched, profiler = Watched(), SimpleProfiler()
    trainer = place.trainer(
        max_epochs=1,
        callbacks=[watched, DeviceStatsMonitor(cpu_stats=True), Summary(max_depth=2)],
        logger=CSVLogger(place.folder),
        log_every_n_steps=1,
        profiler=profiler,
    )
    module = Told()
    trainer.fit(module)
    found = {
        "whole batch in on_train_batch_end": watched.size,
        "profilers": any("training_step" in action for action in profiler.recorded_durations),
        "DeviceStatsMonitor": float(trainer.callback_metrics["loss"]),
    }
    if trainer.is_global_zero:
        found["model summary of the whole model"] = Summary.shown
        found["other outputs of training_step"] = watched.keys
    return found


class Data(pl.LightningDataModule):
    def __init__(self, module) -> None:
        super().__init__()
        self.module, self.calls = module, []

    def prepare_data(self):
        pass

    def setup(self, stage):
        self.calls.append(f"setup {stage}")

    def teardown(self, stage):
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self):
        return self.module.loader()

    def val_dataloader(self):
        return self.module.loader(16, seed=2)


def data_module(place: Place):
    module = Module()
    data = Data(module)
    trainer = place.trainer(max_epochs=1)
    trainer.fit(module, data)
    return {"LightningDataModule": [data.calls, numbers(trainer.callback_metrics)]}
