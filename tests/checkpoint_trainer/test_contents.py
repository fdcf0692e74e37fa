# SPDX-License-Identifier: Apache-2.0
"""What is in a checkpoint and what may be missing: weights only, adapters, other heads, plain files, other names."""

import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_3d.checkpoint import is_checkpoint, load_full_state_dict, newest_checkpoint, read_metadata
from tests.checkpoint_trainer.samples import Watched, loader, on_ranks, train, watched
from tests.engine.runs import Layout, make_trainer, seeded, strategy_of, whole, world_of

DP2: Layout = {"dp_shard": 2}
PP2: Layout = {"pp": 2, "num_microbatches": 2}
DP2_TP2: Layout = {"dp_shard": 2, "tp": 2}
pytestmark = pytest.mark.filterwarnings("ignore")


def attempt(body: Any) -> str:
    try:
        body()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Loud(pl.Callback):
    """Lets warnings through that the tests silence."""

    def on_fit_start(self, *_: Any) -> None:
        warnings.simplefilter("always")


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p) for name, p in module.named_parameters()}


def evaluate(layout: Layout, module: Watched, path: Any) -> tuple[dict[str, torch.Tensor], list[Any]]:
    trainer = make_trainer(strategy_of(layout), world_of(layout))
    trainer.test(module, loader(8, layout), ckpt_path=path, verbose=False)
    predictions = trainer.predict(module, loader(8, layout), ckpt_path=path)
    return weights_of(module), predictions


def test_weights_only(tmp_path: Path) -> None:
    """Evaluates, and starts a fit at step 0; says that there is no optimizer state."""

    def save() -> Any:
        keep = ModelCheckpoint(tmp_path, filename="w", save_weights_only=True, every_n_train_steps=2)
        module, _ = train(DP2_TP2, loader(8, DP2_TP2), callbacks=[keep], max_steps=2)
        return weights_of(module)

    saved = on_ranks(DP2_TP2, save)[0]

    def load() -> Any:
        loaded, predictions = evaluate(DP2, watched(), tmp_path / "w.ckpt")
        with warnings.catch_warnings(record=True) as caught:
            module, trainer = train(
                DP2, loader(8, DP2), callbacks=[Loud()], resume=tmp_path / "w.ckpt", max_steps=1
            )
        return loaded, len(predictions), trainer.global_step, [str(w.message) for w in caught], module.seen

    loaded, predictions, steps, messages, seen = on_ranks(DP2, load)[0]
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    assert (predictions, steps, len(seen)) == (4, 1, 1)
    assert any("holds weights only: there is no optimizer state" in message for message in messages)


