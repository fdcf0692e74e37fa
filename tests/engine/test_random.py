# SPDX-License-Identifier: Apache-2.0
"""Random numbers: dropout masks are of one layer, one sample and one step, whoever computes them."""

import itertools
import random

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.engine.runs import (
    DP2,
    PP2,
    PP2_DP2,
    PP2_INTERLEAVED,
    TP2,
    Batches,
    Regression,
    be_quiet,
    lm,
    make_trainer,
    name_of,
    seeded,
    strategy_of,
    token_batches,
    world_of,
)
from tests.harness import run_ranks


class Dropped(nn.Module):
    """Keeps the mask of every call."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.masks = []

    def forward(self, x):
        mask = nn.functional.dropout(torch.ones_like(x), 0.5, self.training)
        if torch.is_grad_enabled():  # the first batch runs once more beside training
            self.masks.append(mask.detach())
        return x * self.scale * (0.5 + mask)


class Masks(Regression):
    def __init__(self):
        super().__init__(nn.ModuleList(Dropped() for _ in range(4)))

    def training_step(self, batch, batch_idx):
        x = batch["x"]
        for block in self.model:
            x = block(x)
        return nn.functional.mse_loss(x, batch["y"])


def masks_of(layout):
    """The masks drawn on this rank, each of one layer, microbatch and step, and the replica."""
    be_quiet()
    batches = [{"x": torch.ones(8, 64), "y": torch.zeros(8, 64)} for _ in range(2)]
    module = Masks()
    trainer = make_trainer(strategy_of(layout), world_of(layout))
    trainer.fit(module, Batches(batches))
    return trainer.strategy.mesh.dp_rank, [mask for block in module.model for mask in block.masks]


@pytest.mark.parametrize("layout", [PP2, PP2_INTERLEAVED, DP2, PP2_DP2], ids=name_of)
def test_every_layer_microbatch_replica_and_step_has_masks_of_its_own(layout):
    found = run_ranks(world_of(layout), masks_of, layout, init=False, timeout_s=120)
    masks = [mask for _, of_rank in found for mask in of_rank]
    assert len(masks) == 4 * 2 * layout.get("num_microbatches", 1) * layout.get("dp_shard", 1)
    for mask in masks:
        assert 0.3 < (mask > 0).float().mean() < 0.7
    for one, other in itertools.combinations(masks, 2):
        rows = min(len(one), len(other))
        assert not torch.equal(one[:rows], other[:rows])


@pytest.mark.parametrize("layout", [TP2, {"dp_shard": 2, "tp": 2}, {**PP2, "tp": 2}], ids=name_of)
def test_dropout_under_tensor_parallelism_trains_alike_on_all_ranks(layout):
    def body():
        be_quiet()
        trainer = make_trainer(strategy_of(layout), world_of(layout))
        module = lm("adamw", dropout=0.5, attention_dropout=0.2)
        losses = []
        module.on_train_batch_end = lambda outputs, batch, batch_idx: losses.append(float(outputs["loss"]))
        trainer.fit(module, Batches(token_batches(4)))
        return trainer.strategy.mesh.dp_rank, losses

    by_replica = {}
    for replica, losses in run_ranks(world_of(layout), body, init=False, timeout_s=120):
        assert all(3 < loss < 9 for loss in losses)
        assert by_replica.setdefault(replica, losses) == pytest.approx(losses, rel=1e-6)
    assert len({tuple(losses) for losses in by_replica.values()}) == layout.get("dp_shard", 1)


class Draws(Regression):
    """Draws before the model and behind it, and keeps what its batches were."""

    def __init__(self):
        super().__init__()
        self.sums = []

    def on_train_batch_start(self, batch, batch_idx):
        self.sums.append(float(batch["x"].sum()))

    def training_step(self, batch, batch_idx):
        share = random.random() + numpy.random.rand()
        loss = nn.functional.mse_loss(self.model(share * batch["x"]), batch["y"])
        return loss * (random.random() + numpy.random.rand())

    def validation_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)


class Augmented(Dataset):
    """Draws its samples in the main process."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return {"x": torch.full((16,), random.random()), "y": torch.full((16,), float(numpy.random.rand()))}


@pytest.mark.parametrize("layout", [PP2, PP2_INTERLEAVED], ids=name_of)
def test_what_steps_draw_leaves_data_alike_in_a_replica(layout):
    def body():
        be_quiet()
        module = seeded(Draws)
        trainer = make_trainer(strategy_of(layout), world_of(layout), val_check_interval=2)
        trainer.fit(module, DataLoader(Augmented(), 4), DataLoader(Augmented(), 4))
        return module.sums

    one, other = run_ranks(2, body, init=False)
    assert len(set(one)) == 8
    assert one == other
