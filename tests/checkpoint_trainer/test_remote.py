# SPDX-License-Identifier: Apache-2.0
"""A Trainer whose checkpoints are at a remote address: kept, linked, resumed in another layout, written behind."""

import time
import warnings
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from fsspec.registry import known_implementations
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_3d.callbacks import AsyncCheckpoint
from lightning_3d.checkpoint import is_checkpoint, load_full_state_dict, read_metadata
from lightning_3d.checkpoint.places import place_of
from lightning_3d.cli import main
from lightning_3d.errors import CheckpointError
from lightning_3d.strategies import ThreeDStrategy
from tests.checkpoint_trainer.samples import loader, on_ranks, train, watched
from tests.engine.runs import Layout, Record, Recorder, whole
from tests.object_store import ObjectStore, die, fail, names

ONE: Layout = {}
DP2: Layout = {"dp_shard": 2}
DP2_TP2: Layout = {"dp_shard": 2, "tp": 2}
PP2: Layout = {"pp": 2, "num_microbatches": 2}
pytestmark = pytest.mark.filterwarnings("ignore")


def kept(folder: str) -> list[str]:
    """Checkpoints in a folder by name; nothing may be left of others."""
    fs, path = fsspec.core.url_to_fs(folder)
    fs.invalidate_cache()
    found = sorted(name.rsplit("/", 1)[1] for name in fs.ls(path, detail=False))
    for name in found:
        assert is_checkpoint(f"{folder}/{name}")
        assert len(fs.ls(f"{path}/{name}")) <= 2  # a manifest and what it points to
    return found


def losses(layout: Layout, steps: int, **options: Any) -> list[float]:
    """Of each step, over all replicas."""
    record = Record()
    callbacks = [Recorder(record), *options.pop("callbacks", ())]
    train(layout, loader(48, layout), callbacks=callbacks, max_steps=steps, **options)
    return [float(loss) for loss in record.losses]


@pytest.mark.parametrize(("saver", "resumer"), [(DP2_TP2, PP2), (PP2, DP2_TP2), (DP2, ONE)])
def test_resumes_in_another_layout(bucket: str, saver: Layout, resumer: Layout) -> None:
    def keep() -> ModelCheckpoint:
        return ModelCheckpoint(
            bucket, filename="{step}", every_n_train_steps=3, save_top_k=-1, save_last=True
        )

    first = on_ranks(saver, lambda: losses(saver, 6, callbacks=[keep()]))[0]
    assert kept(bucket) == ["last.ckpt", "step=3.ckpt", "step=6.ckpt"]

    address = f"{bucket}/step=3.ckpt"
    second = on_ranks(resumer, lambda: losses(resumer, 6, callbacks=[keep()], resume=address))[0]
    assert len(second) == 3
    assert second == pytest.approx(first[3:], rel=1e-6)
    third = on_ranks(resumer, lambda: losses(resumer, 8, callbacks=[keep()], resume="last"))[0]
    assert len(third) == 2
    assert {"step=3.ckpt", "step=6.ckpt"} < set(kept(bucket))