class WithHead(Watched):
    """The watched module with a part that the checkpoint does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False
        self.new_head = nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.new_head(batch[1]).square().mean()


def test_other_heads(tmp_path: Path) -> None:
    """`strict_loading = False` loads what is there, both ways, and names what is not."""

    def save(name: str, module: Watched) -> None:
        _, trainer = train(DP2, loader(12, DP2), module=module, max_steps=1)
        trainer.save_checkpoint(tmp_path / name)

    def save_both() -> None:
        save("small.ckpt", watched())
        save("large.ckpt", seeded(WithHead))

    on_ranks(DP2, save_both)

    def load(name: str, module: Watched) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            error = attempt(
                lambda: train(
                    DP2,
                    loader(8, DP2),
                    module=module,
                    callbacks=[Loud()],
                    resume=tmp_path / name,
                    max_steps=2,
                )
            )
        return error, [str(w.message) for w in caught]

    def load_all() -> Any:
        lenient = watched()
        lenient.strict_loading = False
        strict = seeded(WithHead)
        strict.strict_loading = True
        return (
            load("small.ckpt", seeded(WithHead)),
            load("large.ckpt", lenient),
            load("small.ckpt", strict),
            load("large.ckpt", watched()),
        )

    missing, extra, refused, refused_too = on_ranks(DP2, load_all)[0]
    assert missing[0] == extra[0] == ""
    assert any("Missing in the checkpoint (2): new_head.bias, new_head.weight" in text for text in missing[1])
    assert any("Unexpected in the checkpoint (2): new_head.bias" in text for text in extra[1])
    assert "Missing in the checkpoint" in refused[0]
    assert "new_head" in refused[0]
    assert "Unexpected in the checkpoint" in refused_too[0]


class Adapted(Watched):
    """Frozen layers and a trained adapter; saves the adapter and a note alone."""

    def __init__(self, name: str = "lora") -> None:
        super().__init__()
        self.layers.requires_grad_(False)
        self.strict_loading = False
        self.adapter_name = name
        self.add_module(name, nn.Linear(8, 8))
        self.note: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + getattr(self, self.adapter_name)(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {key: state[key] for key in state if key.startswith(self.adapter_name)}
        checkpoint["state_dict"]["note"] = torch.arange(3)
        checkpoint["my_own"] = {"best": 3.5}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["state_dict"].pop("note"), checkpoint["my_own"]


@pytest.mark.parametrize("layout", [DP2, PP2], ids=["dp2", "pp2"])
def test_adapters_alone(layout: Layout, tmp_path: Path) -> None:
    """`on_save_checkpoint` drops the base weights and adds an entry: small, resumable, other adapters refused."""

    def save() -> Any:
        module = seeded(Adapted)
        _, trainer = train(layout, loader(16, layout), module=module, max_steps=4)
        whole_run = weights_of(module)
        first = seeded(Adapted)
        _, trainer = train(layout, loader(16, layout), module=first, max_steps=2)
        trainer.save_checkpoint(tmp_path / "lora.ckpt")
        second = seeded(Adapted)
        train(layout, loader(16, layout), module=second, resume=tmp_path / "lora.ckpt", max_steps=4)
        other = seeded(lambda: Adapted("lora2"))
        error = attempt(
            lambda: train(
                layout, loader(16, layout), module=other, resume=tmp_path / "lora.ckpt", max_steps=4
            )
        )
        return whole_run, weights_of(second), second.note, error

    for whole_run, resumed, note, error in on_ranks(layout, save):
        assert all(torch.equal(resumed[name], value) for name, value in whole_run.items())
        assert torch.equal(note[0], torch.arange(3))
        assert note[1] == {"best": 3.5}
        assert "has nothing of this model" in error
    assert sorted(load_full_state_dict(tmp_path / "lora.ckpt")) == ["lora.bias", "lora.weight"]


def test_replaced_entries(tmp_path: Path) -> None:
    """Averaged weights put into the state dict are what is saved."""

    class Averaged(Watched):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {key: value * 0 + 7 for key, value in checkpoint["state_dict"].items()}

    def save() -> None:
        _, trainer = train(DP2_TP2, loader(8, DP2_TP2), module=seeded(Averaged), max_steps=1)
        trainer.save_checkpoint(tmp_path / "a.ckpt")

    on_ranks(DP2_TP2, save)
    assert all(bool((value == 7).all()) for value in load_full_state_dict(tmp_path / "a.ckpt").values())


def test_one_name_again_and_again(tmp_path: Path) -> None:
    """A fixed name, three improvements; over a plain file; with one rank late: one path on all ranks, never a mix."""
    (tmp_path / "best.ckpt").write_text("a plain file that is in the way")

    class Improving(Watched):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_rank == 1:
                import time

                time.sleep(0.2)
            self.log("score", 10.0 - self.trainer.global_step)

    def body() -> Any:
        keep = ModelCheckpoint(
            tmp_path,
            filename="best",
            monitor="loss",
            every_n_train_steps=1,
            save_top_k=1,
            enable_version_counter=False,
        )
        counted = ModelCheckpoint(tmp_path, filename="again", every_n_train_steps=2, save_top_k=-1)
        train(DP2_TP2, loader(24, DP2_TP2), module=seeded(Improving), callbacks=[keep, counted], max_steps=4)
        return keep.best_model_path, counted.best_model_path

    paths = on_ranks(DP2_TP2, body)
    assert paths == [(str(tmp_path / "best.ckpt"), str(tmp_path / "again.ckpt"))] * 4
    assert sorted(os.listdir(tmp_path)) == ["again.ckpt", "best.ckpt"]
    assert all(is_checkpoint(tmp_path / name) for name in os.listdir(tmp_path))


def test_plain_files(tmp_path: Path) -> None:
    """A Lightning file, a state dict and safetensors of the inner model load as `ckpt_path`."""
    from safetensors.torch import save_file

    module, trainer = train({}, loader(8, {}), strategy="auto", max_steps=2)
    trainer.save_checkpoint(tmp_path / "lightning.ckpt")
    torch.save(module.state_dict(), tmp_path / "state.pt")
    inner = {key.removeprefix("layers."): value for key, value in module.state_dict().items()}
    save_file(inner, tmp_path / "model.safetensors")
    expected = weights_of(module)

    def body() -> Any:
        found = []
        for name in ("lightning.ckpt", "state.pt", "model.safetensors"):
            loaded, _ = evaluate(DP2_TP2, watched(), tmp_path / name)
            found.append(all(torch.equal(loaded[key], value) for key, value in expected.items()))
        fresh = watched()
        _, resumed = train(
            DP2_TP2, loader(8, DP2_TP2), module=fresh, resume=tmp_path / "state.pt", max_steps=1
        )
        return found, resumed.global_step

    assert on_ranks(DP2_TP2, body) == [([True] * 3, 1)] * 4


@pytest.mark.parametrize("compiled", ["save", "load"])
def test_names_without_compile(compiled: str, tmp_path: Path) -> None:
    """A block that is compiled, or not, has the same names in the file."""

    def module(with_compile: bool) -> Watched:
        made = watched()
        if with_compile:
            made.layers[0] = torch.compile(made.layers[0], backend="eager")
        return made

    def save() -> None:
        _, trainer = train(DP2, loader(12, DP2), module=module(compiled == "save"), max_steps=2)
        trainer.save_checkpoint(tmp_path / "a.ckpt")

    def load() -> Any:
        return train(
            DP2, loader(12, DP2), module=module(compiled == "load"), resume=tmp_path / "a.ckpt", max_steps=3
        )[1].global_step

    on_ranks(DP2, save)
    assert sorted(load_full_state_dict(tmp_path / "a.ckpt")) == sorted(watched().state_dict())
    assert on_ranks(DP2, load) == [3, 3]


class Partly(Watched):
    """One layer is never used; another is frozen after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(8, 8)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.layers[1].requires_grad_(batch_idx == 0)


def test_parameters_without_a_gradient(tmp_path: Path) -> None:
    def body() -> Any:
        whole_run, _ = train(DP2, loader(16, DP2), module=seeded(Partly), max_steps=4)
        _, trainer = train(DP2, loader(16, DP2), module=seeded(Partly), max_steps=2)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        with warnings.catch_warnings(record=True) as caught:
            resumed, _ = train(
                DP2,
                loader(16, DP2),
                module=seeded(Partly),
                callbacks=[Loud()],
                resume=tmp_path / "a.ckpt",
                max_steps=4,
            )
        return weights_of(whole_run), weights_of(resumed), [str(w.message) for w in caught]

    for expected, found, messages in on_ranks(DP2, body)[:1]:
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert any("no optimizer state for" in text and "unused.weight" in text for text in messages)
    assert newest_checkpoint(tmp_path) == tmp_path / "a.ckpt"
    assert read_metadata(tmp_path / "a.ckpt")["global_step"] == 2
