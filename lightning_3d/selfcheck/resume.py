# SPDX-License-Identifier: Apache-2.0
"""`python -m lightning_3d.selfcheck --resume`: what is saved in any layout goes on in any other.

Each layout trains two steps in the middle of a shuffled epoch, saves, and trains on: that is the run that never
stopped. Every layout then resumes from every save. Weights and optimizer state must be those of the saving run, bit
for bit, when the next step begins; the next samples must be the same; and the next loss may differ by rounding.
"""

import logging
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_3d.plan import AXES, ParallelPlan
from lightning_3d.selfcheck.launch import be_quiet, run_forked
from lightning_3d.selfcheck.model import Tokens
from lightning_3d.selfcheck.oracle import GLOBAL_BATCH, Case, whole

LOSS_TOLERANCE = 1e-6
"""Largest relative difference of the next loss, in fp32: other layouts add up in another order."""
SAVED_STEP = 2
_TASK = Case(tied=True, optimizer="adamw")
_NUM_SAMPLES = 5 * GLOBAL_BATCH


def _plan(name: str, **degrees: Any) -> tuple[str, ParallelPlan]:
    axes = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1}
    return name, ParallelPlan(**{**axes, **degrees})


LAYOUTS = dict(
    (
        _plan("one"),
        _plan("dp8", dp_shard=8),
        _plan("ddp4", dp_replicate=4),
        _plan("hsdp2x4", dp_replicate=2, dp_shard=4),
        _plan("tp2", tp=2),
        _plan("dp4tp2", dp_shard=4, tp=2),
        _plan("hsdp2x2tp2", dp_replicate=2, dp_shard=2, tp=2),
        _plan("pp8", pp=8),
        _plan("pp4dp2", pp=4, dp_shard=2),
        _plan("pp2v2dp2", pp=2, dp_shard=2, schedule="interleaved", virtual_stages=2),
        _plan("pp4tp2", pp=4, tp=2),
        _plan("pp2dp2tp2", pp=2, dp_shard=2, tp=2),
    )
)
"""Twelve layouts of up to eight ranks: each axis alone, pairs of them, and all three."""


@dataclass
class Run(pl.Callback):
    """What one run did from the saved step on."""

    path: Path
    saves: bool
    state: dict[str, Tensor] = field(default_factory=dict)
    """Weights and optimizer state of this rank at the saved step, whole tensors by name."""
    loss: float = float("nan")
    samples: list[int] = field(default_factory=list)
    """Of this rank, in the step after."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A resumed run has its state now."""
        if not self.saves:
            self.state = state_of(pl_module, trainer.optimizers[0])

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Tensor, batch_idx: int
    ) -> None:
        """Notes the samples."""
        if trainer.global_step == SAVED_STEP:
            self.samples = _numbers(batch)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        """Saves, or notes the loss."""
        if trainer.global_step == SAVED_STEP and self.saves:
            self.state = state_of(pl_module, trainer.optimizers[0])
            trainer.save_checkpoint(self.path)
        if trainer.global_step == SAVED_STEP + 1:
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs
            self.loss = float(trainer.strategy.reduce(loss.detach().double()))


@dataclass(frozen=True)
class Outcome:
    """A pair's differences from the run that never stopped."""

    loss: float
    """Relative."""
    state: float
    """Largest absolute difference of weights and optimizer state; must be 0."""
    same_samples: bool

    @property
    def passed(self) -> bool:
        """Whether all of them are small enough."""
        return self.loss <= LOSS_TOLERANCE and self.state == 0.0 and self.same_samples


