# SPDX-License-Identifier: Apache-2.0
"""`ckpt_path="last"` and `"best"`: the newest, or best, whole checkpoint, with the callbacks' state on every rank."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_3d.checkpoint import is_checkpoint
from lightning_3d.compat_lightning import checkpoint_folder
from tests.checkpoint_trainer.samples import every, loader, on_ranks, train
from tests.engine.runs import Layout
from tests.harness import RanksError, run_ranks

DP2: Layout = {"dp_shard": 2}
PP2: Layout = {"pp": 2, "num_microbatches": 2}
DP2_PP2: Layout = {"dp_shard": 2, "pp": 2, "num_microbatches": 2}
pytestmark = pytest.mark.filterwarnings("ignore")


def keeper(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(
        folder, filename="{step}", monitor="loss", every_n_train_steps=1, save_top_k=2, save_last=True
    )


@pytest.mark.parametrize("name", ["last", "best"])
def test_callback_state_on_every_rank(name: str, tmp_path: Path) -> None:
    def first() -> Any:
        keep = keeper(tmp_path)
        train(DP2_PP2, loader(24, DP2_PP2), callbacks=[keep], max_steps=4)
        return keep.best_model_path

    best = on_ranks(DP2_PP2, first)[0]

    class Resumed(pl.Callback):
        state: Any = None

        def on_train_start(self, trainer: Any, *_: Any) -> None:
            keep = trainer.checkpoint_callback
            scores = {path: round(float(score), 6) for path, score in keep.best_k_models.items()}
            self.state = keep.best_model_path, scores, keep.last_model_path, trainer.ckpt_path

    def second() -> Any:
        seen = Resumed()
        train(DP2_PP2, loader(24, DP2_PP2), callbacks=[seen, keeper(tmp_path)], resume=name, max_steps=5)
        return seen.state

    states = on_ranks(DP2_PP2, second)
    assert all(state == states[0] for state in states)
    assert states[0][0] == best
    assert states[0][3] == (str(tmp_path / "last.ckpt") if name == "last" else best)


def test_partial_ones_are_named_and_skipped(tmp_path: Path) -> None:
    """Without a file called `last`, and with the two newest checkpoints broken, a run goes on from the third."""
    on_ranks(
        DP2, lambda: train(DP2, loader(24, DP2), callbacks=[every(1, tmp_path)], max_steps=4)[1].global_step
    )
    (tmp_path / "step=4.ckpt" / "manifest.json").unlink()
    next((tmp_path / "step=3.ckpt").glob("*.distcp")).write_bytes(b"")
    shutil.copytree(tmp_path / "step=4.ckpt", tmp_path / ".step=5.ckpt.saving-0123456789ab")

    def resume() -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings = lambda *_, **__: None  # type: ignore[assignment]
            module, trainer = train(
                DP2, loader(24, DP2), callbacks=[every(1, tmp_path)], resume="last", max_steps=5
            )
        return trainer.ckpt_path, len(module.seen), [str(w.message) for w in caught]

    for rank, (path, steps, messages) in enumerate(on_ranks(DP2, resume)):
        assert path == str(tmp_path / "step=2.ckpt")
        assert steps == 3
        named = [text for text in messages if "Skipped 3 partial or damaged checkpoints" in text]
        assert len(named) == (1 if rank == 0 else 0)
        for name in ("step=3.ckpt", "step=4.ckpt", ".step=5.ckpt.saving-"):
            assert all(name in text for text in named)
    for step in (3, 4, 5):  # written anew on the way; Lightning goes round names that are taken
        assert any(is_checkpoint(path) for path in tmp_path.glob(f"step={step}*.ckpt")), step


def test_nothing_to_resume_is_a_start(tmp_path: Path) -> None:
    def body() -> int:
        keep = keeper(tmp_path)
        _, trainer = train(DP2, loader(8, DP2), callbacks=[keep], resume="last", max_steps=2)
        assert checkpoint_folder(keep, trainer) == str(tmp_path)
        return trainer.global_step

    assert on_ranks(DP2, body) == [2, 2]


@pytest.mark.parametrize("layout", [DP2, PP2], ids=["dp_shard=2", "pp=2"])
def test_a_checkpoint_that_one_rank_does_not_see_ends_all(layout: Layout, tmp_path: Path) -> None:
    """Each node has a disk of its own, and one was replaced."""
    on_ranks(
        layout,
        lambda: train(layout, loader(8, layout), callbacks=[every(1, tmp_path / "0")], max_steps=1)[0].seen,
    )

    def resume() -> None:
        folder = tmp_path / os.environ["RANK"]
        train(layout, loader(8, layout), callbacks=[every(1, folder)], resume="last", max_steps=2)

    with pytest.raises(RanksError) as error:
        run_ranks(2, resume, init=False, timeout_s=30)
    assert [each.type_name for each in error.value.failures.values()] == ["CheckpointError"] * 2
    for failure in error.value.failures.values():
        assert "step=1.ckpt was found on rank 0, and none on rank 1" in failure.message
