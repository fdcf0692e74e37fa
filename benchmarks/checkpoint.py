# SPDX-License-Identifier: Apache-2.0
"""Measures how long a save stops training, in the background and not, and how fast it writes.

Two ranks (FSDP2) train a model with 403 MB of weights and optimizer state. The stall of a save is the time inside
`Trainer.save_checkpoint` plus the time that the next optimizer step waits for the copy. The first save in the
background, which allocates the copy's memory, is shown apart. Fails when the median stall in the background is more
than 0.10 of the other, or when there is less state than 400 MB.

```
python benchmarks/checkpoint.py                # about 2 minutes on two quiet cores
```
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d.checkpoint import SaveOptions
from lightning_3d.plan import ParallelPlan
from lightning_3d.selfcheck.launch import be_quiet, run_forked
from lightning_3d.strategies import ThreeDStrategy

BOUND = 0.10
LAYERS, WIDTH, BATCH = 8, 2048, 64
STEPS_BETWEEN = 2


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Saves(pl.Callback):
    """Saves after every other step and measures what training waits for."""

    def __init__(self, folder: Path, in_background: bool) -> None:
        self.folder, self.in_background = folder, in_background
        self.stalls: list[float] = []
        self.calls: list[float] = []
        self.reports: list[float] = []
        self.steps: list[tuple[bool, float]] = []
        self.waits = 0
        self._began = 0.0
        self._busy = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        strategy: ThreeDStrategy = trainer.strategy
        wait = strategy.state_may_change

        def timed() -> None:
            begin = time.perf_counter()
            wait()
            self.waits += 1
            if self.stalls:
                self.stalls[-1] += time.perf_counter() - begin

        strategy.state_may_change = timed  # type: ignore[method-assign]

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        writer = trainer.strategy.checkpoint_writer
        self._busy = writer is not None and writer.in_flight is not None
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps.append((self._busy, time.perf_counter() - self._began))
        if trainer.global_step % STEPS_BETWEEN:
            return
        trainer.strategy.finish_saving()  # the wait for an earlier save is not this save's
        dist.barrier()
        begin = time.perf_counter()
        path = self.folder / f"{trainer.global_step}.ckpt"
        trainer.save_checkpoint(path, storage_options=SaveOptions(background=self.in_background))
        self.calls.append(time.perf_counter() - begin)
        self.stalls.append(self.calls[-1])


def measure(folder: Path, saves: int) -> dict[str, Any]:
    """Both ways on this rank; collective."""
    be_quiet()
    result: dict[str, Any] = {}
    for in_background in (False, True):
        callback = Saves(folder / str(in_background), in_background)
        trainer = pl.Trainer(
            strategy=ThreeDStrategy(pp=1, dp_replicate=1, tp=1, dp_shard=2),
            devices=2,
            accelerator="cpu",
            max_steps=saves * STEPS_BETWEEN + 1,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback],
        )
        module = Model()
        trainer.fit(module, DataLoader([torch.randn(WIDTH) for _ in range(8 * BATCH)], batch_size=BATCH))
        assert isinstance(trainer.strategy, ThreeDStrategy)
        writer = trainer.strategy.checkpoint_writer
        result["background" if in_background else "foreground"] = {
            "stalls": callback.stalls,
            "calls": callback.calls,
            "steps": callback.steps,
            "waits": callback.waits,
            "seconds": [] if writer is None else [report.seconds for report in writer.reports],
        }
    return result


def torch_save_s(folder: Path) -> float:
    """Seconds of `torch.save` and fsync of as much state, in one process."""
    state = {str(i): torch.randn(WIDTH, WIDTH) for i in range(3 * LAYERS)}
    times = []
    for number in range(3):
        begin = time.perf_counter()
        with (folder / f"{number}.pt").open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        times.append(time.perf_counter() - begin)
        (folder / f"{number}.pt").unlink()
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to write; a temporary folder if not given")
    options: Any = parser.parse_args()
    plan = ParallelPlan(pp=1, dp_replicate=1, dp_shard=2, tp=1)
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.folder) as name:
        folder = Path(name)
        result = run_forked(plan, lambda: measure(folder, options.saves))
        files = (folder / "False" / f"{STEPS_BETWEEN}.ckpt").iterdir()
        megabytes = sum(file.stat().st_size for file in files) / 1e6
        plain_s = torch_save_s(folder)
    front, back = result["foreground"], result["background"]
    front_s, back_s = statistics.median(front["stalls"]), statistics.median(back["stalls"][1:])
    copy_s = statistics.median(s - c for s, c in zip(back["stalls"][1:], back["calls"][1:], strict=True))
    idle = [seconds for busy, seconds in back["steps"] if not busy]
    beside = [seconds for busy, seconds in back["steps"] if busy]
    print(f"state: {megabytes:.0f} MB over 2 ranks")
    print(f"stall of a save in the foreground: {front_s:.3f} s (median of {len(front['stalls'])})")
    print(f"stall in the background:           {back_s:.3f} s (first {back['stalls'][0]:.3f} s)")
    print(
        f"  of it, in the call: {back_s - copy_s:.3f} s; waiting for the copy before the optimizer: {copy_s:.3f} s"
    )
    print(f"ratio: {back_s / front_s:.3f} (bound {BOUND})")
    print(f"whole after {statistics.median(back['seconds']):.2f} s in the background")
    if beside and idle:
        print(
            f"a step beside the writer: {statistics.median(beside):.2f} s, alone {statistics.median(idle):.2f} s"
        )
    print(
        f"bandwidth: {megabytes / front_s:.0f} MB/s; plain torch.save with fsync: {megabytes / plain_s:.0f} MB/s"
    )
    passed = back_s <= BOUND * front_s and megabytes >= 400 and back["waits"] > 0
    print("ok" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
