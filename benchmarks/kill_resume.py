# SPDX-License-Identifier: Apache-2.0
"""Kills training with SIGKILL at random moments of background saves, and resumes it each time with ckpt_path="last".

Two ranks train a model with dropout and save every step in the background. After each kill a new run must start from
the newest whole checkpoint, and every loss that it computes must be, bit for bit, that of a run that was never killed.
Fails when one is not, when a run does not start, or when a half-written folder has a final name.

```
python benchmarks/kill_resume.py               # 50 kills, about 5 minutes on two cores
python benchmarks/kill_resume.py --kills 10
```
"""

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.forked import start_ranks
from lightning_3d.callbacks import AsyncCheckpoint
from lightning_3d.checkpoint import is_checkpoint, newest_checkpoint, read_metadata
from lightning_3d.checkpoint.commit import recover_all
from lightning_3d.strategies import ThreeDStrategy

RANKS = 2
WIDTH = 256
LIMIT_S = 120


class Noise(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


class Model(pl.LightningModule):
    """About 3 MB of weights and optimizer state; appends every loss to a file."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(4))
        self.log_path = log

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = x + layer(x).tanh()
        loss = (x - batch.flip(1)).square().mean()
        with self.log_path.with_suffix(f".{self.global_rank}").open("a") as stream:
            stream.write(f"{self.trainer.global_step} {float(loss).hex()}\n")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(folder: Path, log: Path, max_steps: int, save: bool) -> None:
    """One rank's fit; goes on where the newest checkpoint is."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    keep = AsyncCheckpoint(
        dirpath=folder,
        filename="{step}",
        every_n_train_steps=1,
        save_top_k=1,
        save_last="link",
        show_progress=False,
    )
    trainer = pl.Trainer(
        strategy=ThreeDStrategy(pp=1, dp_replicate=1, tp=1, dp_shard=RANKS),
        devices=RANKS,
        accelerator="cpu",
        max_steps=max_steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=save,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[keep] if save else [],
    )
    trainer.fit(
        Model(log), DataLoader(Noise(), batch_size=8, shuffle=True), ckpt_path="last" if save else None
    )


def end(pids: list[int]) -> list[int]:
    """Kills what is left and returns the exit codes."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def wait_for(condition: Callable[[], bool], pids: list[int]) -> bool:
    """Whether the condition came true before a rank ended by itself or time was up."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if condition():
            return True
        if any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids):
            return condition()
        time.sleep(0.005)
    return False


@dataclass
class Report:
    """What the kills showed."""

    kills: int = 0
    in_flight: int = 0
    """Kills that left an unfinished save behind."""
    problems: list[str] = field(default_factory=list)
    resumed_at: list[int] = field(default_factory=list)
    compared: int = 0
    """Losses compared with the run that was never killed."""


def losses(log: Path, rank: int) -> list[tuple[int, str]]:
    path = log.with_suffix(f".{rank}")
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), value) for step, value in (line.split() for line in lines if line.count(" ") == 1)]


def kill_and_resume(kills: int, seed: int = 0) -> Report:
    """Kills and resumes; then compares with a run that was left alone."""
    report, generator = Report(), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="kill-resume-") as name:
        root = Path(name)
        folder = root / "checkpoints"
        for number in range(kills):
            one_kill(root, folder, number, generator, report)
        seen = {
            (rank, step, value)
            for number in range(kills)
            for rank in range(RANKS)
            for step, value in losses(root / f"run{number}", rank)
        }
        last = max((step for _, step, _ in seen), default=0)
        pids = start_ranks(RANKS, lambda rank: train(folder, root / "alone", last + 1, save=False))
        wait_for(lambda: len(losses(root / "alone", RANKS - 1)) > last, pids)
        time.sleep(0.2)
        end(pids)
        alone = {(rank, step, value) for rank in range(RANKS) for step, value in losses(root / "alone", rank)}
        report.compared = len(seen)
        report.problems += [f"another loss at {item}" for item in sorted(seen - alone)]
    return report


def one_kill(root: Path, folder: Path, number: int, generator: random.Random, report: Report) -> None:
    """Starts a run, waits until it has begun, kills it, looks at what is there."""
    if folder.exists():
        recover_all(folder)  # a save killed after its manifest, before its rename, is whole and counts
    newest = newest_checkpoint(folder) if folder.exists() else None
    expected: int = read_metadata(newest)["global_step"] if newest else 0
    log = root / f"run{number}"
    pids = start_ranks(RANKS, lambda rank: train(folder, log, 10**6, save=True))
    if not wait_for(lambda: len(losses(log, 0)) > 0, pids):
        report.problems.append(f"run {number} did not start")
    if number == 0:  # there is something to resume from
        wait_for(lambda: newest_checkpoint(folder) is not None, pids)
    time.sleep(generator.uniform(0.0, 1.0))
    end(pids)
    report.kills += 1
    report.in_flight += any(
        path.name.startswith(".") and ".saving-" in path.name for path in folder.iterdir()
    )
    begun = losses(log, 0)
    report.resumed_at.append(begun[0][0] if begun else -1)
    if begun and begun[0][0] != expected:
        report.problems.append(
            f"run {number} began at step {begun[0][0]}, the newest checkpoint was of {expected}"
        )
    for path in folder.glob("*.ckpt"):
        if not is_checkpoint(path):
            report.problems.append(f"{path.name} has its name and is not whole after kill {number}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options: Any = parser.parse_args()
    start_s = time.monotonic()
    report = kill_and_resume(options.kills, options.seed)
    print(f"{report.kills} kills, {report.in_flight} of them in the middle of a save")
    print(f"resumed at steps {report.resumed_at}")
    print(f"{report.compared} losses compared with the run that was never killed")
    print(*report.problems, sep="\n")
    print(f"{'FAIL' if report.problems else 'ok'}, {time.monotonic() - start_s:.0f} s")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
