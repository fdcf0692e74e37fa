# SPDX-License-Identifier: Apache-2.0
"""What a resumed run needs beside model and optimizer: random states, where the data stand, loops at an epoch's end."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy
import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_3d.compat_lightning import (
    batch_progress,
    begin_progress_bar,
    begin_with_new_epoch,
    restart_train_data,
    set_sampler_epoch,
    train_loaders,
)
from lightning_3d.mesh import ParallelMesh
from lightning_3d.plan import AXES
from lightning_3d.strategies.data_position import Position, Progress, ResumedLoader, is_stateful

if TYPE_CHECKING:
    import lightning.pytorch as pl

KEY = "lightning_3d"
"""Our entry in Lightning's checkpoint dict."""


def coordinates(mesh: ParallelMesh) -> str:
    """Name of a logical rank: `pp0.dp_replicate0.dp_shard3.cp0.tp1`."""
    return ".".join(f"{axis}{mesh.rank(axis)}" for axis in AXES)


def sizes(mesh: ParallelMesh) -> dict[str, int]:
    """The layout, as far as random states depend on it."""
    return {axis: mesh.size(axis) for axis in AXES}


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators."""
    version, words, gauss = random.getstate()
    legacy: Any = numpy.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = legacy
    state = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words), gauss],
        "numpy": [name, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Sets the generators to what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def epoch_is_over(fit_loop: Mapping[str, Any]) -> bool:
    """Whether a saved loop was past its epoch (saved at an epoch's end, or after the fit)."""
    total = fit_loop["epoch_progress"]["total"]
    return bool(total["processed"] > 0 and total["ready"] == total["started"] == total["processed"])


def epoch_is_half_done(fit_loop: Mapping[str, Any]) -> bool:
    """Whether the epoch that a saved loop was past had batches left: `max_steps` ended it."""
    batches = fit_loop["epoch_loop.batch_progress"]
    return bool(epoch_is_over(fit_loop) and batches["current"]["processed"] and not batches["is_last_batch"])


def reopen_epoch(fit_loop: dict[str, Any]) -> None:
    """Counts an epoch that `max_steps` ended as not over, in place, so that a longer fit goes on in it."""
    for progress in fit_loop["epoch_progress"].values():
        progress["processed"] -= 1
        progress["completed"] = progress["processed"]


def finish_epoch(fit_loop: dict[str, Any]) -> None:
    """Brings a loop that was saved at an epoch's end to the state right after it, in place.

    Lightning saves before it counts the epoch as completed. Under `max_steps` it then takes the epoch for half done,
    ends it once more on resuming, and shuffles every later epoch with the seed of the one after it.
    """
    for progress in fit_loop["epoch_progress"].values():
        progress["completed"] = progress["processed"]
    for name, progress in fit_loop.items():
        if name.startswith("epoch_loop.") and "val_loop" not in name and name.endswith("progress"):
            _zero_current(progress)
    batches = fit_loop.get("epoch_loop.val_loop.batch_progress")
    if batches is not None:
        batches["total"] = dict.fromkeys(batches["total"], 0)


def _zero_current(progress: dict[str, Any]) -> None:
    for key, value in progress.items():
        if key == "current":
            progress[key] = dict.fromkeys(value, 0)
        elif key == "is_last_batch":
            progress[key] = False
        elif key != "total" and isinstance(value, dict):
            _zero_current(value)


@dataclass(kw_only=True)
class ResumePoint:
    """A checkpoint's part that waits until the loops and loaders are there."""

    steps_run: int
    seed: int
    layout: dict[str, int]
    positions: list[Position]
    random: Mapping[str, Any] | None
    """Of this logical rank; None where the layout is another."""
    new_epoch: bool
    """Saved after an epoch's last batch and its end."""
    last_batch: bool
    """Saved in the hook of an epoch's last batch, which Lightning does not run again."""
    loaders: list[ResumedLoader] = field(default_factory=list)

    def apply(self, trainer: "pl.Trainer", mesh: ParallelMesh, device: torch.device) -> Progress | None:
        """Puts loops, loaders and generators where they were, right before the first batch.

        Returns:
            Where the epoch goes on, if in its middle.
        """
        if self.new_epoch:
            begin_with_new_epoch(trainer)
        between = self.new_epoch or self.last_batch
        if between:
            self._set_random(device)
        since = self._restart_data(trainer, mesh.dp_size)
        if not between:
            self._set_random(device)
        begin_progress_bar(trainer)
        return since

    def _restart_data(self, trainer: "pl.Trainer", replicas: int) -> Progress | None:
        loaders = train_loaders(trainer)
        positions = self.positions if len(self.positions) == len(loaders) else [{}] * len(loaders)
        if any(is_stateful(loader) for loader in loaders):
            return None
        self.loaders = [
            ResumedLoader(loader, position, replicas)
            for loader, position in zip(loaders, positions, strict=True)
        ]
        epochs: Any = trainer.fit_loop.epoch_progress
        for loader in loaders:
            set_sampler_epoch(loader, epochs.current.processed)
        restart_train_data(trainer)
        if len(self.loaders) != 1 or not positions[0]:
            return None
        return self._count_batches(trainer, self.loaders[0], replicas)

    def _count_batches(self, trainer: "pl.Trainer", loader: ResumedLoader, replicas: int) -> Progress:
        """The counter of batches in the present batch size."""
        done, counted = loader.num_batches_done(replicas), loader.position["batches"]
        if done != counted:
            if done % trainer.accumulate_grad_batches:
                rank_zero_warn(
                    f"{loader.position['samples']} samples are {done} batches of the present size, which "
                    f"accumulate_grad_batches={trainer.accumulate_grad_batches} does not divide: the next optimizer "
                    "step is smaller than the others. Keep the global batch size when resuming.",
                    stacklevel=8,
                )
            current = batch_progress(trainer).current
            completed = done - (
                current.processed - current.completed
            )  # the loop is about to count the last one
            current.ready = current.started = current.processed = done
            current.completed = completed
        return Progress(num_batches=done, since={**loader.position, "batches": done})

    def _set_random(self, device: torch.device) -> None:
        if self.random is not None:
            set_random_state(self.random, device)

    def end(self) -> None:
        """Gives the loaders back; the first batch has been read."""
        for loader in self.loaders:
            loader.end()
        self.loaders = []


def warn_of_other_layout(saved: Mapping[str, int], now: Mapping[str, int]) -> None:
    """Says what another layout cannot have again."""

    def described(layout: Mapping[str, int]) -> str:
        return " ".join(f"{axis}={size}" for axis, size in layout.items() if size > 1) or "one process"

    rank_zero_warn(
        f"The checkpoint's random states are those of {described(saved)} and cannot be those of {described(now)}: "
        "dropout and other random numbers differ from those of a run that never stopped.",
        stacklevel=8,
    )
