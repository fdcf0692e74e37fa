# SPDX-License-Identifier: Apache-2.0
"""`OOMAdvisor`: says what to change when a run does not fit, before it starts and when it fails."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_3d.advisor import Advice, Failure, RunFacts, advise
from lightning_3d.advisor.text import advice_table, note_of, yaml_of
from lightning_3d.callbacks.context import output_folder
from lightning_3d.callbacks.run_facts import (
    blocks_of,
    facts_of,
    gradients_of,
    known_tensors,
    local_of,
    optimizer_tensors,
)
from lightning_3d.errors import PlanError
from lightning_3d.profiling.failure_place import is_out_of_memory, place_of
from lightning_3d.profiling.memory_meter import MemoryMeter
from lightning_3d.units import GIB, format_bytes


_UNREADABLE = (
    "The dimensions of this model or batch cannot be read (they are, from a ModuleList of blocks with linear layers), so"
    " no saving can be told. In this order: precision='bf16-mixed'; recompute='selective', then 'full'; a smaller batch_size"
    " with more accumulate_grad_batches; dp_shard; tp in the node; pp across nodes; offload='cpu'."
)
"""Advice for runs that the estimator cannot follow."""


class OOMAdvisor(Callback):
    """Turns an out-of-memory error into advice: what filled which rank, and what to change, in decision order.

    The order is the field's: bf16, recomputation and a smaller microbatch; then sharding (ZeRO, FSDP); then tensor
    parallelism in the node; then pipeline stages across nodes; offload last. Each lever is told with what it saves
    and costs for this run. The rank that fails first prints the table and writes `oom_advice*.yaml`, the trainer
    section of the first set that fits; the error is raised on, with the advice in a line.

    Args:
        limit_gib: Memory that a rank may use. Without a GPU, tensors are metered and the run fails where a device of
            that size would, which rehearses a run on a small one; every step is then some times slower. None takes
            the device's own memory.
        dirpath: Where the config goes; the Trainer's log or root folder if None.
        warn: Whether to say, before the first step, that the run is estimated not to fit.

    Raises:
        PlanError: `limit_gib` is not above 0.
    """

    def __init__(
        self, limit_gib: float | None = None, dirpath: str | Path | None = None, warn: bool = True
    ) -> None:
        if limit_gib is not None and limit_gib <= 0:
            raise PlanError(f"limit_gib={limit_gib} is no memory. Give GiB above 0, or None for the device's own.")
        self.limit_gib = limit_gib
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.warn = warn
        self.advice: Advice | None = None
        """The last advice; None if the run fits."""
        self._facts: RunFacts | None = None
        self._is_read = False
        self._meter: MemoryMeter | None = None
        self._handles: list[Any] = []
        self._device = torch.device("cpu")

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folder = self.dirpath or output_folder(trainer, None)
        stamp = trainer.strategy.broadcast(f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        self._path = folder / f"oom_advice_{stamp}.yaml"
        self._device = trainer.strategy.root_device
        if self._device.type == "cuda" and self.limit_gib is not None:
            total = torch.cuda.get_device_properties(self._device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit_gib * GIB / total), self._device)

    @property
    def limit_bytes(self) -> float | None:
        """Memory of a rank; None on a CPU without a limit."""
        if self.limit_gib is not None:
            return self.limit_gib * GIB
        if self._device.type == "cuda":
            return float(torch.cuda.get_device_properties(self._device).total_memory)
        return None

    # --- steps ------------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._is_read:
            self._is_read = True
            self._facts = facts_of(trainer, pl_module, batch)
            self._warn_if_too_large()
        if self.limit_gib is not None and self._device.type == "cpu":
            self._start_meter(trainer, pl_module, batch)

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._meter is not None:
            self._meter.phase = "optimizer"

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._stop_meter(pl_module, trainer)

    def _start_meter(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        blocks = blocks_of(trainer, module)
        self._meter = MemoryMeter(self._device, limit_bytes=int((self.limit_gib or 0) * GIB))
        self._handles = self._meter.watch(blocks)
        self._meter.phase = "forward"
        self._meter.start(known_tensors(trainer, module, batch), {name: block.parameters() for name, block in blocks.items()})

    def _stop_meter(self, module: LightningModule, trainer: Trainer) -> dict[str, float]:
        """Ends the meter; what was alive at the highest moment, by category."""
        if self._meter is None:
            return {}
        meter, self._meter = self._meter, None
        known = {"gradients": gradients_of(module), "optimizer": optimizer_tensors(trainer)}
        peak = meter.stop("step", known).peak
        for handle in self._handles:
            handle.remove()
        return peak.by_category()

    def _warn_if_too_large(self) -> None:
        facts, limit = self._facts, self.limit_bytes
        if facts is None or limit is None or not self.warn or facts.needed_bytes() <= limit:
            return
        rank_zero_warn(advice_table(advise(facts, limit)), stacklevel=2)

    # --- failure ----------------------------------------------------------------------------------------------------

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        meter = self._meter
        block = None if meter is None else meter.block
        metered = self._stop_meter(pl_module, trainer)
        if not is_out_of_memory(exception):
            return
        alive = metered or self._count(trainer, pl_module)
        phase, inside = place_of(exception, pl_module)
        failure = Failure(
            rank=trainer.global_rank,
            phase=phase,
            block=inside or block or "outside blocks",
            num_bytes=alive,
            message=str(exception),
        )
        limit = self.limit_bytes or sum(alive.values())
        if self._facts is None or limit <= 0:
            _add_note(exception, f"Out of memory on rank {failure.rank} in {phase}. {_UNREADABLE}")
            return
        self.advice = advise(self._facts, limit, failure)
        _add_note(exception, note_of(self.advice, self._publish(self.advice)))

    def _publish(self, advice: Advice) -> str:
        """Prints the table and writes the config, if no other rank has; says where it is."""
        config = yaml_of(advice)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("x", encoding="utf-8") as stream:
                stream.write(config or f"# {note_of(advice, None)}\n")
        except FileExistsError:
            return f"The config is {self._path}."
        except OSError as error:
            print(advice_table(advice), flush=True)
            return f"The config could not be written ({error})."
        print(advice_table(advice), flush=True)
        return f"The config is {self._path}."

    def _count(self, trainer: Trainer, module: LightningModule) -> dict[str, float]:
        """What can be counted without a meter: states exactly, the rest as what the allocator has beside them."""
        held = {name: float(_num_bytes(tensors)) for name, tensors in known_tensors(trainer, module).items()}
        if self._device.type == "cuda":
            peak = float(torch.cuda.max_memory_allocated(self._device))
            held["activations"] = max(0.0, peak - sum(held.values()))
        return held


def _num_bytes(tensors: list[Any]) -> int:
    storages = {local_of(tensor).untyped_storage().data_ptr(): local_of(tensor).untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _add_note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # Python 3.10: tracebacks do not show it, the other ranks are told it
        error.__notes__ = [*getattr(error, "__notes__", []), text]
