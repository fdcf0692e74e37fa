# SPDX-License-Identifier: Apache-2.0
"""A resumed run reads the next unseen sample, at any number of replicas, and draws the same random numbers."""

import random
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, RandomSampler

from tests.checkpoint_trainer.samples import (
    Numbered,
    every,
    everywhere,
    loader,
    on_ranks,
    train,
    watched,
)
from tests.engine.runs import Layout

ONE: Layout = {}
DP2: Layout = {"dp_shard": 2}
DP4: Layout = {"dp_replicate": 2, "dp_shard": 2}
TP2: Layout = {"tp": 2}

pytestmark = pytest.mark.filterwarnings("ignore")


def run(layout: Layout, folder: Path, resume: str | None = None, **options: Any) -> list[list[int]]:
    """Samples of each step of a shuffled fit of 20 samples over 3 epochs (5 batches each)."""
    options = {"max_epochs": 3, **options}
    workers = options.pop("workers", 0)

    def body() -> list[list[int]]:
        callbacks = (
            []
            if resume
            else [every(3, folder), ModelCheckpoint(folder, filename="epoch{epoch}", save_top_k=-1)]
        )
        data = loader(20, layout, shuffle=True, num_workers=workers)
        path = folder / resume if resume else None
        module, _ = train(layout, data, callbacks=callbacks, resume=path, **options)
        return everywhere(module.seen)

    return on_ranks(layout, body)[0]


@pytest.mark.parametrize("limit", [{}, {"max_steps": 15}], ids=["epochs", "steps"])
def test_any_number_of_replicas(limit: dict[str, int], tmp_path: Path) -> None:
    whole = run(DP2, tmp_path, **limit)
    assert len(whole) == 15
    assert sorted(i for batch in whole[:5] for i in batch) == list(range(20))
    assert whole[:5] != whole[5:10]
    for layout, name, step in (
        (DP2, "step=3.ckpt", 3),
        (ONE, "step=3.ckpt", 3),
        (DP4, "step=9.ckpt", 9),
        (DP2, "epochepoch=0.ckpt", 5),
        (ONE, "epochepoch=1.ckpt", 10),
        (TP2, "step=12.ckpt", 12),
    ):
        assert run(layout, tmp_path, name, **limit) == whole[step:], (layout, name)
    assert run(ONE, tmp_path, "step=9.ckpt", workers=1, **limit) == whole[9:]


def test_random_sampler_and_dropout_go_on(tmp_path: Path) -> None:
    """Without a distributed sampler the order comes from the global generator: it is restored, and so is dropout."""
    layout = TP2

    def body(resume: str | None, seed: int) -> Any:
        random.seed(seed), numpy.random.seed(seed), torch.manual_seed(seed)
        data = DataLoader(Numbered(12), batch_size=4, sampler=RandomSampler(range(12)))
        callbacks = (
            []
            if resume
            else [every(1, tmp_path), ModelCheckpoint(tmp_path, filename="end{epoch}", save_top_k=-1)]
        )
        module, _ = train(
            layout,
            data,
            module=watched(0.5),
            callbacks=callbacks,
            resume=tmp_path / resume if resume else None,
            use_distributed_sampler=False,
            max_epochs=3,
        )
        return (
            everywhere(module.seen),
            module.losses,
            [random.random(), numpy.random.rand(), torch.rand(1).item()],
        )

    seen, losses, drawn = on_ranks(layout, lambda: body(None, 1))[0]
    assert seen[:3] != seen[3:6]
    for name, step in (("step=2.ckpt", 2), ("endepoch=0.ckpt", 3), ("step=4.ckpt", 4)):
        resumed = on_ranks(layout, lambda name=name: body(name, 2))[0]
        assert resumed[0] == seen[step:], name
        assert resumed[1] == losses[step:], name
        assert resumed[2] == drawn, name


def test_another_layout_says_that_random_states_are_lost(tmp_path: Path) -> None:
    run(TP2, tmp_path)

    class Loud(pl.Callback):
        def on_fit_start(self, *_: Any) -> None:
            warnings.simplefilter("always")

    def body() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            train(ONE, loader(20, ONE), callbacks=[Loud()], resume=tmp_path / "step=3.ckpt", max_epochs=1)
        return [str(warning.message) for warning in caught]

    messages = on_ranks(ONE, body)[0]
    assert any("random states are those of tp=2 and cannot be those of one process" in m for m in messages)
    assert not any("dataloader is not resumable" in message for message in messages)


class Stateful(DataLoader[Any]):
    """A loader with a state of its own: how many batches it gave."""

    given = 0
    skip = 0

    def __iter__(self) -> Any:
        self.given, skip, self.skip = self.skip, self.skip, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= skip:
                self.given += 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["given"]


def test_counters_of_a_stateful_loader(tmp_path: Path) -> None:
    """Save every 3 steps, 10 batches an epoch, 2 of them a step: validation and samples as if it never stopped."""

    def body(resume: str | None) -> Any:
        data = Stateful(Numbered(60), batch_size=2)
        module, trainer = train(
            DP2,
            data,
            val=DataLoader(Numbered(8), batch_size=2),
            callbacks=[every(3, tmp_path)] if not resume else [],
            resume=tmp_path / resume if resume else None,
            limit_train_batches=10,
            accumulate_grad_batches=2,
            val_check_interval=4,
            max_epochs=2,
            use_distributed_sampler=False,
        )
        return module.seen, module.validated_at, trainer.global_step

    seen, validated, steps = on_ranks(DP2, lambda: body(None))[1]
    resumed = on_ranks(DP2, lambda: body("step=3.ckpt"))[1]
    assert resumed[0] == seen[6:]
    assert resumed[1] == [step for step in validated if step > 3]
    assert resumed[2] == steps == 10


def test_another_global_batch(tmp_path: Path) -> None:
    """Samples are counted, not batches: after 3 batches of 4, the epoch goes on with sample 12."""
    whole = run(DP2, tmp_path, max_epochs=1)

    def body() -> Any:
        module, trainer = train(
            DP2, loader(20, DP2, 2, shuffle=True), resume=tmp_path / "step=3.ckpt", max_epochs=1
        )
        return everywhere(module.seen), trainer.fit_loop.epoch_loop.batch_progress.current.completed

    seen, batches = on_ranks(DP2, body)[0]
    assert [len(batch) for batch in seen] == [2] * 4
    assert sorted(i for batch in seen for i in batch) == sorted(i for batch in whole[3:] for i in batch)
    assert batches == 10
