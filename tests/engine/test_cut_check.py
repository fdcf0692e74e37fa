# SPDX-License-Identifier: Apache-2.0
"""Models that no adapter knows: what stages can follow trains as on one process, what they would lose is refused."""

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import MeanMetric

from lightning_3d.errors import ModelError
from lightning_3d.pipeline import cut_check
from tests.engine.runs import (
    PP2,
    PP2_DP2,
    PP2_INTERLEAVED,
    Regression,
    Run,
    check,
    fit,
    lm,
    name_of,
    seeded,
    token_batches,
    vector_batches,
    world_of,
)
from tests.engine.test_errors import failure_of
from tests.harness import run_ranks


class Net(nn.Module):
    """An input layer, four blocks and an output layer."""

    def __init__(self, block=lambda: nn.Linear(16, 16)):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(block() for _ in range(4))
        self.last = nn.Linear(16, 16)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


# --- what a cut would lose


class SkipFromFirstBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        early = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x + early


class SkipFromInputLayer(Net):
    def forward(self, x):
        early = x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x + early)


class SilentHead(SkipFromInputLayer):
    """Its head is zero at first, so that no loss tells."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.last.weight)


class WithEarly(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, early):
        return torch.tanh(self.linear(x) + early)


class EveryBlockTakesTheInput(Net):
    def __init__(self):
        super().__init__(WithEarly)

    def forward(self, x):
        early = x = self.first(x)
        for layer in self.layers:
            x = layer(x, early)
        return self.last(x)


class UNet(nn.Module):
    """The second half of the blocks takes what the first half gave."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(WithEarly() for _ in range(6))

    def forward(self, x):
        given = []
        for layer in self.layers[:3]:
            x = layer(x, torch.zeros_like(x))
            given.append(x)
        for layer in self.layers[3:]:
            x = layer(x, given.pop())
        return x


class DeepSupervision(Net):
    """What every block gives is a part of the result."""

    def forward(self, x):
        x, total = self.first(x), 0
        for layer in self.layers:
            x = torch.tanh(layer(x))
            total = total + x
        return self.last(total)


class Writes(nn.Module):
    """Hands on a number in an object that all blocks have."""

    def __init__(self, state):
        super().__init__()
        self.linear, self.state = nn.Linear(16, 16), state

    def forward(self, x):
        self.state["scale"] = self.state.get("scale", 1.0) * 1.5
        return torch.tanh(self.linear(x)) * self.state["scale"]


class SharedState(Net):
    def __init__(self):
        self.__dict__["state"] = {}
        super().__init__(lambda: Writes(self.state))

    def forward(self, x):
        self.state.clear()
        return super().forward(x)


class Counts(nn.Module):
    """Counts calls in a buffer that all blocks have."""

    def __init__(self, count):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("count", count)

    def forward(self, x):
        self.count += 1
        return torch.tanh(self.linear(x)) * self.count.clone()


class SharedBuffer(Net):
    def __init__(self):
        count = torch.zeros(())
        super().__init__(lambda: Counts(count))
        self.register_buffer("count", count)

    def forward(self, x):
        self.count.zero_()
        return super().forward(x)


LOST = [
    SkipFromFirstBlock,
    SkipFromInputLayer,
    SilentHead,
    EveryBlockTakesTheInput,
    UNet,
    DeepSupervision,
    SharedState,
    SharedBuffer,
]
BY_NUMBERS_ONLY = (SharedState, SharedBuffer)
"""No stand-in is computed with."""


def refusals(layout, classes):
    def body():
        return {
            cls.__name__: failure_of(Regression(seeded(cls)), vector_batches(1), layout, limit_val_batches=0)
            for cls in classes
        }

    return run_ranks(world_of(layout), body, init=False, timeout_s=150)


def expect_refusal(by_rank, name):
    texts = [found[name] for found in by_rank]
    assert all(text is not None for text in texts), f"{name}: it trained"
    assert len(set(texts)) == 1, f"{name}: ranks differ: {texts}"
    kind, text = texts[0]
    assert issubclass(kind, ModelError), (name, kind)
    for word in ("cannot be cut into stages", "hidden state", "blocks=...", "pp=1"):
        assert word in text, (name, text)
    assert "\n" not in text
    return text


