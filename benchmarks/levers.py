# SPDX-License-Identifier: Apache-2.0
"""What each memory lever saves and costs: one model, two ranks, one run of this file.

Saved bytes are measured: of activations as the fall of the peak of live tensors in a step, of state as the bytes of
parameters, gradients and moments where they lie, of gathers as the bytes that a rank sends. Each stands beside what the
estimator's formula says; the benchmark fails when a lever saves less than the formula, by more than its bound. Times
are medians of a step over that of the same steps without the lever; they have no bound.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import logging
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from jsonargparse import auto_cli
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from benchmarks.peers import PlainModule
from lightning_3d.compat_torchao import plain_weight
from lightning_3d.estimator import STATE_BYTES, Layout, Workload
from lightning_3d.estimator.activations import dense_activations, kept_per_token
from lightning_3d.models import shape_of_module
from lightning_3d.selfcheck.model import DecoderShape
from lightning_3d.strategies import ThreeDStrategy
from lightning_3d.units import MIB
from tests.harness import run_ranks
from tests.live_bytes import LiveBytes

SHAPE = DecoderShape(
    vocab_size=2048, dim=256, num_layers=6, num_heads=8, num_kv_heads=4, ffn_dim=768, sequence_length=128
)
RANKS = 2
BATCH = 4
TOKENS = BATCH * SHAPE.sequence_length


class Watch(pl.Callback):
    """Times steps, or takes the peak of one, and adds up state where it lies before an optimizer step."""

    def __init__(self, *, peak: bool) -> None:
        self.peak_of = LiveBytes() if peak else None
        self.times: list[float] = []
        self.peak = 0
        self.state: dict[str, int] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.began = time.perf_counter()
        if self.peak_of is not None and batch_idx == 1:
            self.peak_of.__enter__()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self.peak_of is not None and trainer.global_step == 1:
            self.peak_of.__exit__(None, None, None)
            self.peak = self.peak_of.peak

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        moments = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
        self.state = {
            "parameters": held(list(pl_module.parameters())),
            "gradients": held([p.grad for p in pl_module.parameters() if p.grad is not None]),
            "optimizer": held(moments),
        }

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.times.append(time.perf_counter() - self.began)


def held(tensors: list[Tensor]) -> int:
    """Bytes of this rank's parts, each storage once."""
    parts = [part for tensor in tensors for part in _parts(tensor.detach())]
    return sum({s.data_ptr(): s.nbytes() for s in (part.untyped_storage() for part in parts)}.values())


def _parts(tensor: Tensor) -> list[Any]:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    inner: Any = plain_weight(local)
    return [inner.codes, inner.scale] if hasattr(inner, "codes") else [inner]


class LowBit(PlainModule):
    """The model with moments in 8 bits."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        from torchao.optim import AdamW8bit

        torch.compiler.set_stance("force_eager")
        optimizer: torch.optim.Optimizer = AdamW8bit(self.parameters(), lr=1e-3)
        return optimizer


@dataclass
class Measured:
    """Of one run on one rank."""

    step_s: float = 0.0
    peak: int = 0
    state: dict[str, int] = field(default_factory=dict)
    sent: int = 0


def measure(lever: "Lever", steps: int, *, peak: bool) -> Measured:
    """Trains with a lever on this rank."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    watch, sent = Watch(peak=peak), _count_gathers()
    trainer = pl.Trainer(
        strategy=ThreeDStrategy(
            dp_replicate=1, dp_shard=RANKS, reshard_after_forward=False, **lever.strategy
        ),
        devices=RANKS,
        accelerator="cpu",
        precision=lever.precision,  # type: ignore[arg-type]
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch],
    )
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(
        0, SHAPE.vocab_size, (RANKS * BATCH * steps, SHAPE.sequence_length + 1), generator=generator
    )
    trainer.fit(lever.module(SHAPE), DataLoader(ids, batch_size=BATCH))  # type: ignore[arg-type]
    return Measured(
        step_s=median(watch.times[2:] or watch.times),
        peak=watch.peak,
        state=watch.state,
        sent=sum(sent) // steps,
    )


def _count_gathers() -> list[int]:
    """Bytes that this rank sends into FSDP2's gathers from now on, in this forked rank only."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, sent = getattr(dist, name), []

    def count(output: Tensor, shard: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(shard.numel() * shard.element_size())
        return gather(output, shard, *args, **kwargs)

    setattr(dist, name, count)
    return sent


@dataclass(frozen=True, kw_only=True)
class Lever:
    """A row of the table."""

    name: str
    strategy: dict[str, Any] = field(default_factory=dict)
    module: Callable[[DecoderShape], pl.LightningModule] = PlainModule
    precision: str = "32-true"
    saves: str = ""
    """What is compared: `activations`, `state`, `host` or `gathers`; nothing if empty."""
    bound: float = 0.05
    """How far below the formula a saving may be."""


def levers(backend: str) -> list[Lever]:
    """All rows; the first is what the others are compared with, the ninth's is the one before it."""
    return [
        Lever(name="none"),
        Lever(
            name='recompute="selective"', strategy={"recompute": "selective"}, saves="activations", bound=0.15
        ),
        Lever(name="recompute=0.5", strategy={"recompute": 0.5}, saves="activations", bound=0.15),
        Lever(name='recompute="full"', strategy={"recompute": "full"}, saves="activations", bound=0.15),
        Lever(name='offload="cpu"', strategy={"offload": "cpu"}, saves="host"),
        Lever(name="torchao AdamW8bit", module=LowBit, saves="state"),
        Lever(name=f"compile=True ({backend})", strategy={"compile": True, "compile_backend": backend}),
        Lever(name="none, bf16-mixed", precision="bf16-mixed"),
        Lever(
            name="float8_all_gather=True",
            strategy={"float8_all_gather": True},
            precision="bf16-mixed",
            saves="gathers",
        ),
    ]


