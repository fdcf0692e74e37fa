# SPDX-License-Identifier: Apache-2.0
"""Training with a real Trainer, on one process and on forked ranks, and comparing all that comes out.

A `Run` says what is trained; `check` trains it in a layout and on one process and compares loss, every gradient before
the optimizer step, and the parameters. Several runs share the ranks of one launch.
"""

import functools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_3d.strategies import ThreeDStrategy
from tests.harness import run_ranks
from tests.models import MLP, decoder, tokens

Layout = Mapping[str, Any]

PP2: Layout = {"pp": 2, "num_microbatches": 4}
PP2_INTERLEAVED: Layout = {**PP2, "schedule": "interleaved", "virtual_stages": 2}
DP2: Layout = {"dp_shard": 2}
TP2: Layout = {"tp": 2}
PP2_DP2: Layout = {**PP2, "dp_shard": 2}


def name_of(layout: Layout) -> str:
    return "-".join(f"{key}={value}" for key, value in layout.items())


def world_of(layout: Layout) -> int:
    world = 1
    for axis in ("pp", "dp_replicate", "dp_shard", "tp"):
        world *= layout.get(axis, 1)
    return world


def few_on_many_ranks(layout: Layout, runs: Mapping[str, "Run"], few: Sequence[str]) -> dict[str, "Run"]:
    """All runs on two ranks, the named few on more."""
    return {name: run for name, run in runs.items() if world_of(layout) <= 2 or name in few}


def strategy_of(layout: Layout) -> ThreeDStrategy:
    degrees = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1}
    return ThreeDStrategy(**{**degrees, **layout})


class Module(pl.LightningModule):
    """An ordinary LightningModule around `self.model`; the loss is `loss(model, batch)`."""

    def __init__(self, model: nn.Module, optimizer: str = "sgd") -> None:
        super().__init__()
        self.model = model
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        loss = token_loss(self.model(batch["ids"]), batch["labels"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        # eps is large enough not to amplify the rounding of tiny gradients
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)


class Regression(Module):
    """Mean square error of a model of vectors."""

    def __init__(self, model: nn.Module | None = None, optimizer: str = "sgd") -> None:
        super().__init__(MLP() if model is None else model, optimizer)

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.model(batch["x"]), batch["y"])
        self.log("loss", loss)
        return loss


def token_loss(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction=reduction)


def lm(optimizer: str = "sgd", cls: type[Module] = Module, **changes: Any) -> Module:
    """The decoder of the trials, always with the same weights."""
    return cls(decoder(**changes), optimizer)


def mlp(optimizer: str = "sgd", cls: type[Module] = Regression, **changes: Any) -> Module:
    """The stack of linear layers of the trials, always with the same weights."""
    return seeded(lambda: cls(MLP(**changes), optimizer))


def seeded(make: Callable[[], Any]) -> Any:
    """What `make` makes, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def token_batches(count: int = 3, size: int = 8, length: int = 8) -> list[dict[str, Tensor]]:
    """Batches of the whole world: {"ids": [B, S], "labels": [B, S]}."""
    pairs = [tokens(size, length, seed=number + 1) for number in range(count)]
    return [{"ids": ids, "labels": labels} for ids, labels in pairs]


def vector_batches(count: int = 3, size: int = 8, width: int = 16) -> list[dict[str, Tensor]]:
    """Batches of the whole world: {"x": [B, D], "y": [B, D]}."""
    generator = torch.Generator().manual_seed(1)
    return [
        {name: torch.randn(size, width, generator=generator) for name in ("x", "y")} for _ in range(count)
    ]


def share(batch: Any, replica: int, replicas: int) -> Any:
    """A replica's part of a batch whose tensors all begin with the batch dimension."""
    return {key: value.chunk(replicas)[replica] for key, value in batch.items()} if replicas > 1 else batch


class Batches(pl.LightningDataModule):
    """Gives each replica its part of every batch, in order, as it is."""

    def __init__(self, batches: Sequence[Any], split: Callable[[Any, int, int], Any] = share) -> None:
        super().__init__()
        self.batches, self.split = batches, split

    def train_dataloader(self):
        where = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        mine = [self.split(batch, where["rank"], where["num_replicas"]) for batch in self.batches]
        return DataLoader(mine, batch_size=None, collate_fn=lambda batch: batch)

    def val_dataloader(self):
        if is_overridden("validation_step", self.trainer.lightning_module):
            return self.train_dataloader()
        return []


@dataclass
class Record:
    """What a run computed on this rank."""

    losses: list[Tensor] = field(default_factory=list)
    """Of each batch, averaged over replicas."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Before each optimizer step and before clipping; of the parameters that this rank holds."""
    clipped: list[dict[str, Tensor]] = field(default_factory=list)
    """As the optimizer saw them."""
    norms: list[float] = field(default_factory=list)
    """Total norm before clipping, of each optimizer step; empty where nothing is clipped."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """At the end."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`trainer.callback_metrics` at the end."""


