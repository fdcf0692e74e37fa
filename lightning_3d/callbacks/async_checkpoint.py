# SPDX-License-Identifier: Apache-2.0
"""`AsyncCheckpoint`: a ModelCheckpoint whose files are written while training goes on."""

import time
import weakref
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightning_3d.checkpoint import AsyncCheckpointer, SaveOptions
from lightning_3d.errors import SupportError


class AsyncCheckpoint(ModelCheckpoint):
    """Saves like `ModelCheckpoint`, in the background; training waits for a copy in memory only.

    An older checkpoint is removed, and a link set, when the newer one is whole. A save waits for the one before it,
    so that there is one copy of the state at most. What is being written is finished when training ends, by an
    exception too.

    Args:
        show_progress: Whether the first rank prints one line for each checkpoint.
        **options: Of `ModelCheckpoint`.

    Raises:
        SupportError: The Trainer's strategy is not one of this package (when training starts).
    """

    def __init__(self, *, show_progress: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.show_progress = show_progress
        self._stall_s = 0.0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not hasattr(trainer.strategy, "checkpoint_writer"):
            raise SupportError(
                f"AsyncCheckpoint writes shards, which {type(trainer.strategy).__name__} does not. Use "
                "Trainer(strategy='3d') or another strategy of lightning_3d, or Lightning's ModelCheckpoint with "
                "AsyncCheckpointIO."
            )
        super().setup(trainer, pl_module, stage)

    @property
    def state_key(self) -> str:
        """That of a ModelCheckpoint, so that a run may go on with either."""
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    def status(self, trainer: Trainer) -> str:
        """What is being written and how much of it is there, in one line; empty if nothing is."""
        writer = self._writer(trainer)
        path = None if writer is None else writer.in_flight
        if writer is None or path is None:
            return ""
        return f"saving {path.name}: {writer.progress():.0%}"

    @override
    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        start = time.monotonic()
        trainer.save_checkpoint(
            filepath, self.save_weights_only, storage_options=SaveOptions(background=True)
        )
        self._stall_s = time.monotonic() - start
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(weakref.proxy(self))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._show(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._show(trainer)

    def _show(self, trainer: Trainer) -> None:
        writer = self._writer(trainer)
        if writer is None or not self.show_progress or not trainer.is_global_zero:
            return
        while writer.reports:
            report = writer.reports.pop(0)
            megabytes = report.num_bytes / 1e6
            print(
                f"checkpoint {report.path.name}: {megabytes:,.0f} MB a rank in {report.seconds:.1f} s, training waited "
                f"{self._stall_s:.2f} s",
                flush=True,
            )

    @staticmethod
    def _writer(trainer: Trainer) -> AsyncCheckpointer | None:
        writer: AsyncCheckpointer | None = getattr(trainer.strategy, "checkpoint_writer", None)
        return writer