def state_of(module: pl.LightningModule, optimizer: Any) -> dict[str, Tensor]:
    """Weights and optimizer state of this rank's parameters; collective."""
    state = {}
    for name, parameter in module.named_parameters():
        state[name] = whole(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{name}.{key}"] = whole(value)
    return state


def check_resume(only: str = "") -> int:
    """Runs all pairs and prints the table.

    Args:
        only: resume only in layouts whose name contains this text.

    Returns:
        The exit status.
    """
    console = Console(width=150)
    outcomes: dict[tuple[str, str], Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="selfcheck-") as folder:
        for name, plan in LAYOUTS.items():
            run_forked(plan, lambda name=name, plan=plan: _save(plan, Path(folder) / name))  # type: ignore[misc]
        for name, plan in LAYOUTS.items():
            if only not in name:
                continue
            start = time.perf_counter()
            try:
                found = run_forked(plan, lambda plan=plan: _resume_all(plan, Path(folder)))  # type: ignore[misc]
            except RuntimeError as error:
                console.print(f"[red]{error}[/red]", highlight=False)
                found = {source: Outcome(float("inf"), float("inf"), False) for source in LAYOUTS}
            outcomes |= {(source, name): outcome for source, outcome in found.items()}
            passed = sum(outcome.passed for outcome in found.values())
            console.print(
                f"resumed in {name}: {passed} of {len(found)} pass, {time.perf_counter() - start:.0f} s",
                highlight=False,
            )
    return _print(console, outcomes)


def _print(console: Console, outcomes: dict[tuple[str, str], Outcome]) -> int:
    targets = [name for name in LAYOUTS if any(target == name for _, target in outcomes)]
    table = Table(title="relative difference of the next loss; rows saved, columns resumed")
    table.add_column("saved in")
    for target in targets:
        table.add_column(target, justify="right")
    for source in LAYOUTS:
        row = (outcomes[source, target] for target in targets)
        table.add_row(
            source, *(f"{o.loss:.0e}" if o.passed else f"[red]FAIL {o.loss:.0e}[/red]" for o in row)
        )
    console.print(table)
    found = list(outcomes.values())
    exact = sum(outcome.state == 0.0 for outcome in found)
    samples = sum(outcome.same_samples for outcome in found)
    losses = sum(outcome.loss <= LOSS_TOLERANCE for outcome in found)
    console.print(
        f"{len(found)} pairs: weights and optimizer state equal bit for bit in {exact}, next samples the same in "
        f"{samples}, next loss within {LOSS_TOLERANCE:.0e} in {losses}",
        highlight=False,
    )
    return 0 if found and all(outcome.passed for outcome in found) else 1


def _save(plan: ParallelPlan, folder: Path) -> None:
    run = Run(folder / "saved.ckpt", saves=True)
    _fit(plan, run)
    parts = _gathered((run.state, run.samples))
    if _is_first():
        state = {name: value for part, _ in parts for name, value in part.items()}
        samples = sorted({number for _, part in parts for number in part})
        torch.save({"state": state, "loss": run.loss, "samples": samples}, folder / "expected.pt")


def _resume_all(plan: ParallelPlan, folder: Path) -> dict[str, Outcome]:
    outcomes = {}
    for source in LAYOUTS:
        expected = torch.load(folder / source / "expected.pt", weights_only=True)
        run = Run(folder / source / "saved.ckpt", saves=False)
        _fit(plan, run)
        wanted: dict[str, Tensor] = expected["state"]
        wrong = [float((value - wanted[name]).abs().max()) for name, value in run.state.items()]
        parts = _gathered((max(wrong), run.samples, set(run.state)))
        complete = {name for part in parts for name in part[2]} == wanted.keys()
        outcomes[source] = Outcome(
            loss=abs(run.loss - expected["loss"]) / abs(expected["loss"]),
            state=max(part[0] for part in parts) if complete else float("inf"),
            same_samples=sorted({number for part in parts for number in part[1]}) == expected["samples"],
        )
    return outcomes


def _fit(plan: ParallelPlan, run: Run) -> None:
    from lightning_3d.strategies import ThreeDStrategy

    be_quiet()
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # how it gathers for the comparison
    options: dict[str, Any] = {axis: plan.size(axis) for axis in AXES}
    trainer = pl.Trainer(
        strategy=ThreeDStrategy(**options, schedule=plan.schedule, virtual_stages=plan.virtual_stages),
        devices=plan.world_size,
        accelerator="cpu",
        max_steps=SAVED_STEP + 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[run],
    )
    replicas = plan.size("dp_replicate") * plan.size("dp_shard")
    data = DataLoader(Tokens(_NUM_SAMPLES, _TASK.shape), batch_size=GLOBAL_BATCH // replicas, shuffle=True)
    trainer.fit(_TASK.make_module(), data, ckpt_path=None if run.saves else run.path)


def _numbers(batch: Tensor) -> list[int]:
    """Which samples a batch has: their rows are all different."""
    samples = Tokens(_NUM_SAMPLES, _TASK.shape)
    number_of = {tuple(samples[i].tolist()): i for i in range(_NUM_SAMPLES)}
    return [number_of[tuple(row)] for row in batch.tolist()]


def _gathered(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
