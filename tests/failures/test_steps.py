# SPDX-License-Identifier: Apache-2.0
"""Steps that ranks do not do alike: no loss on one of them, a module that one alone uses; weights asked for by one."""

import time

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_3d.strategies import standing
from tests.engine.runs import (
    Batches,
    be_quiet,
    lm,
    make_trainer,
    strategy_of,
    token_batches,
    vector_batches,
    whole,
    world_of,
)
from tests.harness import RanksError, RanksTimeoutError, run_ranks
from tests.models import MLP

DP2 = {"dp_shard": 2}
PP2_TP2 = {"pp": 2, "tp": 2, "num_microbatches": 2}
TP2 = {"tp": 2}


class Skips(pl.LightningModule):
    """On rank 1 the second batch has no loss, or one without a graph."""

    def __init__(self, detached) -> None:
        super().__init__()
        self.model, self.detached = MLP(), detached

    def training_step(self, batch, batch_idx):
        loss = (self.model(batch["x"]) - batch["y"]).square().mean()
        if batch_idx == 1 and self.global_rank == 1:
            return loss.detach() * 0 if self.detached else None
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def failures_of(layout, body):
    with pytest.raises(RanksError) as error:
        run_ranks(world_of(layout), body, init=False, timeout_s=80)
    assert not isinstance(error.value, RanksTimeoutError), str(error.value)
    return error.value.failures


@pytest.mark.parametrize("detached", [False, True], ids=["None", "no graph"])
def test_one_rank_without_a_loss_ends_all(detached):
    def body():
        be_quiet()
        make_trainer(strategy_of(DP2), 2).fit(Skips(detached), Batches(vector_batches(4)))

    failures = failures_of(DP2, body)
    words = "does not require grad" if detached else "returning None in distributed training is not supported"
    for failure in failures.values():
        assert words in f"{failure.message}{failure.output}{failure.details}"


