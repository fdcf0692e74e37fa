# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks were told to do the same: options and callbacks of the Trainer that decide when ranks meet."""

from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)

from lightning_3d.errors import SupportError
from lightning_3d.parallel.agreement import by_value, say_ranks

if TYPE_CHECKING:
    import lightning.pytorch as pl

_OPTIONS = (
    "precision",
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "log_every_n_steps",
    "reload_dataloaders_every_n_epochs",
)
_MEETING = (
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
"""Callbacks in which ranks meet, beside those of this package; what others do on one rank is their own business."""


def check_same_run(trainer: "pl.Trainer") -> None:
    """Checks that the Trainers of all ranks have the same options and callbacks; collective over the world.

    Raises:
        SupportError: on every rank, with the first difference.
    """
    told = by_value(_told(trainer))
    if len(told) == 1:
        return
    first, other = list(told)[:2]
    here, there = next((a, b) for a, b in zip(first, other, strict=True) if a != b)
    raise SupportError(
        f"Ranks have different Trainers: {here} on {say_ranks(told[first])}, but {there} on {say_ranks(told[other])}."
        " They would wait for each other. Give the Trainer of every rank the same options and the same callbacks; a"
        " ModelCheckpoint writes what all ranks hold."
    )


def _told(trainer: "pl.Trainer") -> tuple[str, ...]:
    callbacks = [callback.state_key for callback in trainer.callbacks if _meets(callback)]  # type: ignore[attr-defined]
    options = [f"{name}={getattr(trainer, name, None)}" for name in _OPTIONS]
    return (*options, f"callbacks=[{', '.join(callbacks)}]")


def _meets(callback: Callback) -> bool:
    own = any(kind.__module__.partition(".")[0] == "lightning_3d" for kind in type(callback).__mro__)
    return own or isinstance(callback, _MEETING)
