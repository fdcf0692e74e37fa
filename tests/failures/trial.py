# SPDX-License-Identifier: Apache-2.0
"""A tiny run in which one rank fails where it is told: `python -m tests.failures.trial LAYOUT FAILURE FOLDER`."""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, Dataset

from tests.engine.runs import be_quiet, make_trainer, strategy_of, token_loss, world_of
from tests.models import decoder

STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Trial:
    failure: str
    rank: int
    """Which rank fails."""
    folder: Path

    def meets(self, where: str) -> bool:
        return where == self.failure and int(os.environ.get("LOCAL_RANK", 0)) == self.rank

    def fail(self, where: str) -> None:
        if self.meets(where):
            raise ValueError(f"on purpose in {where}")


class Samples(Dataset):
    def __init__(self, trial: Trial) -> None:
        self.trial = trial

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index > 16:
            self.trial.fail("dataset")
        ids = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(index))
        return {"ids": ids, "labels": ids}


class Module(pl.LightningModule):
    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.trial = trial
        self.model = None

    def configure_model(self):
        self.trial.fail("configure_model")
        if self.model is None:
            self.model = decoder()

    def train_dataloader(self):
        return DataLoader(Samples(self.trial), batch_size=4)

    val_dataloader = train_dataloader

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.trial.fail("training_step")
        loss = token_loss(self.model(batch["ids"]), batch["labels"])
        self.log("loss", loss)
        if self.trial.failure == "monitor of rank 0" and self.global_rank == 0:
            self.log("mine", loss, rank_zero_only=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.trial.fail("validation_step")
        self.log("val_loss", token_loss(self.model(batch["ids"]), batch["labels"]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Failing(pl.Callback):
    """What fails outside the module."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.trial.fail("checkpoint hook")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx != 1:
            return
        failure, first = self.trial.failure, trainer.is_global_zero
        if self.trial.meets("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if failure == "kill rank 0" and first:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.trial.meets("exit"):
            os._exit(0)
        if failure == "save on rank 0" and first:
            trainer.save_checkpoint(self.trial.folder / "lonely.ckpt")
        if failure == "rank_zero_only save":
            rank_zero_only(trainer.save_checkpoint)(self.trial.folder / "lonely.ckpt")
        if self.trial.meets("sigterm"):
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGTERM)).start()
        if failure == "forward on the last stage" and first:
            pl_module.model(batch["ids"])

    def on_train_end(self, trainer, pl_module):
        if self.trial.failure == "save at the end" and trainer.is_global_zero:
            trainer.save_checkpoint(self.trial.folder / "lonely.ckpt")
        if self.trial.meets("late"):
            time.sleep(1)
            raise ValueError("on purpose in late")


def train(layout: dict[str, int], failure: str, folder: Path) -> int:
    """Trains until something happens.

    Returns:
        Optimizer steps done.
    """
    be_quiet()
    torch.set_num_threads(1)
    world = world_of(layout)
    trial = Trial(failure=failure, rank=world - 2 if world > 2 else world - 1, folder=folder)
    keep = ModelCheckpoint(
        folder,
        filename="{step}",
        every_n_train_steps=STEPS,
        save_on_exception=failure in ("sigterm", "training_step", "saves on the way out"),
        monitor="mine" if failure == "monitor of rank 0" else None,
    )
    trainer = make_trainer(
        strategy_of(layout),
        world,
        max_steps=100 if failure == "sigterm" else STEPS,
        max_epochs=-1,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        val_check_interval=STEPS,
        check_val_every_n_epoch=None,
        callbacks=[keep, Failing(trial)],
        enable_checkpointing=True,
        use_distributed_sampler=True,
    )
    trainer.fit(Module(trial))
    return trainer.global_step


if __name__ == "__main__":
    print("finished after", train(json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3])), flush=True)
