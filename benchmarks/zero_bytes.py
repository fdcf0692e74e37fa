# SPDX-License-Identifier: Apache-2.0
"""Bytes a parameter costs on the device and on the host under each ZeRO stage, measured, beside the formula.

Mixed precision (bf16), Adam, N ranks. Without offload (ZeRO, Rajbhandari et al. 2020, section 3: bf16 parameters and
gradients, fp32 masters and two moments): 4 + 12/N, 2 + 14/N and 16/N bytes, counted while batches are accumulated; with
one batch a step DeepSpeed frees the whole gradients of stage 1 in the backward, and stage 1 costs what stage 2 does.

With the optimizer on the host DeepSpeed keeps there 12/N of state, 4/N of gradients in fp32, and 2/N more: updated
parameters on their way back in stages 1 and 2, gradients as they come in stage 3. The device keeps the parameters, 2 or
2/N. Stages 1 and 2 hold one buffer of the largest parameter (L elements of P) on either side, 2 L/P bytes a parameter.

Counted are the storages of all tensors that are alive after a backward, on a CPU in two ranks' processes; which of them
would be on the device is DeepSpeed's placement. Exits non-zero when one is further than 3% from its formula.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gc
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse import auto_cli
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d.strategies import ZeroOffloadStrategy
from tests.harness import run_ranks

WIDTH, DEPTH = 768, 8
BOUND = 0.03
COUNTED_BATCH = 2

STAGES = (1, 2, 3)
PLACES = ("none", "cpu")


def expected(stage: int, place: str, ranks: int) -> tuple[float, float]:
    """Bytes a parameter on the device and on the host; see the module's docstring."""
    if place == "none":
        return {1: 4 + 12 / ranks, 2: 2 + 14 / ranks, 3: 16 / ranks}[stage], 0.0
    if stage == 3:
        return 2 / ranks, 18 / ranks
    buffer = 2 / DEPTH  # layers are equal: the largest is P / DEPTH
    return 2 + buffer, 18 / ranks + buffer


class Stack(pl.LightningModule):
    """Equal layers, which leave next to nothing in memory beside their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Mean square of what comes out."""
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class CountBytes(pl.Callback):
    """Adds up the storages that are alive when all gradients are there, once the optimizer has its state."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.bytes = {"device": 0, "host": 0}
        self.shares: dict[str, int] = {}

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Counts once: a step has been made, and the next one is not due yet."""
        if trainer.fit_loop.batch_idx != COUNTED_BATCH:
            return
        strategy: Any = trainer.strategy
        gc.collect()
        zero = strategy.deepspeed_engine.optimizer
        named = dict(self._named(zero, pl_module, strategy.optimizers[0]))
        self.bytes, self.shares = {"device": 0, "host": 0}, {}
        for pointer, num_bytes in alive().items():
            category, where = named.get(pointer, ("other", "device"))
            if self.place == "none":
                where = "device"
            self.bytes[where] += num_bytes
            self.shares[category] = self.shares.get(category, 0) + num_bytes

    def _named(
        self, zero: Any, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Iterator[tuple[int, tuple[str, str]]]:
        """Storages by what they are and where DeepSpeed puts them when it has a device that is not the host."""
        flats = getattr(zero, "single_partition_of_fp32_groups", None) or zero.fp32_partitioned_groups_flat
        groups: list[tuple[str, str, list[Any]]] = [
            ("parameters", "device", [getattr(p, "ds_tensor", p) for p in module.parameters()]),
            ("gathered", "device", [p for p in module.parameters() if p.numel()]),
            ("gradients", "device", [p.grad for p in module.parameters()]),
            ("gradients", "device", [t for parts in zero.averaged_gradients.values() for t in parts or ()]),
            ("gradients", "host", [getattr(zero, "grad_partitions_flat_buffer", None)]),
            ("gradients", "host", [flat.grad for flat in flats]),
            ("masters", "host", list(flats)),
            ("moments", "host", [v for flat in flats for v in optimizer.state[flat].values()]),
            ("staging", "host", getattr(zero, "param_buffer_of_bit16_for_cpu_offload_groups", [])),
            ("staging", "host", [getattr(zero, "temp_grad_buffer_for_cpu_offload", None)]),
        ]
        groups += [
            ("buckets", "device", list(b.buffer) if isinstance(b.buffer, list) else [b.buffer])
            for b in zero.ipg_buckets.values()
        ]
        for category, where, tensors in reversed(groups):
            for tensor in tensors:
                if isinstance(tensor, Tensor) and tensor.numel():
                    yield tensor.untyped_storage().data_ptr(), (category, where)


def alive() -> dict[int, int]:
    """Bytes of every storage that a tensor of this process has, by its address."""
    found: dict[int, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [thing for thing in gc.get_objects() if isinstance(thing, Tensor)]
    for tensor in [*tensors, *(t.grad for t in tensors if t.is_leaf and t.grad is not None)]:
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return found


def measure(stage: int, place: str, ranks: int) -> list[dict[str, Any]]:
    """What each rank holds, in bytes a parameter."""

    def body() -> dict[str, Any]:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        zero = {
            "reduce_bucket_size": 1000,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
        }
        counter = CountBytes(place)
        trainer = pl.Trainer(
            strategy=ZeroOffloadStrategy(
                stage=stage,
                offload_optimizer=place,  # type: ignore[arg-type]
                config={"zero_optimization": zero},
                cpu_adam="torch",
            ),
            accelerator="cpu",
            devices=ranks,
            precision="bf16-mixed",
            accumulate_grad_batches=2 if place == "none" else 1,
            max_epochs=1,
            callbacks=[counter],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Stack()
        count = sum(parameter.numel() for parameter in module.parameters())
        trainer.fit(module, DataLoader(torch.randn(4 * ranks, WIDTH), batch_size=1))
        per_parameter = {where: held / count for where, held in counter.bytes.items()}
        return {**per_parameter, "shares": {name: held / count for name, held in counter.shares.items()}}

    return run_ranks(ranks, body, init=False, timeout_s=600)


def main(ranks: int = 2) -> None:
    """Prints the table.

    Args:
        ranks: N.
    """
    table = Table(
        "stage",
        "offload",
        "device",
        "formula",
        "host",
        "formula",
        "error",
        "of which",
        title=f"bytes a parameter, N={ranks}",
    )
    worst = 0.0
    for stage in STAGES:
        for place in PLACES:
            fullest = max(measure(stage, place, ranks), key=lambda rank: rank["device"] + rank["host"])
            wanted = expected(stage, place, ranks)
            errors = [
                abs(fullest[w] / e - 1) if e else 0.0 for w, e in zip(("device", "host"), wanted, strict=True)
            ]
            worst = max(worst, *errors)
            shares = ", ".join(f"{name} {value:.2f}" for name, value in fullest["shares"].items())
            table.add_row(
                str(stage),
                place,
                f"{fullest['device']:.2f}",
                f"{wanted[0]:.2f}",
                f"{fullest['host']:.2f}",
                f"{wanted[1]:.2f}",
                f"{max(errors):.1%}",
                shares,
            )
    Console(width=150).print(table)
    print(f"largest error {worst:.1%}, bound {BOUND:.0%}")
    sys.exit(worst > BOUND)


if __name__ == "__main__":
    auto_cli(main)
