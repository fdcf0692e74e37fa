# SPDX-License-Identifier: Apache-2.0
"""`StragglerMonitor`: names a rank that falls behind while training runs."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.callbacks.context import log_scalars, topology_of
from lightning_3d.profiling.step_timer import StepTimer
from lightning_3d.profiling.stragglers import Straggler, StragglerFinder


class StragglerMonitor(Callback):
    """Warns when a rank needs longer for its steps than the ranks that do the same work.

    What is compared is the time that a rank does not wait for others, loading of data included: ranks that
    communicate end every step together, however slow one of them is. Ranks of one pipeline stage are peers; a rank
    without peers is compared with its own best window. Works with every strategy; costs one gather of two numbers every
    `every_n_steps`.

    Args:
        every_n_steps: Optimizer steps of a window, at whose end ranks are compared.
        factor: A rank is named when it takes more than this many times the median of its peers.
        least_excess_ms: Differences below this many milliseconds a step are not worth a word.

    Attributes:
        stragglers: Ranks that fell behind in the last window, the same on every rank.
    """

    def __init__(
        self, every_n_steps: int = 20, factor: float = 1.3, least_excess_ms: float = 2.0
    ) -> None:
        self.every_n_steps, self.factor, self.least_excess_ms = every_n_steps, factor, least_excess_ms
        self.stragglers: list[Straggler] = []
        self._timer: StepTimer | None = None
        self._finder: StragglerFinder | None = None
        self._window_step = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        topology = topology_of(trainer)
        self._finder = StragglerFinder(
            topology, factor=self.factor, least_excess_s=self.least_excess_ms / 1000
        )
        self._timer = StepTimer(topology.device)
        self._timer.start(trainer.strategy.model)
        self._window_step = trainer.global_step

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._timer is not None:
            self._timer.begin_step()

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._timer is not None:
            self._timer.end_backward()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._timer is None or self._finder is None:
            return
        self._timer.end_step()
        if trainer.global_step - self._window_step < self.every_n_steps:
            return
        self._window_step = trainer.global_step
        known = {straggler.rank for straggler in self.stragglers}
        self.stragglers = self._finder.compare(self._timer.take())
        log_scalars(trainer, {"stragglers": float(len(self.stragglers))})
        for straggler in self.stragglers:
            if straggler.rank not in known:
                rank_zero_warn(f"{straggler} (steps up to {trainer.global_step}).")
        if known and not self.stragglers:
            rank_zero_info(f"No rank falls behind any more (steps up to {trainer.global_step}).")

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_out()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_out()

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._leave_out()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _leave_out(self) -> None:
        if self._timer is not None:
            self._timer.leave_out()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