def test_the_whole_state_dict_is_on_rank_0():
    class Saves(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            self.state = trainer.strategy.whole_state_dict()

    def body():
        be_quiet()
        module, saves = lm(), Saves()
        trainer = make_trainer(strategy_of(PP2_TP2), 4, callbacks=[saves])
        trainer.fit(module, Batches(token_batches(1)))
        return saves.state, {name: whole(value) for name, value in module.state_dict().items()}

    by_rank = run_ranks(4, body, init=False)
    state = by_rank[0][0]
    assert state.keys() == lm().state_dict().keys()
    assert all(not each for each, _ in by_rank[1:])
    for _, parts in by_rank:
        assert all(torch.equal(state[name], value) for name, value in parts.items())


def test_one_rank_alone_cannot_ask_for_it():
    class Saves(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            if trainer.is_global_zero:
                trainer.strategy.whole_state_dict()

    def body():
        be_quiet()
        trainer = make_trainer(strategy_of(TP2), 2, callbacks=[Saves()])
        trainer.fit(lm(), Batches(token_batches(1)))

    for failure in failures_of(TP2, body).values():
        assert "trainer.strategy.whole_state_dict under `if trainer.is_global_zero`" in (
            f"{failure.message}{failure.output}{failure.details}"
        )


class Towers(pl.LightningModule):
    """A tower that batches of the first replica use, and, with the recipe of docs/data.md, the others too."""

    def __init__(self, recipe) -> None:
        super().__init__()
        self.layers = MLP().layers
        self.tower = nn.Linear(16, 16)
        self.recipe = recipe

    def training_step(self, batch, batch_idx):
        x = batch["x"]
        for layer in self.layers:
            x = layer(x).tanh()
        has_image = batch["image"].flatten()[0] > 0
        if has_image:
            x = x + self.tower(batch["x"])
        elif self.recipe:
            x = x + 0 * self.tower(torch.zeros(1, 16)).sum()
        return (x - batch["y"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_dummy_forward_keeps_ranks_together():
    """The gradients are those of both replicas, averaged: half of what the replica with images has."""

    def body(layout):
        be_quiet()
        torch.manual_seed(0)
        module = Towers(recipe=True)
        batches = [
            {**batch, "image": torch.cat([torch.ones(4, 1), torch.zeros(4, 1)])}
            for batch in vector_batches(2)
        ]
        if layout is None:
            opt = module.configure_optimizers()
            for batch in batches:
                opt.zero_grad()
                halves = [{key: value.chunk(2)[half] for key, value in batch.items()} for half in (0, 1)]
                (sum(module.training_step(half, 0) for half in halves) / 2).backward()
                opt.step()
        else:
            make_trainer(strategy_of(layout), 2).fit(module, Batches(batches))
        return {name: whole(value) for name, value in module.named_parameters()}

    expected = body(None)
    for parameters in run_ranks(2, body, DP2, init=False):
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


class SometimesUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.extra = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, with_extra):
        x = self.linear(x).tanh()
        return x + self.extra(x) if with_extra else x


class Parts(pl.LightningModule):
    """In its second batch, rank 1 leaves out what `what` says; the last tower is never used by any rank."""

    def __init__(self, what) -> None:
        super().__init__()
        self.what = what
        self.layers = nn.ModuleList(SometimesUsed() for _ in range(4))
        self.tower, self.idle = nn.Linear(16, 16), nn.Linear(16, 16)

    def training_step(self, batch, batch_idx):
        x, parts = batch["x"], batch_idx == 1 and self.global_rank % 2 == 1
        for number, layer in enumerate(self.layers):
            if not (parts and self.what == "block" and number == 2):
                x = layer(x, with_extra=not (parts and self.what == "layer" and number == 1))
        if not (parts and self.what == "tower"):
            x = x + self.tower(x)
        return (x - batch["y"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


PARTED = {
    "block": ("the forward of layers.2", "the forward of layers.3"),
    "layer": ("no gradient for layers.1.extra.weight, layers.1.extra.bias",),
    "tower": ("no gradient for", "tower.weight, tower.bias"),
}
WITHOUT_WORDS = "without a result (signal 6)"
"""How gloo ends a process that receives more than it expects; the others speak for it."""


@pytest.mark.parametrize("layout", [DP2, {"dp_replicate": 2, "dp_shard": 2}], ids=["dp_shard=2", "hsdp"])
@pytest.mark.parametrize("what", PARTED)
def test_ranks_that_run_different_modules_end_and_name_them(what, layout):
    def body():
        be_quiet()
        make_trainer(strategy_of(layout), world_of(layout)).fit(Parts(what), Batches(vector_batches(4)))

    start = time.monotonic()
    failures = failures_of(layout, body)
    assert time.monotonic() - start < 40
    assert set(failures) == set(range(world_of(layout)))
    spoken = [
        f"{each.message}{each.output}{each.details}"
        for each in failures.values()
        if WITHOUT_WORDS not in each.message
    ]
    assert spoken
    # Where gloo ends rank 0, the place where ranks are compared goes with it: rank 1 knows of itself.
    must_say = spoken if what != "tower" else [text for text in spoken if "tower.weight" in text][:1]
    assert must_say, spoken
    for text in must_say:
        for word in (*PARTED[what], "must run the same modules"):
            assert word in text, text
        assert "rank 1 (" in text or "rank 3 (" in text, (
            text
        )  # the odd ranks part; under hsdp either may be first


def test_what_no_rank_uses_is_no_problem():
    def body():
        be_quiet()
        make_trainer(strategy_of(DP2), 2).fit(Parts("nothing"), Batches(vector_batches(4)))

    run_ranks(2, body, init=False)


def test_what_no_rank_uses_is_not_blamed_for_another_failure():
    class Failing(Parts):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2 and self.global_rank == 1:
                raise ValueError("something else")
            return super().training_step(batch, batch_idx)

    def body():
        be_quiet()
        make_trainer(strategy_of(DP2), 2).fit(Failing("nothing"), Batches(vector_batches(4)))

    for failure in failures_of(DP2, body).values():
        text = f"{failure.message}{failure.output}{failure.details}"
        assert "something else" in text
        assert "no gradient for" not in text


class Sleeps(pl.LightningModule):
    """The rank of the last stage takes long over a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MLP()

    def training_step(self, batch, batch_idx):
        loss = (self.model(batch["x"]) - batch["y"]).square().mean()
        if batch_idx == 1 and self.global_rank == 0:
            time.sleep(6)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("layout", [{"pp": 2, "num_microbatches": 2}, DP2], ids=["pp2", "dp2"])
def test_ranks_that_stand_still_say_where(layout, monkeypatch):
    monkeypatch.setattr(standing, "FIRST_S", 2.0)

    def body():
        be_quiet()
        make_trainer(strategy_of(layout), 2).fit(Sleeps(), Batches(vector_batches(3)))

    slow, waiting = (said_by(output) for output in run_ranks(2, body, init=False).outputs)
    assert any("it is in training_step" in line for line in slow), slow
    assert any("distributed" in line and "in training_step" not in line for line in waiting), waiting


def said_by(output):
    return [line for line in output.splitlines() if "has not moved for" in line]
