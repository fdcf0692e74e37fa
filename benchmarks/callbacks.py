# SPDX-License-Identifier: Apache-2.0
"""What watching costs: step time with the callbacks on, over step time with them off, in one run.

Steps with and without take turns, so that both see the same machine. The few steps that a callback traces in detail are
slower; they are counted as the share that they have in a run of `RUN_STEPS`. Prints a table and exits non-zero when the
ratio exceeds its bound.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from jsonargparse import auto_cli
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from benchmarks.peers import PlainModule
from lightning_3d.callbacks import (
    CommTrace,
    LinkCheck,
    MemoryTrace,
    OOMAdvisor,
    StragglerMonitor,
    ThroughputMonitor,
)
from lightning_3d.selfcheck.model import DecoderShape
from lightning_3d.strategies import ThreeDStrategy
from tests.harness import run_ranks

BOUND = 1.03
RUN_STEPS = 2000
"""Steps of a short real run, over which the traced ones are spread."""
TRACED_STEPS = 8
"""Steps at the start in which callbacks may trace in detail."""
SHAPE = DecoderShape(
    vocab_size=1024, dim=256, num_layers=4, num_heads=8, num_kv_heads=4, ffn_dim=768, sequence_length=128
)
BATCH_SIZE = 8
LAYOUTS: dict[str, tuple[int, Callable[[], Any]]] = {
    "ddp": (2, lambda: "ddp"),
    "dp2": (2, lambda: ThreeDStrategy(dp_shard=2, dp_replicate=1)),
    "pp2": (2, lambda: ThreeDStrategy(pp=2, dp_shard=1, dp_replicate=1, num_microbatches=4)),
}


def watchers(folder: str) -> list[pl.Callback]:
    """The callbacks with their defaults."""
    return [
        LinkCheck(dirpath=folder, print_tables=False),
        CommTrace(dirpath=folder, print_table=False),
        MemoryTrace(dirpath=folder),
        OOMAdvisor(dirpath=folder),
        StragglerMonitor(),
        ThroughputMonitor(),
    ]


class Turns(pl.Callback):
    """Passes the hooks of steps on to the watched callbacks in one of every two steps, and times all steps.

    The first steps are all watched: callbacks trace there.
    """

    HOOKS = (
        "on_train_batch_start on_before_backward on_after_backward on_before_optimizer_step on_before_zero_grad"
        " on_train_batch_end"
    ).split()

    def __init__(self, callbacks: Sequence[pl.Callback]) -> None:
        self.callbacks = callbacks
        self.seconds: list[tuple[bool, float]] = []
        self._is_on = True
        self._start = 0.0
        for name in ("setup", "on_fit_start", "on_train_start", "on_train_end", "teardown", "on_exception"):
            setattr(self, name, self._always(name))
        for name in self.HOOKS:
            setattr(self, name, self._in_turn(name))

    def _always(self, name: str) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            for callback in self.callbacks:
                getattr(callback, name)(*args, **kwargs)

        return call

    def _in_turn(self, name: str) -> Callable[..., None]:
        passed_on = self._always(name)

        def call(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
            if name == "on_train_batch_start":
                step = len(self.seconds)
                # on, off, off, on: in every pair either comes first as often
                self._is_on = step < TRACED_STEPS or step % 4 in (0, 3)
                dist.barrier()
                self._start = time.perf_counter()
            if self._is_on:
                passed_on(trainer, *args, **kwargs)
            if name == "on_train_batch_end":
                dist.barrier()
                self.seconds.append((self._is_on, time.perf_counter() - self._start))

        return call


def measure(layout: str, num_steps: int) -> list[tuple[bool, float]]:
    """Trains on this rank; whether each step was watched, and its seconds."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    world_size, strategy = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(1)
    size = (BATCH_SIZE, SHAPE.sequence_length + 1)
    steps = TRACED_STEPS + 2 * num_steps
    batches = [torch.randint(0, SHAPE.vocab_size, size, generator=generator) for _ in range(steps)]
    with tempfile.TemporaryDirectory() as folder:
        turns = Turns(watchers(folder))
        trainer = pl.Trainer(
            strategy=strategy(),
            devices=world_size,
            accelerator="cpu",
            max_epochs=1,
            logger=CSVLogger(folder),
            log_every_n_steps=20,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[turns],
        )
        trainer.fit(PlainModule(SHAPE), DataLoader(torch.stack(batches), batch_size=None))
    return turns.seconds


def ratios(seconds: Sequence[tuple[bool, float]]) -> tuple[float, float, float]:
    """Ratio of watched over plain steps that follow each other, of the slowest traced ones, and over a whole run."""
    steady = seconds[TRACED_STEPS:]
    plain = statistics.median(time_s for is_on, time_s in steady if not is_on)
    pairs = [sorted(pair, reverse=True) for pair in zip(steady[::2], steady[1::2], strict=False)]
    steadily = statistics.median(on[1] / off[1] for on, off in pairs)
    # The very first steps set things up, watched or not.
    traced = [time_s for _, time_s in seconds[2:TRACED_STEPS]]
    extra = sum(max(0.0, time_s / plain - steadily) for time_s in traced)
    return steadily, max(traced) / plain, steadily + extra / RUN_STEPS


def main(steps: int = 100, only: str = "") -> int:
    """Prints the ratio for several strategies.

    Args:
        steps: measured steps of each kind.
        only: measure only strategies whose name contains this text.
    """
    torch.set_num_threads(1)
    table = Table(
        title=f"step time with callbacks over without, median of {steps} pairs of steps, 2 processes"
    )
    heads = (
        "strategy",
        "without, ms",
        "steady",
        "slowest traced step",
        f"over {RUN_STEPS} steps",
        "bound",
        "",
    )
    for head in heads:
        table.add_column(head, justify="left" if head == "strategy" else "right")
    failed = 0
    for layout, (world_size, _) in LAYOUTS.items():
        if only not in layout:
            continue
        results = run_ranks(world_size, measure, layout, steps, init=False, timeout_s=600)
        steadily, traced, whole = ratios(results[0])
        passed = whole <= BOUND
        failed += not passed
        plain = statistics.median(time_s for is_on, time_s in results[0][TRACED_STEPS:] if not is_on)
        row = (f"{1e3 * plain:.1f}", f"{steadily:.3f}", f"{traced:.1f}", f"{whole:.3f}", f"{BOUND:.2f}")
        table.add_row(layout, *row, "ok" if passed else "FAIL")
    Console(width=110).print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(auto_cli(main, as_positional=False))
