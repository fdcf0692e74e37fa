# SPDX-License-Identifier: Apache-2.0
"""Batches under a pipeline: what is split, what is passed whole, short ones, and lengths that change."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.engine.runs import (
    PP2,
    PP2_DP2,
    PP2_INTERLEAVED,
    Module,
    Regression,
    Run,
    be_quiet,
    check,
    lm,
    make_trainer,
    mlp,
    name_of,
    strategy_of,
    token_batches,
    token_loss,
    vector_batches,
    world_of,
)
from tests.harness import run_ranks


class MaskedBlock(nn.Module):
    """Attention under a mask that is given for each batch."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class MaskedDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(MaskedBlock() for _ in range(4))
        self.head = nn.Linear(16, 64)

    def forward(self, ids, mask):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


class Masked(Module):
    def __init__(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            super().__init__(MaskedDecoder())

    def training_step(self, batch, batch_idx):
        mask = batch["mask"]
        mask = mask[:, None, :] if mask.dim() == 2 else mask.squeeze(1)  # (B, S) or (B, 1, S, S)
        return token_loss(self.model(batch["ids"], mask), batch["labels"])


def masked_batches(kind):
    """Each sample has its own mask: `padding` (B, S), `documents` (B, 1, S, S), or one for all, (1, 1, S, S)."""
    batches = token_batches(3)
    for number, batch in enumerate(batches):
        lengths = torch.arange(8) % 6 + 2 + number % 2
        padding = torch.arange(8)[None] < lengths[:, None]
        documents = (torch.arange(8)[None] * 8 // (lengths[:, None] + 1)).floor()
        same = documents[:, :, None] == documents[:, None, :]
        batch["mask"] = {"padding": padding, "documents": same[:, None], "one for all": same[:1, None]}[kind]
    return batches


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    name: str
    weight: float


class Named(Regression):
    """Reads a dataclass."""

    def training_step(self, batch, batch_idx):
        assert batch.name == "vectors"
        return nn.functional.mse_loss(self.model(batch.x), batch.y) * batch.weight


class Pair(Regression):
    """Reads a tuple."""

    def training_step(self, batch, batch_idx):
        x, (y, names) = batch
        assert len(names) == len(x)
        assert all(name.startswith("sample") for name in names)
        return nn.functional.mse_loss(self.model(x), y)


class Packed(Module):
    """Reads offsets and numbers that are not of one sample each."""

    def training_step(self, batch, batch_idx):
        assert batch["cu_seqlens"].tolist() == [0, 3, 8]
        assert batch["count"] == 5
        assert batch["kind"] == "packed"
        factor = 1 + 0.1 * batch["count"] + batch["temperature"]
        return token_loss(self.model(batch["ids"]) * factor, batch["labels"])


class LabelSum(Module):
    """A loss that shows whose labels it saw."""

    def training_step(self, batch, batch_idx):
        logits = self.model(batch["ids"])
        return token_loss(logits, batch["labels"]) + batch["labels"].double().mean()


class Validated(Module):
    """Validates on another part of the same batch than it trains on."""

    def training_step(self, batch, batch_idx):
        return token_loss(self.model(batch["ids"][:, :-1]), batch["ids"][:, 1:])

    def validation_step(self, batch, batch_idx):
        logits = self.model(batch["ids"])
        self.log("val_loss", token_loss(logits, batch["labels"]))
        self.log("val_accuracy", (logits.argmax(-1) == batch["labels"]).double().mean())


def packed_batches():
    extra = {
        "cu_seqlens": torch.tensor([0, 3, 8]),
        "count": 5,
        "kind": "packed",
        "temperature": torch.tensor(0.5),
    }
    return [{**batch, **extra} for batch in token_batches()]


def encoded_batches():
    from transformers import BatchEncoding

    return [BatchEncoding(dict(batch)) for batch in token_batches()]


def short_batches():
    """8 samples, 7, and one."""
    return [
        {key: value[:size] for key, value in batch.items()}
        for size, batch in zip((8, 7, 1, 6), token_batches(4), strict=True)
    ]


CHANGING = [
    batch
    for pair in zip(token_batches(3, length=8), token_batches(3, length=16), strict=True)
    for batch in pair
]
RUNS = {
    "mask of padding": Run(module=Masked, batches=masked_batches("padding")),
    "mask of documents": Run(module=Masked, batches=masked_batches("documents")),
    "one mask for all samples": Run(module=Masked, batches=masked_batches("one for all")),
    "dataclass": Run(
        module=lambda: mlp(cls=Named),
        batches=[Sample(batch["x"], batch["y"], "vectors", 0.5) for batch in vector_batches()],
    ),
    "tuple with names": Run(
        module=lambda: mlp(cls=Pair),
        batches=[(b["x"], (b["y"], [f"sample {i}" for i in range(8)])) for b in vector_batches()],
    ),
    "offsets and numbers": Run(module=lambda: lm(cls=Packed), batches=packed_batches()),
    "BatchEncoding": Run(module=lm, batches=encoded_batches()),
    "lengths change": Run(module=lambda: lm("adamw", LabelSum), batches=CHANGING),
    "lengths change in a window": Run(
        module=lambda: lm(cls=LabelSum), batches=CHANGING, options={"accumulate_grad_batches": 2}
    ),
    "validation": Run(
        module=lambda: lm("adamw", Validated, dropout=0.0), batches=short_batches(), options={"max_epochs": 2}
    ),
    "short batches": Run(module=lm, batches=short_batches()),
    "short batches in a window": Run(
        module=lm, batches=short_batches(), options={"accumulate_grad_batches": 3}
    ),
}


@pytest.mark.parametrize("layout", [PP2, PP2_INTERLEAVED], ids=name_of)
def test_batches(layout):
    check(layout, RUNS)


def test_replicas_with_lengths_of_their_own():
    def split(batch, replica, replicas):
        return {key: value.chunk(2)[replica][:, : 8 - 4 * replica] for key, value in batch.items()}

    def padded(batch):
        labels = batch["labels"].clone()
        labels[4:, 4:] = -100
        return {"ids": batch["ids"], "labels": labels}

    class Weighted(Module):
        def training_step(self, batch, batch_idx):
            loss = token_loss(self.model(batch["ids"]), batch["labels"])
            return {"loss": loss, "num_tokens": (batch["labels"] != -100).sum()}

    compare = ("gradients", "parameters")
    reference = Run(module=lm, batches=[padded(batch) for batch in token_batches()])
    run = Run(
        module=lambda: lm(cls=Weighted),
        batches=token_batches(),
        split=split,
        reference=reference,
        compare=compare,
    )
    check(PP2_DP2, {"lengths by replica": run})


class Changing(Regression):
    """Its steps change their batches."""

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return {key: value.clone() for key, value in batch.items()}

    def training_step(self, batch, batch_idx):
        y = batch.pop("y").add_(1)
        return F.mse_loss(self.model(batch["x"].mul_(0.5)), y)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.training_step(batch, batch_idx))


@pytest.mark.parametrize("layout", [PP2, PP2_INTERLEAVED], ids=name_of)
def test_a_step_may_change_its_batch(layout):
    records = check(layout, {"changing": Run(module=lambda: mlp(cls=Changing), batches=vector_batches())})
    alone = seeded_validation(None)
    assert alone == pytest.approx(run_ranks(2, seeded_validation, layout, init=False)[0])
    assert len(records["changing"]) == 2


def seeded_validation(layout):
    """What an untrained module's validation logs."""
    be_quiet()
    strategy = "auto" if layout is None else strategy_of(layout)
    trainer = make_trainer(strategy, world_of(layout or {}))
    return trainer.validate(mlp(cls=Changing), DataLoader(vector_batches(2), None), verbose=False)[0]["val"]
