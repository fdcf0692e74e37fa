# SPDX-License-Identifier: Apache-2.0
"""Training whose batches say which samples they are, to see where a resumed run goes on."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.engine.runs import Layout, be_quiet, make_trainer, seeded, strategy_of, world_of
from tests.harness import run_ranks

WIDTH = 8


class Numbered(Dataset[tuple[int, Tensor]]):
    """Sample i is (i, noise of i)."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up_proj = nn.Linear(WIDTH, 2 * WIDTH)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down_proj(torch.tanh(self.up_proj(x))))


class Watched(pl.LightningModule):
    """Learns the identity; remembers the samples and losses of every batch."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dropout) for _ in range(2))
        self.seen: list[list[int]] = []
        self.losses: list[float] = []
        self.validated_at: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, x = batch
        loss = (self(x) - x).square().mean()
        self.seen.append(ids.tolist())
        self.losses.append(float(loss.detach()))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.validated_at.append(self.trainer.global_step)
        self.log("val_loss", (self(batch[1]) - batch[1]).square().mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", (self(batch[1]) - batch[1]).square().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def watched(dropout: float = 0.0) -> Watched:
    return seeded(lambda: Watched(dropout))


def loader(size: int, layout: Layout, global_batch: int = 4, **options: Any) -> DataLoader[Any]:
    replicas = layout.get("dp_shard", 1) * layout.get("dp_replicate", 1)
    return DataLoader(Numbered(size), batch_size=global_batch // replicas, **options)


def everywhere(seen: Sequence[list[int]]) -> list[list[int]]:
    """Each step's samples of all replicas, sorted; collective."""
    parts: list[Any] = [seen]
    if dist.is_initialized():
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, seen)
    return [sorted({i for part in parts for i in part[step]}) for step in range(len(parts[0]))]


def train(
    layout: Layout,
    data: Any,
    *,
    module: Watched | None = None,
    callbacks: Sequence[pl.Callback] = (),
    resume: Any = None,
    strategy: Any = None,
    val: Any = None,
    **options: Any,
) -> tuple[Watched, pl.Trainer]:
    """One fit on this rank."""
    be_quiet()
    module = module or watched()
    options = {"use_distributed_sampler": True, "enable_checkpointing": bool(callbacks), **options}
    trainer = make_trainer(
        strategy or strategy_of(layout), world_of(layout), callbacks=list(callbacks), **options
    )
    trainer.fit(module, data, val, ckpt_path=resume)
    return module, trainer


def on_ranks(layout: Layout, body: Any, timeout_s: float = 100) -> list[Any]:
    return run_ranks(world_of(layout), body, init=False, timeout_s=timeout_s)


def every(steps: int, folder: Any, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=steps, save_top_k=-1, **options)
