# SPDX-License-Identifier: Apache-2.0
"""Step time of `Trainer(strategy="3d")` over the same step written by hand, and over ModelParallelStrategy.

Both sides run in the same processes and take turns step by step, so that whatever else the machine does hits both.
Prints a table of median ratios and exits non-zero when one exceeds its bound.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import logging
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from jsonargparse import auto_cli
from lightning.pytorch.strategies import ModelParallelStrategy
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.peers import HandParallelModule, PlainModule, fsdp_steps, pipeline_steps, tp_steps
from lightning_3d.selfcheck.model import DecoderShape
from lightning_3d.strategies import ThreeDStrategy
from tests.harness import run_ranks

SHAPE = DecoderShape(
    vocab_size=1024, dim=256, num_layers=4, num_heads=8, num_kv_heads=4, ffn_dim=768, sequence_length=128
)
WORLD_SIZE = 4
BATCH_SIZE = 8
NUM_MICROBATCHES = 4
WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One row: a layout of ours and its peer."""

    name: str
    options: dict[str, Any]
    peer: Callable[[list[Tensor]], Iterator[Any]]
    bound: float


def model_parallel_steps(batches: list[Tensor]) -> Iterator[None]:
    """Lightning's own ModelParallelStrategy at tp2 x dp2, one step at a time: its Trainer runs in a second thread."""
    go, done = threading.Semaphore(0), threading.Semaphore(0)
    failure: list[BaseException] = []

    class Turns(pl.Callback):
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            done.release()
            go.acquire()

    def run() -> None:
        go.acquire()
        try:
            strategy = ModelParallelStrategy(data_parallel_size=WORLD_SIZE // 2, tensor_parallel_size=2)
            _fit(HandParallelModule(SHAPE), strategy, Turns(), batches)
        except BaseException as error:
            failure.append(error)
        done.release()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    for _ in batches:
        go.release()
        done.acquire()
        if failure:
            raise failure[0]
        yield None
    go.release()


COMPARISONS = (
    Comparison(
        name="dp4, by hand",
        options={"dp_shard": 4, "dp_replicate": 1},
        peer=lambda batches: fsdp_steps(SHAPE, batches),
        bound=1.05,
    ),
    Comparison(
        name="tp2 dp2, by hand",
        options={"tp": 2, "dp_shard": 2, "dp_replicate": 1},
        peer=lambda batches: tp_steps(SHAPE, batches),
        bound=1.05,
    ),
    Comparison(
        name="pp2 dp2, by hand",
        options={"pp": 2, "dp_shard": 2, "dp_replicate": 1, "num_microbatches": NUM_MICROBATCHES},
        peer=lambda batches: pipeline_steps(SHAPE, batches, NUM_MICROBATCHES),
        bound=1.05,
    ),
    Comparison(
        name="tp2 dp2, ModelParallelStrategy",
        options={"tp": 2, "dp_shard": 2, "dp_replicate": 1},
        peer=model_parallel_steps,
        bound=1.00,
    ),
)


class Alternate(pl.Callback):
    """Times each step of ours, and a step of the peer behind it."""

    def __init__(self, peer: Iterator[Any]) -> None:
        self.peer = peer
        self.ours_s: list[float] = []
        self.peers_s: list[float] = []
        self._start = 0.0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Ends our step, which began when the peer's ended: data loading and Lightning's loop are ours."""
        dist.barrier()
        self.ours_s.append(time.perf_counter() - self._start)
        start = time.perf_counter()
        next(self.peer)
        dist.barrier()
        self.peers_s.append(time.perf_counter() - start)
        self._start = time.perf_counter()


def _fit(module: pl.LightningModule, strategy: Any, callback: pl.Callback, batches: list[Tensor]) -> None:
    trainer = pl.Trainer(
        strategy=strategy,
        devices=WORLD_SIZE,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[callback],
    )
    trainer.fit(module, DataLoader(torch.stack(batches), batch_size=None))


def _measure(comparison: Comparison, num_steps: int) -> tuple[list[float], list[float]]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    generator = torch.Generator().manual_seed(1)
    size = (BATCH_SIZE, SHAPE.sequence_length + 1)
    batches = [
        torch.randint(0, SHAPE.vocab_size, size, generator=generator) for _ in range(num_steps + WARM_UP)
    ]
    alternate = Alternate(comparison.peer(batches))
    _fit(PlainModule(SHAPE), ThreeDStrategy(**comparison.options), alternate, batches)
    return alternate.ours_s[WARM_UP:], alternate.peers_s[WARM_UP:]


def main(steps: int = 30, only: str = "") -> int:
    """Prints the ratio of every comparison.

    Args:
        steps: measured steps of each side.
        only: run only comparisons whose name contains this text.
    """
    torch.set_num_threads(1)
    table = Table(title=f"step time, median of {steps} interleaved steps, {WORLD_SIZE} processes")
    for column in ("layout, peer", "ours, ms", "peer, ms", "ratio", "bound", ""):
        table.add_column(column, justify="left" if column == "layout, peer" else "right")
    failed = 0
    for comparison in COMPARISONS:
        if only not in comparison.name:
            continue
        results = run_ranks(WORLD_SIZE, _measure, comparison, steps, init=False, timeout_s=600)
        ours, peers = results[0]
        ratio = statistics.median(a / b for a, b in zip(ours, peers, strict=True))
        passed = ratio <= comparison.bound
        failed += not passed
        table.add_row(
            comparison.name,
            f"{1e3 * statistics.median(ours):.1f}",
            f"{1e3 * statistics.median(peers):.1f}",
            f"{ratio:.3f}",
            f"{comparison.bound:.2f}",
            "ok" if passed else "FAIL",
        )
    Console(width=110).print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(auto_cli(main, as_positional=False))
