# SPDX-License-Identifier: Apache-2.0
"""Kills one rank with SIGKILL at a random moment of training, again and again; all others must end and say which.

Eight ranks train a small model with validation and background checkpoints, pp 2 x dp_shard 2 x tp 2. Fails when a rank
that is left does not end within 30 s, ends with exit code 0, or does not name the rank that was killed.

```
python benchmarks/kill_rank.py               # 20 kills, about 5 minutes on two cores
python benchmarks/kill_rank.py --kills 2 --pp 1 --dp-shard 2 --tp 1
```
"""

import argparse
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.forked import start_ranks
from lightning_3d.strategies import ThreeDStrategy

WIDTH = 32
START_LIMIT_S = 120
END_LIMIT_S = 30
SPREAD_S = 3.0
"""Kills come up to so long after all ranks train."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(self.up_proj(x).tanh())


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def loss_of(self, batch: Tensor) -> Tensor:
        x = batch
        for layer in self.layers:
            x = layer(x)
        return (x - batch.flip(-1)).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss_of(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Started(pl.Callback):
    """Leaves a file once this rank has done a step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, *_: Any) -> None:
        self.path.touch()


def train(degrees: dict[str, int], folder: Path, rank: int) -> None:
    """One rank, until it is ended."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    trainer = pl.Trainer(
        strategy=ThreeDStrategy(
            **degrees, dp_replicate=1, num_microbatches=2 if degrees["pp"] > 1 else 1, save_async=True
        ),
        devices=world_of(degrees),
        accelerator="cpu",
        max_epochs=-1,
        val_check_interval=10,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            Started(folder / f"started-{rank}"),
            ModelCheckpoint(folder / "saved", filename="{step}", every_n_train_steps=7),
        ],
    )
    data = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(400)]
    trainer.fit(Model(), DataLoader(data, batch_size=4), DataLoader(data[:16], batch_size=4))


def world_of(degrees: dict[str, int]) -> int:
    return degrees["pp"] * degrees["dp_shard"] * degrees["tp"]


@dataclass
class Report:
    """What the kills showed."""

    killed: list[int] = field(default_factory=list)
    """Which rank, of each kill."""
    seconds: list[float] = field(default_factory=list)
    """From each kill to the end of the last rank that was left."""
    problems: list[str] = field(default_factory=list)


def kill_ranks(kills: int, degrees: dict[str, int], seed: int = 0) -> Report:
    """Starts a run and kills one of its ranks, `kills` times."""
    report, generator = Report(), random.Random(seed)
    for number in range(kills):
        folder = Path(
            tempfile.mkdtemp(prefix="kill-rank-")
        )  # a TemporaryDirectory would go with the first rank
        pids = start_ranks(world_of(degrees), lambda rank: train(degrees, folder, rank), outputs=folder)  # noqa: B023
        try:
            _one_kill(number, pids, folder, generator, report)
        finally:
            for pid in pids:  # each is this process's child until it is waited for
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            shutil.rmtree(folder)
    return report


def _one_kill(number: int, pids: list[int], folder: Path, generator: random.Random, report: Report) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while len(list(folder.glob("started-*"))) < len(pids):
        if time.monotonic() > deadline or any(_exit_code(pid) is not None for pid in pids):
            report.problems.append(f"kill {number}: the run did not start\n{_output(folder, 0)}")
            return
        time.sleep(0.02)
    victim = generator.randrange(len(pids))
    time.sleep(generator.uniform(0.0, SPREAD_S))
    start_s = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    left = [rank for rank in range(len(pids)) if rank != victim]
    while time.monotonic() - start_s < END_LIMIT_S and any(_exit_code(pids[rank]) is None for rank in left):
        time.sleep(0.02)
    report.killed.append(victim)
    report.seconds.append(time.monotonic() - start_s)
    for rank in left:
        code, said = _exit_code(pids[rank]), _output(folder, rank)
        what = f"kill {number} of rank {victim}: rank {rank}"
        if code is None:
            report.problems.append(f"{what} did not end within {END_LIMIT_S} s\n{said}")
        elif code == 0:
            report.problems.append(f"{what} ended with exit code 0")
        elif f"rank {victim} " not in said:
            report.problems.append(f"{what} does not name it\n{said}")


def _exit_code(pid: int) -> int | None:
    """The exit code of a child that has ended, which stays to be waited for; None while it runs."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return None if ended is None else ended.si_status


def _output(folder: Path, rank: int) -> str:
    return (folder / f"output-{rank}").read_text(errors="replace")[-3000:]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    for axis in ("pp", "dp_shard", "tp"):
        parser.add_argument(f"--{axis.replace('_', '-')}", type=int, default=2)
    options: Any = parser.parse_args()
    start_s = time.monotonic()
    degrees = {"pp": options.pp, "dp_shard": options.dp_shard, "tp": options.tp}
    report = kill_ranks(options.kills, degrees, options.seed)
    print(f"killed ranks {report.killed} of {world_of(degrees)}")
    longest, all_s = max(report.seconds, default=0.0), sum(report.seconds)
    mean = all_s / max(1, len(report.seconds))
    print(f"all others had ended after {mean:.1f} s on average, {longest:.1f} s at most")
    print(*report.problems, sep="\n")
    print(f"{'FAIL' if report.problems else 'ok'}, {time.monotonic() - start_s:.0f} s")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
