# SPDX-License-Identifier: Apache-2.0
"""`lightning-3d convert`: a trained checkpoint to what `from_pretrained` reads, and back to any layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_3d.checkpoint import load_full_state_dict
from lightning_3d.cli import main
from tests.engine.runs import (
    Batches,
    Module,
    be_quiet,
    make_trainer,
    strategy_of,
    token_batches,
    whole,
    world_of,
)
from tests.harness import run_ranks

transformers = pytest.importorskip("transformers")
DP2_TP2 = {"dp_shard": 2, "tp": 2}
PP2 = {"pp": 2, "num_microbatches": 2}
pytestmark = pytest.mark.filterwarnings("ignore")


class Llama(Module):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(transformers.LlamaForCausalLM(config()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.model(input_ids=batch["ids"]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def config() -> Any:
    return transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )


def test_there_and_back(tmp_path: Path) -> None:
    """Tied weights are there once; the export loads in transformers; a pipeline loads what was imported."""

    def trainer_of(layout: Any) -> Any:
        be_quiet()
        return make_trainer(strategy_of(layout), world_of(layout), max_steps=1)

    def save() -> dict[str, torch.Tensor]:
        trainer, module = trainer_of(DP2_TP2), Llama()
        trainer.fit(module, Batches(token_batches(1)))
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        return {name: whole(p) for name, p in module.named_parameters()}

    weights = run_ranks(4, save, init=False, timeout_s=90)[0]
    config().save_pretrained(tmp_path / "config")
    out = str(tmp_path / "hf")
    assert main(["convert", str(tmp_path / "a.ckpt"), out, "--config", str(tmp_path / "config")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    found = {f"model.{name}": p for name, p in model.named_parameters()}
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight

    assert main(["convert", out, str(tmp_path / "b.ckpt")]) == 0
    assert sorted(load_full_state_dict(tmp_path / "b.ckpt")) == sorted(weights)

    def load() -> bool:
        trainer, module = trainer_of(PP2), Llama()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        # max_steps=0: nothing is trained, so what is there is what was loaded.
        trainer.fit_loop.epoch_loop.max_steps = 0
        trainer.fit(module, Batches(token_batches(1)), ckpt_path=tmp_path / "b.ckpt")
        own = {name: whole(p) for name, p in module.named_parameters()}
        return all(torch.equal(value, weights[name]) for name, value in own.items())

    assert run_ranks(2, load, init=False, timeout_s=90) == [True, True]


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "neither a whole checkpoint nor a file or folder of weights" in capsys.readouterr().err


class Sized(Module):
    """Has hyperparameters, as most modules do."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(torch.nn.Linear(width, width))
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(batch).square().sum()


def test_a_file_for_load_from_checkpoint(tmp_path: Path) -> None:
    def save() -> torch.Tensor:
        be_quiet()
        trainer, module = make_trainer(strategy_of({"dp_shard": 2}), 2, max_steps=1), Sized(width=12)
        trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(4, 12), batch_size=2))
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        return whole(module.model.weight)

    weight = run_ranks(2, save, init=False, timeout_s=60)[0]
    assert main(["convert", str(tmp_path / "a.ckpt"), str(tmp_path / "whole.ckpt")]) == 0
    loaded = Sized.load_from_checkpoint(tmp_path / "whole.ckpt", weights_only=True)
    assert loaded.hparams["width"] == 12
    assert torch.equal(loaded.model.weight, weight)
    assert not list(tmp_path.glob(".*"))
    assert main(["convert", str(tmp_path / "a.ckpt"), str(tmp_path / "a.ckpt")]) != 0
