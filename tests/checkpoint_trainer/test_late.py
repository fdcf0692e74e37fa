# SPDX-License-Identifier: Apache-2.0
"""Resuming where something comes late: a module used after some steps; a progress bar that begins in the middle."""

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from tests.engine.runs import (
    PP2,
    PP2_DP2,
    Batches,
    Regression,
    be_quiet,
    make_trainer,
    mlp,
    name_of,
    relative_error,
    seeded,
    strategy_of,
    vector_batches,
    whole,
    world_of,
)
from tests.harness import run_ranks

DP2 = {"dp_shard": 2}
BATCHES = vector_batches(5)
FIRST_USED = 2
"""Optimizer steps before the tower is used."""


class LateTower(Regression):
    """A module beside the layers that has neither gradients nor optimizer state at first."""

    def __init__(self):
        super().__init__(optimizer="adamw")
        self.tower = nn.Linear(16, 16)

    def training_step(self, batch, batch_idx):
        out = self.model(batch["x"])
        if batch_idx >= FIRST_USED:
            out = out + self.tower(batch["x"])
        return F.mse_loss(out, batch["y"])


def train(layout, folder, resume=None):
    """Parameters after five steps; every step is saved where nothing is resumed."""
    be_quiet()
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(
        strategy_of(layout),
        world_of(layout),
        callbacks=[] if resume else [keep],
        enable_checkpointing=resume is None,
        max_steps=len(BATCHES),
    )
    module = seeded(LateTower)
    trainer.fit(module, Batches(BATCHES), ckpt_path=folder / resume if resume else None)
    dist.barrier()
    return {name: whole(parameter) for name, parameter in module.named_parameters()}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("before", "after"), [(DP2, DP2), (PP2, DP2), (DP2, PP2_DP2)], ids=lambda layout: name_of(layout)
)
def test_a_module_that_is_used_late_resumes_before_and_after(before, after, tmp_path):
    by_rank = run_ranks(world_of(before), train, before, tmp_path, init=False, timeout_s=90)
    expected = {name: value for each in by_rank for name, value in each.items()}
    start = dict(seeded(LateTower).named_parameters())
    assert relative_error(expected["tower.weight"], start["tower.weight"].detach()) > 1e-3

    def go_on():
        return [train(after, tmp_path, f"step={step}.ckpt") for step in (1, FIRST_USED + 2)]

    by_rank = run_ranks(world_of(after), go_on, init=False, timeout_s=90)
    for resumed in (run for runs in by_rank for run in runs):
        for name, value in resumed.items():
            assert relative_error(value, expected[name]) < 5e-5, name


class Totals(pl.Callback):
    """What the bar shows, on the rank that has one."""

    def __init__(self):
        self.shown = []

    def on_train_batch_end(self, trainer, *_):
        bar = trainer.progress_bar_callback
        if trainer.is_global_zero:
            self.shown.append((bar.train_progress_bar.n, bar.train_progress_bar.total))


def test_a_resumed_progress_bar_shows_the_total(tmp_path):
    def body(resume):
        be_quiet()
        totals = Totals()
        keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        callbacks = [pl.callbacks.TQDMProgressBar(), totals, *([] if resume else [keep])]
        trainer = make_trainer(
            strategy_of(PP2),
            2,
            callbacks=callbacks,
            enable_progress_bar=True,
            enable_checkpointing=not resume,
        )
        trainer.fit(mlp(), Batches(BATCHES), ckpt_path=resume)
        return totals.shown

    first = run_ranks(2, body, None, init=False)[0]
    assert {total for _, total in first} == {len(BATCHES)}
    resumed = run_ranks(2, body, tmp_path / "step=2.ckpt", init=False)[0]
    assert {total for _, total in resumed} == {len(BATCHES)}
    assert len(resumed) == len(BATCHES) - 2
