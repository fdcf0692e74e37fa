# SPDX-License-Identifier: Apache-2.0
"""When to stop, save and validate: ranks whose clocks differ decide together, one that is alone is an error."""

import os
import time
from datetime import timedelta

import lightning.pytorch as pl
import pytest
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_3d.errors import SupportError
from tests.engine.runs import (
    DP2,
    Batches,
    Layout,
    Regression,
    be_quiet,
    make_trainer,
    mlp,
    name_of,
    strategy_of,
    vector_batches,
)
from tests.harness import RanksError, RanksTimeoutError, run_ranks

PP2: Layout = {"pp": 2, "num_microbatches": 2}


class Validated(Regression):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self.model(batch["x"]), batch["y"]))


class LateClock(pl.Callback):
    """Rank 1 begins to count half a second later; remembers the steps at which something happened."""

    def __init__(self):
        self.validated, self.saved = [], []

    def on_train_start(self, trainer, pl_module):
        if trainer.global_rank == 1:
            time.sleep(0.5)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0 and trainer.global_rank == 1 and hasattr(trainer, "_last_val_time"):
            trainer._last_val_time += 0.2

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        time.sleep(0.04)

    def on_validation_end(self, trainer, pl_module):
        self.validated.append(trainer.global_step)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.saved.append(trainer.global_step)


@pytest.mark.parametrize("layout", [DP2, PP2], ids=name_of)
def test_clocks_that_differ_decide_together(layout, tmp_path):
    def body():
        be_quiet()
        every = timedelta(seconds=0.3)
        runs = {
            "max_time": {"max_time": timedelta(seconds=0.8), "max_epochs": -1, "limit_val_batches": 0},
            "validation": {"val_check_interval": every, "check_val_every_n_epoch": None},
            "checkpoint": {
                "callbacks": [ModelCheckpoint(tmp_path, train_time_interval=every)],
                "enable_checkpointing": True,
                "limit_val_batches": 0,
            },
        }
        seen = {}
        for name, options in runs.items():
            clock = LateClock()
            callbacks = [clock, *options.pop("callbacks", ())]
            trainer = make_trainer(
                strategy_of(layout), 2, callbacks=callbacks, num_sanity_val_steps=0, **options
            )
            trainer.fit(mlp(cls=Validated), Batches(vector_batches(30)))
            seen[name] = trainer.global_step, clock.validated, clock.saved
        return seen

    first, second = run_ranks(2, body, init=False, timeout_s=40)
    assert first == second
    assert first["max_time"][0] > 0
    assert len(first["validation"][1]) > 1
    assert len(first["checkpoint"][2]) > 1


class Stops(pl.Callback):
    """Sets `trainer.should_stop` in one hook of the first epoch, on the given ranks."""

    def __init__(self, hook, ranks):
        setattr(self, hook, lambda trainer, *_: self.stop(trainer))
        self.ranks = ranks

    def stop(self, trainer):
        if trainer.current_epoch == 0 and not trainer.sanity_checking and trainer.global_step > 1:
            trainer.should_stop = trainer.should_stop or int(os.environ["RANK"]) in self.ranks


HOOKS = ("on_train_batch_end", "on_validation_end", "on_train_epoch_end")


def fit_until_stop(layout, hook, ranks):
    be_quiet()
    trainer = make_trainer(strategy_of(layout), 2, callbacks=[Stops(hook, ranks)], max_epochs=3)
    trainer.fit(mlp(cls=Validated), Batches(vector_batches(4)))
    return trainer.global_step


@pytest.mark.parametrize(
    ("layout", "hook", "rank"),
    [(DP2, HOOKS[0], 1), (DP2, HOOKS[1], 1), (DP2, HOOKS[2], 0), (PP2, HOOKS[0], 0)],
    ids=lambda value: name_of(value) if isinstance(value, dict) else str(value),
)
def test_one_rank_that_stops_alone_ends_all(layout, hook, rank):
    with pytest.raises(RanksError) as error:
        run_ranks(2, fit_until_stop, layout, hook, {rank}, init=False, timeout_s=20)
    assert not isinstance(error.value, RanksTimeoutError), str(error.value)
    for failure in error.value.failures.values():
        text = f"{failure.message}{failure.output}"
        assert f"rank {rank} (" in text
        assert "stops because trainer.should_stop is set, and another rank trains on" in text


@pytest.mark.parametrize("layout", [DP2, PP2], ids=name_of)
def test_all_ranks_stop_together(layout):
    def body():
        return [fit_until_stop(layout, hook, {0, 1}) for hook in HOOKS]

    assert run_ranks(2, body, init=False, timeout_s=40) == [[2, 4, 4]] * 2


DIFFERENT = {
    "max_epochs": (
        lambda rank: {"max_epochs": 1 + rank},
        "max_epochs=1 on rank 0, but max_epochs=2 on rank 1",
    ),
    "clipping": (
        lambda rank: {"gradient_clip_val": 1.0 if rank else None},
        "gradient_clip_val=None on rank 0, but gradient_clip_val=1.0 on rank 1",
    ),
    "checkpoints on rank 0": (
        lambda rank: {"callbacks": [] if rank else [ModelCheckpoint()], "enable_checkpointing": not rank},
        r"callbacks=\[ModelCheckpoint.*\] on rank 0, but callbacks=\[\] on rank 1",
    ),
}


@pytest.mark.parametrize("layout", [DP2, PP2], ids=name_of)
def test_trainers_that_differ_between_ranks_are_refused_on_all(layout):
    def body():
        be_quiet()
        for options, words in DIFFERENT.values():
            trainer = make_trainer(strategy_of(layout), 2, **options(int(os.environ["RANK"])))
            with pytest.raises(SupportError, match=f"different Trainers: {words}"):
                trainer.fit(mlp(), Batches(vector_batches(2)))

    run_ranks(2, body, init=False, timeout_s=20)


def test_other_callbacks_may_be_on_one_rank_alone():
    def body():
        be_quiet()
        callbacks = [] if os.environ["RANK"] == "1" else [pl.Callback()]
        trainer = make_trainer(strategy_of(DP2), 2, callbacks=callbacks)
        trainer.fit(mlp(), Batches(vector_batches(2)))
        return trainer.global_step

    assert run_ranks(2, body, init=False, timeout_s=20) == [2, 2]
