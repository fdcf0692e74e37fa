# SPDX-License-Identifier: Apache-2.0
"""Models as people write them: where the layers are, what stands around them, what is frozen, shared or unused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.engine.runs import (
    DP2,
    PP2,
    PP2_DP2,
    PP2_INTERLEAVED,
    Module,
    Regression,
    Run,
    check,
    few_on_many_ranks,
    lm,
    mlp,
    name_of,
    seeded,
    token_batches,
    token_loss,
    vector_batches,
)
from tests.models import Block, DecoderConfig, frequencies

CONFIG = DecoderConfig()


class Direct(Module):
    """The model's parts hang on the LightningModule itself."""

    def __init__(self):
        super().__init__(nn.Identity())
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Block(CONFIG) for _ in range(4))
        self.norm = nn.RMSNorm(32)
        self.head = nn.Linear(32, 64)

    def training_step(self, batch, batch_idx):
        hidden, freqs = self.embed(batch["ids"]), frequencies(8, 8, batch["ids"].device)
        for layer in self.layers:
            hidden = layer(hidden, freqs)
        return token_loss(self.head(self.norm(hidden)), batch["labels"])


class Around(Regression):
    """Parameters on the LightningModule, used before and after the model, and one that is never used."""

    def __init__(self, model, optimizer):
        super().__init__(model, optimizer)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.shift = nn.Parameter(torch.linspace(-1, 1, 16))
        self.both = nn.Linear(16, 16)
        self.unused = nn.Parameter(torch.ones(16))

    def training_step(self, batch, batch_idx):
        out = self.model(self.both(batch["x"] * self.scale))
        return F.mse_loss(self.both(out) + self.shift, batch["y"])


class Adapted(nn.Module):
    """A frozen layer in bf16 with an adapter in fp32."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(16, 16).bfloat16().requires_grad_(False)
        self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)

    def forward(self, x):
        return self.base(x.bfloat16()).float() + self.up(self.down(x))


class Adapters(Regression):
    """The optimizer is given what is trained."""

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


class Twice(nn.Module):
    """One linear layer applied twice."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(torch.tanh(self.linear(x)))


class WithRest(nn.Module):
    """Returns its hidden state and something else that is not used."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return torch.tanh(self.linear(x)), x.detach().abs().mean()


class Stack(nn.Module):
    """Blocks with something between them."""

    def __init__(self, make, count=4):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(make() for _ in range(count))
        self.last = nn.Linear(16, 16)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            x = torch.tanh(x[0] if isinstance(x, tuple) else x) * 2
        return self.last(x)


def linears(optimizer="sgd"):
    return seeded(lambda: Regression(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), optimizer))


def activations(optimizer="sgd"):
    parts = [part for _ in range(4) for part in (nn.Linear(16, 16), nn.Tanh())]
    return Regression(nn.Sequential(*parts), optimizer)


class Frozen(Regression):
    """The first two layers are frozen, and the optimizer is given everything."""

    def __init__(self, model, optimizer):
        super().__init__(model, optimizer)
        model.layers[:2].requires_grad_(False)


class FilteredFrozen(Frozen):
    """The optimizer is given what is trained, which the first stage has nothing of."""

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


class FrozenEmbedding(Module):
    """The embedding and the first two blocks are frozen."""

    def __init__(self, model, optimizer):
        super().__init__(model, optimizer)
        model.tok_embeddings.requires_grad_(False)
        model.layers[:2].requires_grad_(False)


def one_activation(optimizer="sgd"):
    tanh = nn.Tanh()
    return Regression(
        nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(16, 16), tanh))), optimizer
    )


class TiedByHand(Module):
    """Uses the embedding's weight as its head; the other embedding is defined behind the layers."""

    def __init__(self):
        super().__init__(nn.Identity())
        self.head_norm = nn.LayerNorm(32)
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.positions = nn.Embedding(8, 32)

    def training_step(self, batch, batch_idx):
        hidden = self.embed(batch["ids"]) + self.positions(torch.arange(8))
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return token_loss(F.linear(self.head_norm(hidden), self.embed.weight), batch["labels"])