def formula(lever: Lever) -> float:
    """Bytes that a lever should save on a rank."""
    module = PlainModule(SHAPE)
    count = sum(parameter.numel() for parameter in module.parameters()) / RANKS
    if lever.saves == "host":
        return STATE_BYTES["fp32"].total * count
    if lever.saves == "state":
        return (STATE_BYTES["fp32"].optimizer - STATE_BYTES["adam8bit"].optimizer - EIGHT_BIT_SCALES) * count
    if lever.saves == "gathers":
        linear = sum(p.numel() for layer in module.model.layers for p in layer.parameters() if p.dim() == 2)
        return linear / RANKS  # one byte instead of two, once a step without resharding
    work = Workload(seq_len=SHAPE.sequence_length, global_batch=BATCH * RANKS, matmul="fp32", fused=False)
    block = dense_activations(shape_of_module(module), work)
    share = lever.strategy["recompute"]
    mode = "full" if isinstance(share, float) else share
    kept = kept_per_token(block, Layout()) - kept_per_token(block, Layout(recompute=mode))
    return kept * TOKENS * SHAPE.num_layers * (share if isinstance(share, float) else 1.0)


EIGHT_BIT_SCALES = 2 * 4 / 256
"""Bytes a parameter: a scale in fp32 for 256 values of either moment."""


def saved(lever: Lever, run: Measured, plain: Measured) -> float:
    """Bytes that a lever saved on a rank."""
    if lever.saves == "activations":
        return plain.peak - run.peak
    if lever.saves == "state":
        return plain.state["optimizer"] - run.state["optimizer"]
    if lever.saves == "gathers":
        return plain.sent - run.sent
    return sum(run.state.values())


WHAT = {
    "activations": "peak of activations",
    "state": "optimizer state",
    "host": "state, now on the host",
    "gathers": "bytes gathered a step",
}


def main(steps: int = 8, backend: str = "") -> int:
    """Prints the table.

    Args:
        steps: of each run; two are warm-up.
        backend: that compiles the blocks; inductor where there is a C++ compiler.
    """
    torch.set_num_threads(1)
    backend = backend or ("inductor" if shutil.which("g++") or shutil.which("c++") else "aot_eager")
    table = Table(title=f"{RANKS} ranks, dp_shard={RANKS}, {TOKENS} tokens a rank; a rank's MiB")
    for column in ("lever", "what it saves", "before", "saved", "formula", "bound", "step time", ""):
        table.add_column(column, justify="left" if column in ("lever", "what it saves") else "right")
    failed, plain, plain_s = 0, Measured(), 0.0
    for lever in levers(backend):
        timed = _run(lever, steps, peak=False)
        run = timed
        if lever.saves == "activations" or lever.name == "none":
            run = _run(lever, 2, peak=True)
        if lever.name.startswith("none"):
            plain, plain_s = run, timed.step_s
            plain.sent = timed.sent
        row, passed = _row(lever, run, plain)
        print(lever.name, *row, file=sys.stderr, flush=True)
        failed += not passed
        table.add_row(lever.name, *row, f"x {timed.step_s / plain_s:.2f}", "ok" if passed else "FAIL")
    Console(width=130).print(table)
    return 1 if failed else 0


def _run(lever: Lever, steps: int, *, peak: bool) -> Measured:
    """What the first rank measured; the others hold as much."""
    body = partial(measure, lever, steps, peak=peak)
    return run_ranks(RANKS, body, init=False, timeout_s=600)[0]


def _row(lever: Lever, run: Measured, plain: Measured) -> tuple[list[str], bool]:
    if not lever.saves:
        return ["-", "-", "-", "-", "-"], True
    before = {
        "activations": plain.peak,
        "state": plain.state["optimizer"],
        "host": sum(plain.state.values()),
        "gathers": plain.sent,
    }[lever.saves]
    found, expected = saved(lever, run, plain), formula(lever)
    numbers = [f"{number / MIB:.2f}" for number in (before, found, expected)]
    return [WHAT[lever.saves], *numbers, f"-{lever.bound:.0%}"], found >= (1 - lever.bound) * expected


if __name__ == "__main__":
    sys.exit(auto_cli(main, as_positional=False))