@pytest.mark.parametrize("save_last", [True, "link"])
@pytest.mark.parametrize("kind", [ModelCheckpoint, AsyncCheckpoint])
def test_the_best_and_the_last_are_kept(bucket: str, kind: Any, save_last: Any) -> None:
    """Of ten, two by their loss and the last one; the rest is gone, object by object."""

    def body() -> Any:
        keep = kind(
            dirpath=bucket,
            filename="{step}",
            monitor="loss",
            every_n_train_steps=1,
            save_top_k=2,
            save_last=save_last,
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module, trainer = train(DP2, loader(40, DP2), callbacks=[keep], max_steps=10)
        assert not [str(w.message) for w in caught if "could not be removed" in str(w.message)]
        weights = {name: whole(parameter) for name, parameter in module.named_parameters()}
        trainer.test(module, loader(8, DP2), ckpt_path="best", verbose=False)
        return sorted(keep.best_k_models), keep.best_model_path, trainer.ckpt_path, weights

    results = on_ranks(DP2, body)
    best_k, best, tested, weights = results[0]
    assert all(result[:3] == results[0][:3] for result in results)
    assert best == tested
    wanted = {path.rpartition("/")[2] for path in best_k} | {"last.ckpt"}
    if save_last == "link":
        target = read_metadata(f"{bucket}/last.ckpt")["global_step"]
        assert f"step={target}.ckpt" in wanted
    else:
        stored = load_full_state_dict(f"{bucket}/last.ckpt")
        assert all(torch.equal(stored[name], value) for name, value in weights.items())
    assert set(kept(bucket)) == wanted
    assert (len(names("bucket/run/last.ckpt")) == 1) == (save_last == "link")


def test_memory(memory: str) -> None:
    """One process: saved by a call, by the callback and in the background; resumed, tested and predicted from."""
    keep = ModelCheckpoint(memory, monitor="loss", every_n_train_steps=1, save_top_k=1, save_last="link")
    module, trainer = train(ONE, loader(32, ONE), callbacks=[keep], max_steps=4)
    trainer.save_checkpoint(f"{memory}/now.ckpt")
    trainer.save_checkpoint(f"{memory}/now.ckpt")
    trainer.save_checkpoint(f"{memory}/weights.ckpt", weights_only=True)
    assert len(kept(memory)) == 4
    weights = load_full_state_dict(f"{memory}/now.ckpt")
    assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())
    for name in ("now", "weights"):
        other = watched()
        trainer.test(other, loader(8, ONE), ckpt_path=f"{memory}/{name}.ckpt", verbose=False)
        assert all(torch.equal(weights[name], value) for name, value in other.state_dict().items())
    chosen = ThreeDStrategy(pp=1, dp_replicate=1, tp=1, dp_shard=1, save_async=True)
    again = ModelCheckpoint(memory, filename="{step}", every_n_train_steps=1, save_top_k=1)
    resumed, trainer = train(
        ONE, loader(32, ONE), callbacks=[again], resume=f"{memory}/now.ckpt", strategy=chosen, max_steps=6
    )
    assert (len(resumed.seen), trainer.global_step) == (2, 6)
    assert "step=6.ckpt" in kept(memory)
    assert "step=5.ckpt" not in kept(memory)


