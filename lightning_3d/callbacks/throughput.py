# SPDX-License-Identifier: Apache-2.0
"""`ThroughputMonitor`: tokens, operations and lost time per second, while a run goes on."""

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_3d.callbacks.batches import BatchSize, size_of_batch
from lightning_3d.callbacks.context import find_callback, topology_of
from lightning_3d.callbacks.link_check import LinkCheck
from lightning_3d.callbacks.run_facts import layout_of
from lightning_3d.errors import HardwareError
from lightning_3d.estimator.flops import model_flops_per_token, recomputed_flops_per_token
from lightning_3d.hardware import find_gpu
from lightning_3d.models import readable_shape
from lightning_3d.profiling.step_timer import StepTimer
from lightning_3d.profiling.throughput import FlopCount, RankWindow, Speed, speed_of
from lightning_3d.profiling.topology import Topology, gather_rows
from lightning_3d.shape import ModelShape

TERA = 1e12


class ThroughputMonitor(Callback):
    """Logs how fast training is, in the loggers and the progress bar, and prints it if asked to.

    `tokens_per_s`, `samples_per_s`, `tokens_per_s_per_rank` and `step_s`; `tflops_per_rank`, `mfu` and `hfu` from the
    operations that the model's shape needs; `exposed_comm`, the share of a step in which a rank waits for collectives;
    with pipeline stages the measured `bubble`, and `stage<k>_tokens_per_s`, what a stage would reach if it never waited.
    Works with every strategy. A token counts once, however many pipeline and tensor ranks work on it; validation is no
    part of the time.

    The model's operations: a multiply-add is two, forward and backward, head but not embedding, half of the attention's
    square. HFU counts what the backward recomputes as well. Both are over `peak_tflops`: as given, else the GPU's dense
    16-bit datasheet rate, else what a `LinkCheck` measured; without any of them they are left out.

    Args:
        every_n_steps: Optimizer steps of a window; the Trainer's `log_every_n_steps` if None.
        print_lines: Whether rank 0 prints a line for each window, with the losses, and one after each validation.
        log_speed: Whether the numbers go to the loggers and the progress bar.
        peak_tflops: Of one rank, in units of 10^12 operations a second.
        flops_per_token: Operations of a forward and a backward, for models whose shape cannot be read.
        causal: Whether attention sees the past only.

    Attributes:
        speed: Of the last window, the same on every rank; None before.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        print_lines: bool = False,
        log_speed: bool = True,
        peak_tflops: float | None = None,
        flops_per_token: float | None = None,
        causal: bool = True,
    ) -> None:
        self.every_n_steps, self.print_lines, self.log_speed = every_n_steps, print_lines, log_speed
        self.peak_tflops, self.flops_per_token, self.causal = peak_tflops, flops_per_token, causal
        self.speed: Speed | None = None
        self._shape: ModelShape | None = None
        self._topology: Topology | None = None
        self._timer: StepTimer | None = None
        self._window_start: float | None = None
        self._window_step = self._first_step = 0
        self._read = BatchSize(0, 0)
        self._first: dict[str, float] = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._shape = getattr(trainer.strategy, "model_shape", None) or readable_shape(pl_module)
        self._topology = topology_of(trainer)
        self._timer = StepTimer(self._topology.device)
        self._timer.start(trainer.strategy.model)
        self._first_step, self._first = trainer.global_step, {}
        self._open_window(trainer)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._window_start is None:
            self._open_window(trainer)
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
        if self._timer is None or self._window_start is None:
            return
        self._timer.end_step()
        size = size_of_batch(batch)
        self._read = BatchSize(
            self._read.num_samples + size.num_samples, self._read.num_tokens + size.num_tokens
        )
        if trainer.global_step == self._window_step:
            return
        self._first = self._first or _losses(trainer, "train_")
        if self._is_due(trainer):
            self._close_window(trainer, pl_module, size)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._print(trainer, _text(_losses(trainer, "val_")))
        self._window_start = None  # the time of a validation is not the time of steps

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()
        last = _losses(trainer, "train_")
        for name, first in self._first.items():
            if name in last and first > 0:
                self._print(
                    trainer, f"{name} {first:.3f} -> {last[name]:.3f}, {last[name] / first:.0%} of the first"
                )

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _is_due(self, trainer: Trainer) -> bool:
        every = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        is_first = self.print_lines and trainer.global_step == 1
        return is_first or (every > 0 and trainer.global_step // every > self._window_step // every)

    def _close_window(self, trainer: Trainer, pl_module: LightningModule, size: BatchSize) -> None:
        """Brings the ranks' numbers together; one small gather over the world."""
        assert self._topology is not None
        assert self._timer is not None
        assert self._window_start is not None
        steps = self._timer.take()
        bubble = getattr(trainer.strategy, "last_bubble_fraction", None)
        mine = RankWindow(
            stage=self._topology.stage,
            samples=self._read.num_samples,
            tokens=self._read.num_tokens,
            step_s=sum(step.step_s for step in steps),
            wait_s=sum(step.wait_s for step in steps),
            idle_s=getattr(trainer.strategy, "last_idle_s", 0.0) * len(steps),
            bubble=-1.0 if bubble is None else bubble,
        )
        seconds = time.perf_counter() - self._window_start
        rows = gather_rows(mine.row(), self._topology.device)
        self.speed = speed_of(
            [RankWindow.of_row(row) for row in rows],
            num_replicas=num_replicas(trainer),
            num_steps=trainer.global_step - self._window_step,
            seconds=seconds,
            flops=self._flops(trainer, size),
        )
        self._show(trainer, pl_module, self.speed)
        self._open_window(trainer)

    def _show(self, trainer: Trainer, pl_module: LightningModule, speed: Speed) -> None:
        if self.log_speed:
            values = speed.scalars()
            names: list[str] = [name for name in ("tokens_per_s", "step_s", "mfu") if name in values]
            shown = {name: values.pop(name) for name in names}
            pl_module.log_dict(shown, prog_bar=True)
            pl_module.log_dict(values)
        losses = _text(_losses(trainer, "train_"))
        self._print(trainer, f"{losses}  {speed.text()}")

    def _flops(self, trainer: Trainer, size: BatchSize) -> FlopCount | None:
        peak = self.peak_tflops * TERA if self.peak_tflops else _known_peak(trainer)
        if self.flops_per_token is not None:
            return FlopCount(model=self.flops_per_token, peak_per_s=peak)
        if self._shape is None or not self._shape.vocab_size or not size.seq_len:
            return None
        recompute = layout_of(trainer, size.num_samples).recompute
        return FlopCount(
            model=model_flops_per_token(self._shape, size.seq_len, causal=self.causal),
            recomputed=recomputed_flops_per_token(
                self._shape, size.seq_len, recompute, causal=self.causal
            ),
            peak_per_s=peak,
        )

    def _print(self, trainer: Trainer, text: str) -> None:
        if self.print_lines and trainer.is_global_zero:
            total = f"/{trainer.max_steps}" if trainer.max_steps > 0 else ""
            print(f"step {trainer.global_step}{total}  {text}", flush=True)

    def _open_window(self, trainer: Trainer) -> None:
        if self._timer is not None:
            self._timer.take()
        self._window_start = time.perf_counter()
        self._window_step = trainer.global_step
        self._read = BatchSize(0, 0)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.stop()
            self._timer = None


def num_replicas(trainer: Trainer) -> int:
    """Data-parallel replicas: how many different batches one step reads."""
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(kwargs.get("num_replicas", 1))


def _known_peak(trainer: Trainer) -> float | None:
    """Operations a second of a rank: the GPU's datasheet, else what was measured before training."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        try:
            return find_gpu(torch.cuda.get_device_name(device))[0].peak_flops
        except HardwareError:
            pass
    check = find_callback(trainer, LinkCheck)
    return None if check is None or check.report is None else check.report.matmul_flops()


def _losses(trainer: Trainer, prefix: str) -> dict[str, float]:
    values = {name: value for name, value in trainer.callback_metrics.items() if name.startswith(prefix)}
    return {name: float(value) for name, value in values.items() if value.numel() == 1}


def _text(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in values.items())