class BatchedBuffers(nn.Module):
    """Parameters and buffers of unusual layouts and types."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8).t())
        self.register_buffer("spin", torch.polar(torch.ones(8), torch.arange(8.0)))
        self.register_buffer("ones", torch.ones(1).expand(16))
        self.register_buffer("flag", torch.tensor(True))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        x = F.linear(x, self.weight) @ self.weight * self.ones
        x = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (8, 2))) * self.spin).flatten(-2)
        for layer in self.layers:
            x = torch.tanh(layer(x)) if self.flag else x
        return x


class SharedWeight(Regression):
    """Two layers share a weight."""

    def __init__(self, model, optimizer):
        super().__init__(model, optimizer)
        model.layers[1].weight = model.layers[0].weight


class OneLayer(Regression):
    """One layer, four times."""

    def __init__(self, model, optimizer):
        super().__init__(model, optimizer)
        model.layers = nn.ModuleList([model.layers[0]] * 4)


class Recomputed(Regression):
    """Recomputes its layers in the backward."""

    def training_step(self, batch, batch_idx):
        x = batch["x"]
        for layer in self.model.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return F.mse_loss(x, batch["y"])


def vectors(make, optimizer="sgd", **options):
    return Run(module=lambda: seeded(lambda: make(optimizer)), batches=vector_batches(), **options)


CLIPPED = {"options": {"gradient_clip_val": 0.1}}
MODELS = {
    "parts on the LightningModule": Run(module=lambda: seeded(Direct), batches=token_batches()),
    "parameters around the model": vectors(lambda o: mlp(o, Around), **CLIPPED),
    "parameters around the model, adamw": vectors(lambda o: mlp(o, Around), "adamw"),
    "Sequential": vectors(lambda o: linears(o)),
    "Sequential with activations": vectors(activations),
    "a weight used twice": vectors(lambda o: Regression(Stack(Twice), o), **CLIPPED),
    "blocks that return tuples": vectors(lambda o: Regression(Stack(WithRest), o)),
    "fp32 adapters in a bf16 base": vectors(lambda o: Adapters(Stack(Adapted), o)),
    "frozen beginning": vectors(lambda o: mlp(o, Frozen), **CLIPPED),
    "frozen beginning, optimizer of the rest": vectors(lambda o: mlp(o, FilteredFrozen), **CLIPPED),
    "frozen embedding and blocks, adamw": Run(
        module=lambda: lm("adamw", FrozenEmbedding), batches=token_batches(), **CLIPPED
    ),
    "one activation for all layers": vectors(one_activation),
    "tied by hand": Run(
        module=lambda: seeded(TiedByHand),
        batches=token_batches(),
        strategy={
            "first_stage_modules": ("embed", "positions"),
            "last_stage_modules": ("embed", "head_norm"),
        },
        **CLIPPED,
    ),
    "unusual tensors": vectors(lambda o: Regression(BatchedBuffers(), o), **CLIPPED),
    "layers of one stage share a weight": vectors(
        lambda o: mlp(o, SharedWeight), strategy={"schedule": "1f1b", "virtual_stages": 1}
    ),
    "recomputation by the user": vectors(lambda o: mlp(o, Recomputed)),
    "five layers": Run(module=lambda: lm(n_layers=5, tied=True), batches=token_batches(), **CLIPPED),
}


@pytest.mark.parametrize("layout", [PP2, PP2_INTERLEAVED, DP2, PP2_DP2], ids=name_of)
def test_models(layout):
    few = (
        "parts on the LightningModule",
        "parameters around the model, adamw",
        "tied by hand",
        "fp32 adapters in a bf16 base",
        "frozen beginning, optimizer of the rest",
        "unusual tensors",
    )
    check(layout, few_on_many_ranks(layout, MODELS, few))


def test_shared_layers_under_data_parallelism():
    check(DP2, {"one layer four times": vectors(lambda o: mlp(o, OneLayer), **CLIPPED)})


def test_more_stages_than_most():
    check(
        {"pp": 4, "num_microbatches": 4},
        {name: MODELS[name] for name in ("five layers", "frozen beginning", "parts on the LightningModule")},
    )