@pytest.mark.timeout(200)
@pytest.mark.parametrize("layout", [PP2, PP2_INTERLEAVED, PP2_DP2], ids=name_of)
def test_what_stages_would_lose_is_refused_on_every_rank(layout):
    by_rank = refusals(layout, LOST)
    for cls in LOST:
        expect_refusal(by_rank, cls.__name__)


def test_of_a_model_too_large_to_keep_stand_ins_are_found(monkeypatch):
    monkeypatch.setattr(cut_check, "LIMIT_BYTES", 0)
    classes = [cls for cls in LOST if cls not in BY_NUMBERS_ONLY]
    by_rank = refusals(PP2, classes)
    for cls in classes:
        assert "only an earlier stage has" in expect_refusal(by_rank, cls.__name__)


def test_a_small_model_is_compared_in_numbers():
    """Also where nothing is computed with a stand-in."""
    text = expect_refusal(refusals(PP2, [SharedState]), "SharedState")
    assert "in the whole model" in text


# --- what a cut can follow


class CountsBetween(Net):
    """A buffer of the model changes between its blocks."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        x = self.first(x)
        self.count.zero_()
        for layer in self.layers:
            x = torch.tanh(layer(x)) * (1 + self.count.clone())
            self.count += 0.5
        return self.last(x)


class DislikesNaN(Net):
    def forward(self, x):
        x = self.first(x)
        if x.isnan().any():
            raise ValueError("NaN behind the first layer")
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


class Mixup(Regression):
    """Draws numbers that no seed of torch sets."""

    def training_step(self, batch, batch_idx):
        share = float(numpy.random.beta(1.0, 1.0))
        x = share * batch["x"] + (1 - share) * batch["x"].flip(0)
        return F.mse_loss(self.model(x), batch["y"])


class Adds(Regression):
    """Gets a module when training begins."""

    def on_train_start(self):
        self.mean = MeanMetric()


class Loads(Regression):
    """Takes other weights when training begins."""

    def on_train_start(self):
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5)


def dropout_net():
    return Net(lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)))


def norm_net():
    return Net(lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)))


def trained(make, cls=Regression, **options):
    return Run(module=lambda: cls(seeded(make)), batches=vector_batches(), **options)


RIGHT = {
    "plain": trained(Net),
    "a buffer that changes between blocks": trained(CountsBetween),
    "norms": trained(norm_net),
    "a step that looks for NaN": trained(DislikesNaN),
    "weights that a hook changes": trained(Net, Loads),
    "a module that a hook adds": trained(Net, Adds),
    "numbers of numpy": trained(Net, Mixup, compare=()),
    "dropout": trained(dropout_net, compare=()),
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("layout", [PP2, PP2_INTERLEAVED, PP2_DP2], ids=name_of)
def test_what_stages_can_follow_trains(layout):
    check(layout, RIGHT)


@pytest.mark.parametrize("layout", [PP2, PP2_DP2, {**PP2, "tp": 2}], ids=name_of)
def test_the_check_is_not_only_skipped(layout, monkeypatch):
    """Losses are compared on the last stage, and agree; with dropout too."""
    seen = []

    class Seen(cut_check.CutCheck):
        def compare(self, *args, **kwargs):
            super().compare(*args, **kwargs)
            seen.append((args[2], self._expected))

    monkeypatch.setattr("lightning_3d.engine.CutCheck", Seen)
    decoder = Run(module=lm, batches=token_batches(1))
    runs = [decoder, *(RIGHT[name] for name in ("plain", "norms", "dropout") if "tp" not in layout)]

    def body():
        for run in runs:
            fit(run, layout)
        return seen

    by_rank = run_ranks(world_of(layout), body, init=False)
    assert all(len(seen) == len(runs) for seen in by_rank)
    last = by_rank[: len(by_rank) // 2]  # global rank 0 is of the last stage
    for loss, expected in (pair for seen in last for pair in seen):
        assert expected is not None
        assert float(loss) == pytest.approx(float(expected), rel=1e-6)
