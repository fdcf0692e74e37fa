# SPDX-License-Identifier: Apache-2.0
"""Estimated activations against what the engine's ranks really keep, under each mesh and each recomputation."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_3d.estimator import Layout, Workload
from lightning_3d.estimator.activations import dense_activations, kept_per_token, microbatches_in_flight
from lightning_3d.models import shape_of_module
from tests.engine.runs import be_quiet, make_trainer, strategy_of, world_of
from tests.harness import run_ranks
from tests.live_bytes import LiveBytes
from tests.models import decoder, tokens

LENGTH = 32
NUM_MICROBATCHES = 4


class Model(pl.LightningModule):
    """Counts bytes: those alive at the loss, and the most at any time of a batch."""

    def __init__(self, num_layers):
        super().__init__()
        self.model = decoder(n_layers=num_layers, dim=64, hidden_dim=256, vocab_size=512)
        self.bytes = LiveBytes()
        self.at_loss = 0

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:  # in the first one the cut is checked, on a whole copy of the model
            self.bytes.__enter__()

    def on_after_backward(self):
        if self.trainer.fit_loop.batch_idx == 1:
            self.bytes.__exit__(None, None, None)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())
        self.at_loss = self.bytes.now
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def bytes_of(layout, recompute, num_layers, batch):
    """What is kept when the backward begins; with stages, of which all but the last see no loss, the peak of all."""
    be_quiet()
    ids, labels = tokens(batch, LENGTH, seed=1)
    module = Model(num_layers)
    trainer = make_trainer(strategy_of({**layout, "recompute": recompute}), world_of(layout), max_steps=2)
    trainer.fit(module, DataLoader([{"ids": ids, "labels": labels}] * 2, batch_size=None))
    return module.bytes.peak if "pp" in layout else module.at_loss


def kept_bytes(layout, recompute):
    """Bytes of a token and a block: what more blocks keep of more sentences; all else cancels out."""
    stages, parts = layout.get("pp", 1), layout.get("num_microbatches", 1)
    few, many = 2 * stages, 4 * stages
    size = {
        (depth, batch): bytes_of(layout, recompute, depth, batch * parts)
        for depth in (few, many)
        for batch in (2, 4)
    }
    more = size[many, 4] - size[many, 2] - size[few, 4] + size[few, 2]
    return more / ((many - few) / stages * 2 * LENGTH)


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"dp_shard": 2, "reshard_after_forward": False},
        {"tp": 2},
        {"tp": 2, "sequence_parallel": False},
        {"pp": 2, "num_microbatches": NUM_MICROBATCHES},
    ],
    ids=str,
)
def test_a_block_keeps_what_is_estimated(layout):
    modes = ("none", "selective", "full")

    def body():
        return [kept_bytes(layout, mode) for mode in modes]

    shape = shape_of_module(Model(4))
    work = Workload(seq_len=LENGTH, global_batch=4, matmul="fp32", fused=False)
    block = dense_activations(shape, work)
    by_rank = run_ranks(world_of(layout), body, init=False, timeout_s=110)
    for rank, measured in enumerate(by_rank):
        stage = world_of(layout) - 1 - rank if "pp" in layout else 0
        in_flight = microbatches_in_flight("1f1b", layout.get("pp", 1), stage, 1, NUM_MICROBATCHES)
        assert measured == sorted(measured, reverse=True)
        for mode, found in zip(modes, measured, strict=True):
            options = {"dp_shard": 1, **layout, "recompute": mode}
            options.pop("num_microbatches", None)
            estimate = in_flight * kept_per_token(block, Layout(**options))
            assert found == pytest.approx(estimate, rel=0.15), (mode, rank)