def test_the_next_save_takes_the_name_of_a_dead_one(bucket: str) -> None:
    """A process dies in the middle of an upload; the run goes on from the save before, and leaves nothing behind."""

    def keep() -> ModelCheckpoint:
        return ModelCheckpoint(bucket, filename="{step}", every_n_train_steps=1, save_top_k=-1)

    def dies() -> Any:
        die("put", "step=3.ckpt", after=4)
        train(DP2, loader(24, DP2), callbacks=[keep()], max_steps=4)

    with pytest.raises(Exception, match="without a result"):
        on_ranks(DP2, dies)
    assert names("bucket/run/step=3.ckpt")
    assert not is_checkpoint(f"{bucket}/step=3.ckpt")

    def resumes() -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings = lambda *_, **__: None  # type: ignore[assignment]
            _, trainer = train(DP2, loader(24, DP2), callbacks=[keep()], resume="last", max_steps=4)
        return trainer.ckpt_path, [str(w.message) for w in caught]

    path, messages = on_ranks(DP2, resumes)[0]
    assert path == f"{bucket}/step=2.ckpt"
    assert any("Skipped 1 partial or damaged checkpoints: step=3.ckpt (not whole)" in m for m in messages)
    assert not any("no last checkpoint available" in m for m in messages)
    assert kept(bucket) == [f"step={step}.ckpt" for step in (1, 2, 3, 4)]


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("reaction", ["stop", "continue"])
def test_an_upload_that_fails(bucket: str, reaction: Any, in_background: bool) -> None:
    """One rank's uploads fail from step 2 on: all ranks hear of it, and the checkpoint of step 1 stays."""

    class Fails(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1 and trainer.global_rank == 1:
                trainer.strategy.finish_saving()
                fail("part", "__1_0", OSError(28, "No space left"))

    def body() -> Any:
        started = time.monotonic()
        keep = ModelCheckpoint(bucket, filename="{step}", every_n_train_steps=1, save_top_k=1)
        chosen = ThreeDStrategy(
            pp=1, dp_replicate=1, tp=1, dp_shard=2, save_async=in_background, on_save_error=reaction
        )
        try:
            _, trainer = train(DP2, loader(16, DP2), strategy=chosen, callbacks=[Fails(), keep], max_steps=3)
        except Exception as error:
            return str(error), time.monotonic() - started
        return trainer.global_step, time.monotonic() - started

    results = on_ranks(DP2, body)
    if reaction == "continue":
        assert [step for step, _ in results] == [3, 3]
    else:
        assert all("[rank 1] OSError: [Errno 28] No space left" in str(text) for text, _ in results)
    assert all(seconds < 15 for _, seconds in results)
    assert kept(bucket) == ["step=1.ckpt"]


def test_a_slow_store_in_the_background(bucket: str) -> None:
    """One save is whole at every step, and training does not wait for uploads."""

    class Watch(pl.Callback):
        def __init__(self) -> None:
            self.counts: list[int] = []

        def on_train_batch_end(self, *_: Any) -> None:
            if place_of(bucket).exists():
                self.counts.append(sum(is_checkpoint(path) for path in place_of(bucket).iterdir()))

    def body() -> Any:
        ObjectStore.latency_s = 0.02
        keep = AsyncCheckpoint(dirpath=bucket, filename="{step}", every_n_train_steps=2, save_top_k=1)
        watch = Watch()
        train(DP2, loader(48, DP2), callbacks=[watch, keep], max_steps=8)
        return watch.counts

    for counts in on_ranks(DP2, body):
        assert all(count >= 1 for count in counts[counts.index(1) :]), counts
    assert kept(bucket) == ["step=8.ckpt"]


def test_addresses_are_checked_before_training(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"class": "no_such_package.FileSystem", "err": "Install no_such_package to access nosuch"}
    monkeypatch.setitem(known_implementations, "nosuch", entry)
    module = watched()
    for options, text in (
        ({"default_root_dir": "nowhere://a", "callbacks": [ModelCheckpoint()]}, "no protocol 'nowhere'"),
        ({"default_root_dir": "nosuch://a", "callbacks": [ModelCheckpoint()]}, "Install no_such_package"),
        ({"resume": "nowhere://a/b.ckpt"}, "no protocol 'nowhere'"),
    ):
        with pytest.raises(CheckpointError, match=text):
            train(ONE, loader(8, ONE), module=module, max_steps=1, **options)
    with pytest.raises((ValueError, ImportError), match="nowhere"):
        ModelCheckpoint("nowhere://a")  # Lightning's own
    assert module.seen == []
    path = f"{memory}/a.ckpt"
    with pytest.raises(CheckpointError, match=r"a\.ckpt does not exist. There is no whole one beside it"):
        train(ONE, loader(8, ONE), resume=path, max_steps=1)


def test_convert(memory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A remote checkpoint to safetensors at an address, and back; the plain file is taken as `ckpt_path`."""
    module, trainer = train(ONE, loader(8, ONE), max_steps=1)
    trainer.save_checkpoint(f"{memory}/a.ckpt")
    main(["convert", f"{memory}/a.ckpt", f"{memory}/export", "--prefix", ""])
    main(["convert", f"{memory}/export", f"{memory}/b.ckpt", "--prefix", ""])
    main(["convert", f"{memory}/b.ckpt", str(tmp_path / "c.safetensors-folder"), "--prefix", ""])
    main(["convert", f"{memory}/b.ckpt", f"{memory}/plain.ckpt"])
    assert f"Wrote {memory}/plain.ckpt" in capsys.readouterr().out
    weights = module.state_dict()
    for path in (f"{memory}/plain.ckpt", f"{memory}/export", str(tmp_path / "c.safetensors-folder")):
        other = watched()
        trainer.test(other, loader(8, ONE), ckpt_path=path, verbose=False)
        assert all(torch.equal(weights[name], value) for name, value in other.state_dict().items())
