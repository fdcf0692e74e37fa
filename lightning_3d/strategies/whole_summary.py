# SPDX-License-Identifier: Apache-2.0
"""The model summary is that of the whole model: it is made before the model is cut and sharded, and shown when due."""

from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import ModelSummary

from lightning_3d.compat_lightning import freeze_summary

if TYPE_CHECKING:
    import lightning.pytorch as pl


def summarize_whole(trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
    """Takes the summaries that the Trainer's callbacks will print, while every parameter is here."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelSummary):
            freeze_summary(callback, trainer, module)