class Recorder(pl.Callback):
    """Fills a `Record`."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.record.losses.append(trainer.strategy.reduce(loss.detach().double()))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        record, strategy = self.record, trainer.strategy
        record.gradients.append(gradients_of(pl_module))

        def after_clipping(*_: Any) -> None:
            hook.remove()
            record.clipped.append(gradients_of(pl_module))
            if getattr(strategy, "last_grad_norm", None) is not None:
                record.norms.append(float(strategy.last_grad_norm))

        hook = optimizer.register_step_post_hook(after_clipping)

    def on_train_end(self, trainer, pl_module):
        self.record.parameters = {name: whole(parameter) for name, parameter in pl_module.named_parameters()}
        self.record.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def norm_of(gradients: Mapping[str, Tensor], norm_type: float = 2.0) -> float:
    return float(torch.nn.utils.get_total_norm(list(gradients.values()), norm_type))


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """What is trained, whatever the layout. One object is trained on one process only once."""

    module: Callable[[], pl.LightningModule]
    batches: Sequence[Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the Trainer."""
    strategy: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the strategy."""
    split: Callable[[Any, int, int], Any] = share
    compare: tuple[str, ...] = ("losses", "gradients", "parameters")
    tolerance: float = 1e-5
    reference: "Run | None" = None
    """What one process does instead, if not the same."""


def make_trainer(strategy: Any, devices: int = 1, **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return pl.Trainer(strategy=strategy, devices=devices, **{**defaults, **options})


def fit(run: Run, layout: Layout | None = None) -> Record:
    """Trains on this rank of a layout, or on this process alone."""
    be_quiet()
    record = Record()
    strategy = "auto" if layout is None else strategy_of({**layout, **run.strategy})
    options = {name: value() if callable(value) else value for name, value in run.options.items()}
    callbacks = [Recorder(record), *options.pop("callbacks", ())]
    trainer = make_trainer(strategy, world_of(layout or {}), callbacks=callbacks, **options)
    trainer.fit(run.module(), Batches(run.batches, run.split))
    return record


@functools.cache
def alone(run: Run) -> Record:
    """What one process computes."""
    return fit(run.reference or run)


def errors(record: Record, reference: Record, compare: Sequence[str]) -> dict[str, float]:
    """Largest relative errors by kind and name; the gradients that a rank holds are compared by that rank."""
    found: dict[str, float] = {}
    if "losses" in compare:
        found["losses"] = relative_error(torch.stack(record.losses), torch.stack(reference.losses))
    if "gradients" in compare:
        same_count = len(record.gradients) == len(reference.gradients)
        found["gradients: number of steps"] = 0.0 if same_count else float("inf")
        for step, (mine, expected) in enumerate(zip(record.gradients, reference.gradients, strict=False)):
            for name, gradient in mine.items():
                wanted = expected.get(name, torch.zeros(()).expand(gradient.shape))
                found[f"gradient of {name} in step {step}"] = relative_error(gradient, wanted)
    if "parameters" in compare:
        for name, value in record.parameters.items():
            found[f"parameter {name}"] = relative_error(value, reference.parameters[name])
    return found


def relative_error(value: Tensor, expected: Tensor) -> float:
    """max |value - expected| / max |expected|; infinite for other shapes and for what is not a number."""
    value, expected = value.double(), expected.double()
    if value.shape != expected.shape or not torch.isfinite(value).all():
        return float("inf")
    if not value.numel():
        return 0.0
    return float((value - expected).abs().max() / expected.abs().max().clamp(min=1e-20))


def check(layout: Layout, runs: Mapping[str, Run], timeout_s: float = 120) -> dict[str, list[Record]]:
    """Trains runs in a layout and fails with every number that differs from one process.

    Returns:
        For each run the records of all ranks.
    """
    references = {name: alone(run) for name, run in runs.items()}

    def body() -> tuple[dict[str, Record], dict[str, dict[str, float]]]:
        records, found = {}, {}
        for name, run in runs.items():
            try:
                records[name] = fit(run, layout)
            except Exception as error:
                error.add_note(f"in the run {name!r}")
                raise
            found[name] = errors(records[name], references[name], run.compare)
            dist.barrier()
        return records, found

    by_rank = run_ranks(world_of(layout), body, init=False, timeout_s=timeout_s)
    wrong = [
        f"{name_of(layout)}: {name}: rank {rank}: {what}: {error:.2e}"
        for rank, (_, found) in enumerate(by_rank)
        for name, numbers in found.items()
        for what, error in numbers.items()
        if not error <= runs[name].tolerance
    ]
    records = {name: [each[0][name] for each in by_rank] for name in runs}
    wrong += [
        line for name, run in runs.items() for line in _missing(name, run, records[name], references[name])
    ]
    assert not wrong, "\n".join(wrong[:30])
    return records


def _missing(name: str, run: Run, records: list[Record], reference: Record) -> list[str]:
    """Gradients that no rank had."""
    if "gradients" not in run.compare or not all(record.gradients for record in records):
        return []
    held = {key for record in records for key in record.gradients[0]}
    expected = {key for key, gradient in reference.gradients[0].items() if gradient.abs().max() > 0}
    return [f"{name}: no rank has a gradient of {key}" for key in sorted(expected - held)]


def _other_metrics(name: str, run: Run, records: list[Record], reference: Record) -> list[str]:
    """What was logged must be known to every rank, as on one process."""
    wrong = []
    for rank, record in enumerate(records if "losses" in run.compare else []):
        for key, expected in reference.metrics.items():
            found = record.metrics.get(key, float("nan"))
            if not abs(found - expected) <= run.tolerance * abs(expected):
                wrong.append(f"{name}: rank {rank}: metric {key}: {found} instead of {expected}")
    return wrong


def be_quiet() -> None:
    """Only what a test looks at is written."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
