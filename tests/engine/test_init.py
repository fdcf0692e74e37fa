# SPDX-License-Identifier: Apache-2.0
"""Initial values: the same on all ranks that share them, in every layout, wherever the model was made."""

import os

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_3d.errors import ModelError
from tests.engine.runs import (
    DP2,
    PP2,
    PP2_DP2,
    TP2,
    Batches,
    Module,
    be_quiet,
    lm,
    make_trainer,
    name_of,
    strategy_of,
    token_batches,
    whole,
    world_of,
)
from tests.harness import run_ranks
from tests.models import Decoder, DecoderConfig


class Rotary(nn.Module):
    """A buffer that no checkpoint holds; `reset_parameters` computes it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        self.inv_freq.copy_(10000.0 ** -torch.linspace(0, 1, 4))

    def forward(self, length):
        return torch.outer(torch.arange(length), self.inv_freq)


class RotaryBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.rotary, self.linear = Rotary(), nn.Linear(8, 8)

    def forward(self, x):
        angles = self.rotary(x.shape[1])
        return x + torch.tanh(self.linear(x * torch.cat([angles.cos(), angles.sin()], -1)))


class RotaryDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(RotaryBlock() for _ in range(4))
        self.head = nn.Linear(8, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class LinearDecoder(nn.Module):
    """Its blocks have parameters themselves."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 64)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class LostBuffer(nn.Module):
    """A buffer that nothing can compute again."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(16.0), persistent=False)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        return self.layers[1](self.layers[0](x + self.table))


class Configured(Module):
    """Makes its model in `configure_model`, on the meta device."""

    def __init__(self, make):
        super().__init__(nn.Identity())
        self.make = make

    def configure_model(self):
        if isinstance(self.model, nn.Identity):
            with torch.device("meta"):
                self.model = self.make()

    def on_train_start(self):
        self.start = state_of(self)


def state_of(module):
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return {
        name: whole(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)
    } | buffers


MODELS = {
    "decoder": lambda: Decoder(DecoderConfig(bias=True)),
    "tied decoder": lambda: Decoder(DecoderConfig(tied=True)),
    "tied, with buffers": RotaryDecoder,
    "linear layers": LinearDecoder,
}


def trained_from_meta(layout, make, in_context):
    be_quiet()
    pl.seed_everything(7, verbose=False)
    trainer = make_trainer(strategy_of(layout), world_of(layout))
    if in_context:
        with trainer.init_module(empty_init=True):
            module = Configured(make)
            module.model = make()
        assert next(module.parameters()).is_meta
    else:
        module = Configured(make)
    trainer.fit(module, Batches(token_batches()))
    held = dict(module.named_parameters())
    inner = module.model
    embed = getattr(inner, "embed", None) or getattr(inner, "tok_embeddings", None)
    head = getattr(inner, "head", None) or getattr(inner, "output", None)
    tied = getattr(embed, "_parameters", {}).get("weight") is getattr(head, "_parameters", {}).get("weight")
    optimized = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    return module.start, state_of(module), tied, len(optimized) == len(held)


def all_from_meta(layout):
    names = [
        name for name in MODELS if "tp" not in layout or name not in ("tied, with buffers", "linear layers")
    ]
    return {name: trained_from_meta(layout, MODELS[name], name == "decoder") for name in names}


@pytest.fixture(scope="module")
def one_rank():
    return run_ranks(1, all_from_meta, {}, init=False, timeout_s=120)[0]


@pytest.mark.parametrize("layout", [PP2, DP2, TP2, PP2_DP2], ids=name_of)
def test_models_made_on_meta_start_alike_in_every_layout(layout, one_rank):
    for rank, found in enumerate(
        run_ranks(world_of(layout), all_from_meta, layout, init=False, timeout_s=120)
    ):
        for name, (start, end, tied, all_optimized) in found.items():
            expected_start, expected_end, is_tied, _ = one_rank[name]
            for key, value in start.items():
                assert torch.equal(value, expected_start[key]), f"rank {rank}: {name}: {key} starts otherwise"
            for key, value in end.items():
                torch.testing.assert_close(
                    value, expected_end[key], rtol=1e-5, atol=1e-6, msg=f"{name}: {key}"
                )
            assert all_optimized
            if "pp" not in layout:
                assert tied == is_tied == ("tied" in name)


def test_values_on_meta_are_those_of_reset_parameters(one_rank):
    start = one_rank["tied, with buffers"][0]
    expected = 10000.0 ** -torch.linspace(0, 1, 4)
    for index in range(4):
        assert torch.equal(start[f"model.layers.{index}.rotary.inv_freq"], expected)
    assert start["model.embed.weight"].std() == pytest.approx(1, rel=0.2)


def test_a_buffer_that_would_be_lost_is_refused_by_name():
    def body():
        be_quiet()
        with pytest.raises(ModelError, match=r"'table'.*LostBuffer|'table'.*model"):
            make_trainer(strategy_of(DP2), 2).fit(Configured(LostBuffer), Batches(token_batches(1)))

    run_ranks(2, body, init=False, timeout_s=120)


def replicated_state(layout):
    """What this rank holds whole, after 20 steps on weights that were made with a seed of its own."""
    be_quiet()
    pl.seed_everything(1 + int(os.environ["RANK"]), verbose=False)
    module = Module(Decoder(DecoderConfig(bias=True, qk_norm=True)), "adamw")
    module.register_buffer("noise", torch.randn(4))
    make_trainer(strategy_of(layout), world_of(layout)).fit(module, Batches(token_batches(20)))
    return state_of(module)


@pytest.mark.parametrize("layout", [TP2, DP2, PP2, {"tp": 2, "dp_replicate": 2}], ids=name_of)
def test_ranks_that_seeded_differently_hold_the_same(layout):
    by_rank = run_ranks(world_of(layout), replicated_state, layout, init=False, timeout_s=120)
    for other in by_rank[1:]:
        for name in by_rank[0].keys() & other.keys():
            assert torch.equal(by_rank[0][name], other[name]), name
    assert "noise" in by_rank[0].keys() & by_rank[-1].keys()


def empty_elsewhere(module):
    """Weights on rank 0 alone, as some load a checkpoint for torch's FSDP."""
    return module if os.environ["RANK"] == "0" else module.to("meta")


def frozen_elsewhere(module):
    module.model.layers[1].requires_grad_(os.environ["RANK"] == "0")
    return module


def of_other_sizes():
    return lm(vocab_size=64 if os.environ["RANK"] == "0" else 32)


def with_another_buffer():
    module = lm()
    if os.environ["RANK"] == "0":
        module.register_buffer("more", torch.zeros(1))
    return module


DIFFERENT = {
    "weights on rank 0": (
        lambda: empty_elsewhere(lm()),
        "with values on rank 0, but .* on the meta device on rank 1",
    ),
    "sizes": (of_other_sizes, r"\[64, \d+\] .* on rank 0, but .*\[32, \d+\] .* on rank 1"),
    "frozen": (lambda: frozen_elsewhere(lm()), r"layers\.1\..* on rank 0, but .*frozen.* on rank 1"),
    "buffers": (with_another_buffer, "more .* on rank 0, but .* on rank 1"),
}


@pytest.mark.parametrize("layout", [DP2, TP2, PP2], ids=name_of)
def test_models_that_differ_between_ranks_are_refused_on_all(layout):
    def body():
        be_quiet()
        for make, words in DIFFERENT.values():
            with pytest.raises(ModelError, match=f"different models: .*{words}"):
                make_trainer(strategy_of(layout), 2).fit(make(), Batches(token_batches(1)))

    run_ranks(2, body, init=False, timeout_s=40)
