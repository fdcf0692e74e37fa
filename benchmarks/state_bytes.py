# SPDX-License-Identifier: Apache-2.0
"""Bytes of parameters, gradients and optimizer state that each rank really holds, over the layout's formula.

In mixed precision a parameter costs 16 bytes: 4 as fp32 master, 4 of gradient, 8 of Adam moments (ZeRO, Rajbhandari et
al. 2020, section 3.1, with fp32 gradients). Full sharding over N ranks divides all of it: 16 P / N. Exits non-zero when
a rank holds more than the bound.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse import auto_cli
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from benchmarks.peers import PlainModule
from lightning_3d.selfcheck.model import DecoderShape
from lightning_3d.strategies import ThreeDStrategy
from tests.harness import run_ranks

SHAPE = DecoderShape(
    vocab_size=512, dim=256, num_layers=4, num_heads=8, num_kv_heads=4, ffn_dim=768, sequence_length=16
)
BYTES_PER_PARAMETER = 16
BOUND = 1.02
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"dp_replicate": 4, "dp_shard": 1},
    {"dp_replicate": 1, "dp_shard": 4},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_replicate": 1, "dp_shard": 2, "tp": 2},
    {"dp_replicate": 1, "dp_shard": 2, "pp": 2},
    {"dp_replicate": 1, "dp_shard": 1, "pp": 2, "tp": 2},
)


class CountBytes(pl.Callback):
    """Adds up what is in memory before an optimizer step: all parameters are sharded, all gradients there."""

    held: int = 0

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Keeps the most; from the second step on the optimizer has its state."""
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        states = [value for state in optimizer.state.values() for value in state.values()]
        tensors = [
            *pl_module.parameters(),
            *gradients,
            *(s for s in states if isinstance(s, Tensor) and s.dim()),
        ]
        # Gradients of one block are views of one buffer: count each storage once, and all of it.
        storages = {
            s.data_ptr(): s.nbytes() for s in (_local(tensor).untyped_storage() for tensor in tensors)
        }
        self.held = max(self.held, sum(storages.values()))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def expected_bytes(layout: dict[str, Any]) -> float:
    """16 bytes for each parameter of the fullest stage, over the ranks that share it.

    Tensor parallelism splits matrices; norms stay whole on its ranks.
    """
    model = PlainModule(SHAPE).model
    matrices = {name: p.numel() for name, p in model.named_parameters() if p.dim() == 2}
    vectors = {name: p.numel() for name, p in model.named_parameters() if p.dim() == 1}

    def count(prefixes: tuple[str, ...]) -> float:
        split = sum(n for name, n in matrices.items() if name.startswith(prefixes))
        return split / layout.get("tp", 1) + sum(
            n for name, n in vectors.items() if name.startswith(prefixes)
        )

    if layout.get("pp", 1) == 1:
        fullest = count(("",))
    else:
        fullest = max(
            count(("embed.", "layers.0.", "layers.1.")), count(("layers.2.", "layers.3.", "norm.", "head."))
        )
    return BYTES_PER_PARAMETER * fullest / layout["dp_shard"]


def _held_bytes(layout: dict[str, Any]) -> int:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    counter = CountBytes()
    trainer = pl.Trainer(
        strategy=ThreeDStrategy(**layout),
        devices=4,
        accelerator="cpu",
        precision="bf16-mixed",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[counter],
    )
    ids = torch.randint(0, SHAPE.vocab_size, (64, SHAPE.sequence_length + 1))
    trainer.fit(PlainModule(SHAPE), DataLoader(ids, batch_size=4))  # type: ignore[arg-type]
    return counter.held


def main() -> int:
    """Prints held and expected bytes of the fullest rank in every layout."""
    torch.set_num_threads(1)
    table = Table(title="parameters + gradients + Adam of the fullest rank, bf16-mixed")
    for column in ("layout", "held, KiB", "formula, KiB", "ratio", "bound", ""):
        table.add_column(column, justify="left" if column == "layout" else "right")
    failed = 0
    for layout in LAYOUTS:
        held = max(run_ranks(4, _held_bytes, layout, init=False, timeout_s=300))
        expected = expected_bytes(layout)
        passed = 0.98 <= held / expected <= BOUND
        failed += not passed
        name = " x ".join(f"{axis}={size}" for axis, size in layout.items() if size > 1)
        table.add_row(
            name,
            f"{held / 1024:,.0f}",
            f"{expected / 1024:,.0f}",
            f"{held / expected:.4f}",
            f"{BOUND:.2f}",
            "ok" if passed else "FAIL",
        )
    Console(width=110).print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(auto_cli(main, as_positional=False))
