# SPDX-License-Identifier: Apache-2.0
"""`MemoryTrace`: what a run's memory is used for, by step, phase, category and block, on any device."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_3d.callbacks.context import log_scalars, output_folder
from lightning_3d.callbacks.run_facts import (
    blocks_of,
    facts_of,
    gradients_of,
    known_tensors,
    optimizer_tensors,
    stage_of,
)
from lightning_3d.compat import dump_cuda_history, record_cuda_history, tree_tensors
from lightning_3d.profiling.memory_meter import MemoryMeter
from lightning_3d.profiling.memory_page import headline, write_page
from lightning_3d.trace import CATEGORIES, MemoryTrace as Trace, SpanTrace, thinned
from lightning_3d.units import GIB

MOST_SPANS = 32
"""Spans that are kept: beyond, the one with the lowest peak goes."""
MOST_MOMENTS_SENT = 200
"""Moments of a timeline that other ranks send to the first one for its page."""


class MemoryTrace(Callback):
    """Traces a few steps tensor by tensor; the others cost nothing.

    Works with every strategy. Each rank writes `rank<N>.json`, the first one also `memory.html` (one page, with the
    estimate beside the measurement) and, where matplotlib is installed, `memory.png`. The loggers get
    `memory/<category>_gib` of each traced step. A traced step is some times slower than others.

    Args:
        steps: Optimizer steps to trace, counted from 0, or `all`. The first step also makes the optimizer's state.
        evaluation: Whether the first batch of the first validation is traced too.
        dirpath: Where files go; `memory` in the Trainer's log or root folder if None.
        cuda_snapshot: Whether the allocator's history of traced steps is written as well (`rank<N>.pickle`, for
            pytorch.org/memory_viz); CUDA only.
    """

    def __init__(
        self,
        steps: Iterable[int] | Literal["all"] = (1, 2),
        evaluation: bool = True,
        dirpath: str | Path | None = None,
        cuda_snapshot: bool = False,
    ) -> None:
        self.steps: Literal["all"] | frozenset[int] = "all" if steps == "all" else frozenset(map(int, steps))
        self.evaluation = evaluation
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.cuda_snapshot = cuda_snapshot
        self.traces: list[Trace] = []
        """Of all ranks on the first one, else of this rank; when the run has ended."""
        self._spans: list[SpanTrace] = []
        self._meter: MemoryMeter | None = None
        self._handles: list[Any] = []
        self._running = ""
        self._batches_of_step = 0
        self.estimate: dict[str, float] = {}
        """Of this rank, by the estimator's categories; empty for models that it cannot read."""
        self._device = torch.device("cpu")

    @property
    def spans(self) -> list[SpanTrace]:
        """What was traced on this rank until now."""
        return list(self._spans)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._folder = self.dirpath or output_folder(trainer, None) / "memory"
        self._device = trainer.strategy.root_device

    # --- spans ------------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self.steps != "all" and step not in self.steps:
            return
        self._batches_of_step = self._batches_of_step + 1 if batch_idx % trainer.accumulate_grad_batches else 0
        part = f", batch {self._batches_of_step}" if trainer.accumulate_grad_batches > 1 else ""
        self._start(trainer, pl_module, batch, "forward", f"step {step}{part}")

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._running:
            self._mark_gradients(pl_module)

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._running and self._meter is not None:
            self._mark_gradients(pl_module)
            self._meter.phase = "optimizer"

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._running:
            return
        if not self.estimate:
            facts = facts_of(trainer, pl_module, batch)
            self.estimate = facts.estimate().to_dict() if facts is not None else {}
        span = self._stop(trainer, pl_module)
        values = {f"memory/{name}_gib": span.peak.of(name) / GIB for name in CATEGORIES}
        log_scalars(trainer, values | {"memory/peak_gib": span.peak.total / GIB})

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        traced = any(span.name == "validation" for span in self._spans)
        if self.evaluation and not traced and not trainer.sanity_checking:
            self._start(trainer, pl_module, batch, "evaluation", "validation")

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._running:
            self._stop(trainer, pl_module)

    def _start(self, trainer: Trainer, module: LightningModule, batch: Any, phase: str, name: str) -> None:
        blocks = blocks_of(trainer, module)
        self._meter = meter = MemoryMeter(self._device)
        self._handles = meter.watch(blocks)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            if self.cuda_snapshot:
                record_cuda_history()
        self._running = name
        owners = {block: list(part.parameters()) for block, part in blocks.items()}
        meter.start(known_tensors(trainer, module, batch), owners)
        meter.phase = phase

    def _mark_gradients(self, module: LightningModule) -> None:
        assert self._meter is not None
        self._meter.mark(gradients_of(module), "gradients")

    def _stop(self, trainer: Trainer, module: LightningModule) -> SpanTrace:
        assert self._meter is not None
        name, self._running = self._running, ""
        span = self._meter.stop(
            name, {"gradients": gradients_of(module), "optimizer": optimizer_tensors(trainer)}
        )
        for handle in self._handles:
            handle.remove()
        if self._device.type == "cuda":
            span = replace(
                span,
                allocator_peak_bytes=torch.cuda.max_memory_allocated(self._device),
                allocator_reserved_bytes=torch.cuda.max_memory_reserved(self._device),
            )
            if self.cuda_snapshot:
                self._folder.mkdir(parents=True, exist_ok=True)
                dump_cuda_history(self._folder / f"rank{trainer.global_rank}.pickle")
        self._keep(span)
        self._meter, self._handles = None, []
        return span

    def _keep(self, span: SpanTrace) -> None:
        if len(self._spans) == MOST_SPANS:
            lowest = min(range(MOST_SPANS), key=lambda index: self._spans[index].peak.total)
            del self._spans[lowest]
        self._spans.append(span)

    # --- the end ----------------------------------------------------------------------------------------------------

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._running:
            self._stop(trainer, pl_module)
        if self._spans:
            self._write(self._trace(trainer))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        own = self._trace(trainer)
        if own.spans:
            self._write(own)
        self.traces = _gathered(own)
        if trainer.is_global_zero and any(trace.spans for trace in self.traces):
            page = write_page([trace for trace in self.traces if trace.spans], self._folder)
            rank_zero_info(f"{headline(self.traces)}. See {page}.")

    def _trace(self, trainer: Trainer) -> Trace:
        return Trace(
            rank=trainer.global_rank,
            stage=stage_of(trainer),
            device=str(self._device),
            spans=tuple(self._spans),
            estimate=self.estimate,
        )

    def _write(self, trace: Trace) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        trace.write(self._folder / f"rank{trace.rank}.json")


def _gathered(own: Trace) -> list[Trace]:
    """The traces of all ranks, with short timelines, on the first one; elsewhere this rank's."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [own]
    spans = tuple(
        replace(span, timeline=thinned(span.timeline, MOST_MOMENTS_SENT)) for span in own.spans
    )
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(replace(own, spans=spans), everyone)
    return [own] if everyone is None else [own, *everyone[1:]]
