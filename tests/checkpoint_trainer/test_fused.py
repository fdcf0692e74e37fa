# SPDX-License-Identifier: Apache-2.0
"""Fused qkv and gate/up weights, of which a tensor-parallel rank holds pieces, in other layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_3d.checkpoint import load_full_state_dict
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
pytestmark = pytest.mark.filterwarnings("ignore")


class Phi(Module):
    def __init__(self) -> None:
        torch.manual_seed(0)
        config = transformers.Phi3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
        )
        super().__init__(transformers.Phi3ForCausalLM(config), "adamw")
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.model(input_ids=batch["ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach())))
        return loss


def test_fused_weights(tmp_path: Path) -> None:
    batches = token_batches(3)

    def run(layout: Any, resume: Any = None, steps: int = 3) -> Any:
        be_quiet()
        module, trainer = Phi(), make_trainer(strategy_of(layout), world_of(layout), max_steps=steps)
        trainer.fit(module, Batches(batches), ckpt_path=resume)
        if steps == 2:
            trainer.save_checkpoint(tmp_path / "a.ckpt")
        return {name: whole(p) for name, p in module.named_parameters()}, module.losses

    both = {"dp_shard": 2, "tp": 2}
    weights, _ = run_ranks(4, lambda: run(both, steps=2), init=False, timeout_s=90)[0]
    _, losses = run_ranks(4, lambda: run(both), init=False, timeout_s=90)[0]
    assert all(
        torch.equal(value, weights[k]) for k, value in load_full_state_dict(tmp_path / "a.ckpt").items()
    )
    for layout in ({"dp_shard": 4}, {"tp": 2}, {}):
        body = lambda layout=layout: run(layout, tmp_path / "a.ckpt")  # noqa: E731
        _, resumed = run_ranks(world_of(layout), body, init=False, timeout_s=90)[0]
        assert len(resumed) == 1, layout
        assert resumed[0] == pytest.approx(losses[2], rel=1e-5), layout
