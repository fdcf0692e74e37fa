# SPDX-License-Identifier: Apache-2.0
"""Training under DeepSpeed and on one process, with the same module and the same batches."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
pytest.importorskip("deepspeed")
with suppress(ImportError):  # compiled by torch when it is imported: once here, not in every rank
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
from deepspeed.utils import safe_get_full_fp32_param

from lightning_3d.strategies import ZeroOffloadStrategy
from tests.engine.runs import Batches, Module, be_quiet, lm, make_trainer, token_batches, token_loss
from tests.harness import run_ranks

BATCHES = token_batches(20)


class Scheduled(Module):
    """AdamW, or SGD with momentum, under a learning rate that changes every step; validated and tested."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def test_step(self, batch, batch_idx):
        self.log("tested", token_loss(self.model(batch["ids"]), batch["labels"]), sync_dist=True)


class Data(Batches):
    def test_dataloader(self):
        return self.train_dataloader()


@dataclass
class Record:
    """What a run computed."""

    losses: list[float] = field(default_factory=list)
    """Of each batch, averaged over ranks."""
    rates: list[float] = field(default_factory=list)
    """Learning rates after each batch."""
    norms: list[float] = field(default_factory=list)
    """Of gradients, before clipping."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """At the end, in fp32."""
    global_step: int = 0


class Recorder(pl.Callback):
    def __init__(self, record: Record) -> None:
        self.record = record

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        loss = loss.detach().double() * trainer.accumulate_grad_batches
        self.record.losses.append(float(trainer.strategy.reduce(loss)))
        self.record.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_end(self, trainer, pl_module):
        self.record.global_step = trainer.global_step
        self.record.parameters = {name: whole(p) for name, p in pl_module.named_parameters()}


def whole(parameter: Tensor) -> Tensor:
    full = safe_get_full_fp32_param(parameter)
    if full is None:
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.detach().clone()


def zero(**options: Any) -> ZeroOffloadStrategy:
    return ZeroOffloadStrategy(**{"cpu_adam": "torch", **options})


def train(
    strategy: Any,
    *,
    devices: int = 1,
    module: Callable[[], pl.LightningModule] = lambda: lm("adamw", Scheduled),
    batches: Sequence[Any] = BATCHES,
    callbacks: Sequence[pl.Callback] = (),
    resume: Any = None,
    save: Any = None,
    **options: Any,
) -> Record:
    """Fits on this rank; `save` is a path to save to at the end."""
    be_quiet()
    record = Record()
    trainer = make_trainer(strategy, devices, callbacks=[Recorder(record), *callbacks], **options)
    trainer.fit(module(), Data(batches), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
        getattr(trainer.strategy, "finish_saving", lambda: None)()  # a rank here ends by os._exit
    if dist.is_initialized():
        dist.barrier()
    return record


def on_ranks(world_size: int, body: Callable[[], Any], timeout_s: float = 120) -> list[Any]:
    """What each rank returned."""
    return run_ranks(world_size, body, init=False, timeout_s=timeout_s)


def difference(values: Sequence[float], expected: Sequence[float]) -> float:
    """Largest difference; infinite for other lengths."""
    if len(values) != len(expected) or not values:
        return float("inf")
    return max(abs(a - b) for a, b in zip(values, expected, strict=True))


def largest_error(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert values.keys() == expected.keys()
    return max(float((values[name] - expected[name]).abs().max()) for name in expected)
