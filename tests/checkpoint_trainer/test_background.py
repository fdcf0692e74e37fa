# SPDX-License-Identifier: Apache-2.0
"""Saving in the background through the Trainer: nothing is lost, whatever ends the run, and nothing waits."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_3d.callbacks import AsyncCheckpoint
from lightning_3d.checkpoint import (
    async_save,
    is_checkpoint,
    load_full_state_dict,
    newest_checkpoint,
    read_metadata,
)
from lightning_3d.strategies import ThreeDStrategy
from tests.checkpoint_trainer.samples import loader, on_ranks, train, watched
from tests.engine.runs import Layout, whole

DP2: Layout = {"dp_shard": 2}
pytestmark = pytest.mark.filterwarnings("ignore")


def slow_writer(seconds: float) -> None:
    """Makes the writer of this process slow."""
    write = async_save.write_snapshot

    def slowly(*args: Any) -> None:
        time.sleep(seconds)
        write(*args)

    async_save.write_snapshot = slowly  # type: ignore[assignment]


def strategy(**options: Any) -> ThreeDStrategy:
    return ThreeDStrategy(pp=1, dp_replicate=1, tp=1, dp_shard=2, **options)


class Weights(pl.Callback):
    """Remembers the weights after each step, and looks at the folder at each batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.whole: list[int] = []
        self.last: list[bool] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.weights[trainer.global_step] = {name: whole(p) for name, p in pl_module.named_parameters()}
        names = [path for path in self.folder.glob("step*.ckpt") if is_checkpoint(path)]
        self.whole.append(len(names))
        last = self.folder / "last.ckpt"
        self.last.append(not os.path.lexists(last) or is_checkpoint(last))


@pytest.mark.parametrize("save_last", [True, "link"])
@pytest.mark.parametrize("how", ["callback", "strategy"])
def test_overlapping_saves_keep_a_whole_one(how: str, save_last: Any, tmp_path: Path) -> None:
    """Saves come faster than they are written: one is whole at every moment, with the weights of its own step."""

    def body() -> Any:
        slow_writer(0.15)
        kind = AsyncCheckpoint if how == "callback" else ModelCheckpoint
        keep = kind(
            dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=1, save_last=save_last
        )
        watch = Weights(tmp_path)
        chosen = strategy(save_async=how == "strategy")
        train(DP2, loader(24, DP2), strategy=chosen, callbacks=[watch, keep], max_steps=6)
        return watch.weights, watch.whole, watch.last, keep.best_model_path

    results = on_ranks(DP2, body)
    for weights, counts, last, best in results:
        first = counts.index(1)
        assert all(count >= 1 for count in counts[first:]), counts
        assert all(last)
        assert best == str(tmp_path / "step=6.ckpt")
        for name in ("step=6.ckpt", "last.ckpt"):
            stored = load_full_state_dict(tmp_path / name)
            assert all(torch.equal(stored[key], value) for key, value in weights[6].items())
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=6.ckpt"]
    if how == "callback":
        assert "checkpoint step=6.ckpt: 0 MB a rank in" in results.outputs[0]
        assert results.outputs[1].count("checkpoint ") == 0


class Ends(pl.Callback):
    """Ends the run in step 6, after a save in step 5."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step < 5:
            return
        if self.kind == "error" or (self.kind == "one" and trainer.global_rank == 1):
            raise RuntimeError("step 6")
        if self.kind == "interrupt":
            raise KeyboardInterrupt
        if self.kind == "sigterm" and trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("kind", ["error", "one", "interrupt", "sigterm", "none"])
def test_finished_at_exit(kind: str, tmp_path: Path) -> None:
    """The save of step 5 is still being written when the run ends."""
    max_steps = 5 if kind == "none" else 7

    def body() -> str:
        slow_writer(1.0)
        keep = AsyncCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
        try:
            train(DP2, loader(28, DP2), callbacks=[Ends(kind), keep], max_steps=max_steps)
        except BaseException as error:
            return type(error).__name__
        return ""

    if kind == "one":
        with pytest.raises(Exception, match="step 6"):  # the other rank ends its process
            results = on_ranks(DP2, lambda: _raise(body()))
    else:
        results = on_ranks(DP2, body)
        expected = {
            "error": "RuntimeError",
            "interrupt": "SystemExit",
            "sigterm": "SIGTERMException",
            "none": "",
        }
        assert results == [expected[kind]] * 2
    assert is_checkpoint(tmp_path / "step=5.ckpt")
    assert read_metadata(tmp_path / "step=5.ckpt")["global_step"] == 5


def _raise(name: str) -> None:
    raise RuntimeError(f"step 6: {name}")


def test_evaluating_right_after_a_save_waits_for_it(tmp_path: Path) -> None:
    def body() -> Any:
        slow_writer(0.5)
        keep = AsyncCheckpoint(
            dirpath=tmp_path, filename="{step}", every_n_train_steps=1, monitor="loss", save_top_k=1
        )
        module, trainer = train(DP2, loader(16, DP2), callbacks=[keep], max_steps=4)
        trainer.save_checkpoint(tmp_path / "now.ckpt", storage_options=async_save.SaveOptions())
        before = {name: whole(p) for name, p in module.named_parameters()}
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        trainer.test(module, loader(8, DP2), ckpt_path=tmp_path / "now.ckpt", verbose=False)
        same = all(torch.equal(whole(p), before[name]) for name, p in module.named_parameters())
        trainer.test(module, loader(8, DP2), ckpt_path="best", verbose=False)
        return same, keep.best_model_path == trainer.ckpt_path

    assert on_ranks(DP2, body) == [(True, True)] * 2


@pytest.mark.parametrize("reaction", ["stop", "continue"])
@pytest.mark.parametrize("in_background", [True, False])
def test_a_save_that_fails(reaction: Any, in_background: bool, tmp_path: Path) -> None:
    """One rank's disk is full from step 2 on: every rank hears of it, and the checkpoint of step 1 stays."""

    def body() -> Any:
        import resource

        class FullDisk(pl.Callback):
            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                if trainer.global_step == 1 and trainer.global_rank == 1:
                    trainer.strategy.finish_saving()
                    resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))

        keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=1)
        chosen = strategy(save_async=in_background, on_save_error=reaction)
        try:
            _, trainer = train(
                DP2, loader(16, DP2), strategy=chosen, callbacks=[FullDisk(), keep], max_steps=3
            )
        except Exception as error:
            return str(error)
        return trainer.global_step

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    results = on_ranks(DP2, body)
    if reaction == "continue":
        assert results == [3, 3]
    else:
        assert all("[rank 1] OSError: [Errno 27]" in str(result) for result in results)
    assert newest_checkpoint(tmp_path) == tmp_path / "step=1.ckpt"


def test_other_strategies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Use Trainer\\(strategy='3d'\\)"):
        train({}, loader(8, {}), strategy="auto", callbacks=[AsyncCheckpoint(dirpath=tmp_path)])
    assert watched()
