# SPDX-License-Identifier: Apache-2.0
"""The equality oracle: loss, every gradient and the parameters of a layout, against one process."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_3d.selfcheck.model import DecoderShape, LanguageModel, TokenData

GLOBAL_BATCH = 16
NUM_STEPS = 3
CLIP_NORM = 0.5


class Task(Protocol):
    """What is trained, whatever the layout; hashable."""

    @property
    def accumulate(self) -> int:
        """Batches of an optimizer step."""

    def make_module(self) -> pl.LightningModule:
        """An ordinary LightningModule, with the same weights every time."""

    def make_data(self) -> pl.LightningDataModule:
        """Batches of `GLOBAL_BATCH` samples over all replicas, in a fixed order."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A task: the plain decoder."""

    tied: bool = False
    optimizer: str = "sgd"
    accumulate: int = 1

    @property
    def shape(self) -> DecoderShape:
        """Dimensions of the model."""
        return DecoderShape(tied=self.tied)

    def make_module(self) -> pl.LightningModule:
        """See `Task`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return LanguageModel(self.shape, self.optimizer)

    def make_data(self) -> pl.LightningDataModule:
        """See `Task`."""
        return TokenData(GLOBAL_BATCH * NUM_STEPS * self.accumulate, GLOBAL_BATCH, self.shape)


@dataclass
class Record(pl.Callback):
    """What a run computed: losses per batch, gradients before each optimizer step and parameters at the end."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keeps the loss, averaged over replicas."""
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.losses.append(trainer.strategy.reduce(loss.detach().double()))

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Keeps the gradients, before clipping."""
        nothing = torch.full((), float("nan"))
        self.gradients.append(
            {name: nothing if p.grad is None else whole(p.grad) for name, p in pl_module.named_parameters()}
        )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keeps the parameters."""
        self.parameters = {name: whole(parameter) for name, parameter in pl_module.named_parameters()}


@dataclass(frozen=True)
class Errors:
    """Largest relative errors of a run: difference over the largest reference value of each tensor."""

    loss: float
    gradients: float
    parameters: float

    @property
    def worst(self) -> float:
        """The largest of them."""
        return max(self.loss, self.gradients, self.parameters)


def run_case(case: Task, *, strategy: Any, devices: int, precision: Any = "32-true") -> Record:
    """Trains a case for `NUM_STEPS` optimizer steps.

    Args:
        case: what to train.
        strategy: of the Trainer.
        devices: ranks.
        precision: of the Trainer.
    """
    record = Record()
    trainer = pl.Trainer(
        strategy=strategy,
        devices=devices,
        precision=precision,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        max_steps=NUM_STEPS,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=CLIP_NORM,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[record],
    )
    trainer.fit(case.make_module(), case.make_data())
    return record


def compare(record: Record, reference: Record) -> Errors:
    """Errors of a run against one process; collective, so that every rank's part counts."""
    losses = relative_error(torch.stack(record.losses), torch.stack(reference.losses))
    gradients = max(
        _errors(step, expected) for step, expected in zip(record.gradients, reference.gradients, strict=True)
    )
    parameters = _errors(record.parameters, reference.parameters)
    worst = torch.tensor([losses, gradients, parameters], dtype=torch.float64)
    if dist.is_initialized():
        worst = worst.to("cuda") if dist.get_backend() == "nccl" else worst
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return Errors(*worst.tolist())


ANALYTIC_ZERO = 1e-5
"""A tensor below this share of the largest one is zero but for rounding (a key's bias under softmax)."""


def _errors(values: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error; a tensor that is zero but for rounding is measured by the largest one."""
    largest = max(float(tensor.abs().max()) for tensor in expected.values() if tensor.numel())
    worst = 0.0
    for name, value in values.items():
        wanted = expected[name]
        if float(wanted.abs().max()) < ANALYTIC_ZERO * largest:
            worst = max(worst, float((value - wanted).abs().nan_to_num(float("inf")).max()) / largest)
        else:
            worst = max(worst, relative_error(value, wanted))
    return worst


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Max |value - expected| / max |expected|; infinite for values that are not numbers."""
    value, expected = value.detach().double().cpu(), expected.detach().double().cpu()
    if value.shape != expected.shape or not torch.isfinite(value).all():
        return float("inf")
    return float((value - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def whole(tensor: Tensor) -> Tensor:
    """A detached copy of the unsharded tensor on the host; collective for DTensors."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()
