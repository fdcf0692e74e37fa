# SPDX-License-Identifier: Apache-2.0
"""Features x layouts: scenarios run in every layout and on one process, and what differs.

A scenario is a function of a `Place` that trains and returns values by feature. Each value must be what one process
gives, on every rank that returns it, or a `Refused`, which says that the layout refuses the feature and how. All
scenarios of a layout share one launch of ranks, so they also are many fits in one process.
"""

import functools
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_3d.errors import SupportError
from tests.engine.runs import be_quiet, make_trainer, strategy_of, token_loss, whole, world_of
from tests.harness import run_ranks
from tests.models import decoder

LAYOUTS: dict[str, Mapping[str, int]] = {
    "dp_shard2": {"dp_shard": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "num_microbatches": 2},
    "pp2 dp2": {"pp": 2, "dp_shard": 2, "num_microbatches": 2},
    "pp2 dp2 tp2": {"pp": 2, "dp_shard": 2, "tp": 2, "num_microbatches": 2},
}
TOLERANCE = 2e-5
SAMPLES, BATCH = 24, 8


@dataclass(frozen=True)
class Refused:
    """The layout does not have the feature and says so before training."""

    message: str


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a scenario runs."""

    layout: Mapping[str, int] | None
    folder: Path

    @property
    def is_parallel(self) -> bool:
        return self.layout is not None

    @property
    def replicas(self) -> int:
        return 1 if self.layout is None else self.layout.get("dp_shard", 1)

    def has(self, axis: str) -> bool:
        return self.layout is not None and self.layout.get(axis, 1) > 1

    def strategy(self) -> Any:
        return "auto" if self.layout is None else strategy_of(self.layout)

    def trainer(self, **options: Any) -> pl.Trainer:
        return make_trainer(
            self.strategy(),
            world_of(self.layout or {}),
            **{
                "use_distributed_sampler": True,
                "num_sanity_val_steps": 0,
                "default_root_dir": self.folder,
                **options,
            },
        )


Scenario = Callable[[Place], dict[str, Any]]


class Samples(torch.utils.data.Dataset):
    """Token sequences with their numbers."""

    def __init__(self, count: int = SAMPLES, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 32, (count, 9), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"ids": self.ids[index, :-1], "labels": self.ids[index, 1:], "number": torch.tensor(index)}


class Module(pl.LightningModule):
    """An ordinary module; scenarios add to it."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.model = decoder(dim=16, n_layers=2, n_heads=2, n_kv_heads=2, hidden_dim=32, vocab_size=32)
        self.lr = lr

    def loss_of(self, batch):
        return token_loss(self.model(batch["ids"]), batch["labels"])

    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss_of(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return {"number": batch["number"], "logits": self.model(batch["ids"])[:, -1]}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def loader(self, count: int = SAMPLES, seed: int = 1, batch: int = BATCH, **options: Any) -> DataLoader:
        """In order, whatever the layout: global batch k has the samples k * batch to (k + 1) * batch - 1."""
        samples = Samples(count, seed)
        where = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        sampler = DistributedSampler(samples, shuffle=False, **where)
        return DataLoader(samples, batch_size=batch // where["num_replicas"], sampler=sampler, **options)

    def train_dataloader(self):
        return self.loader()

    def val_dataloader(self):
        return self.loader(16, seed=2)

    def test_dataloader(self):
        return self.loader(16, seed=3)

    def predict_dataloader(self):
        return self.loader(16, seed=4)


class Parameters(dict[str, Tensor]):
    """Compared where both have them: a rank has those of its stage."""


def parameters_of(module: pl.LightningModule) -> Parameters:
    """The parameters that this rank holds, whole."""
    return Parameters({name: whole(parameter) for name, parameter in module.named_parameters()})


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def everybody(value: Any) -> list[Any]:
    """A value of every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def attempt(train: Callable[[], dict[str, Any]], features: Sequence[str]) -> dict[str, Any]:
    """What `train` returns, or that its features are refused."""
    try:
        return train()
    except SupportError as error:
        return dict.fromkeys(features, Refused(str(error)))


def run_all(
    scenarios: Mapping[str, Scenario], layout: Mapping[str, int] | None, folder: str
) -> dict[str, Any]:
    """Runs scenarios on this rank."""
    be_quiet()
    found: dict[str, Any] = {}
    for name, scenario in scenarios.items():
        place = Place(layout=layout, folder=Path(folder) / name.replace(" ", "_"))
        torch.manual_seed(1)
        try:
            found[name] = scenario(place)
        except Exception as error:
            error.add_note(f"in the scenario {name!r}")
            raise
        if dist.is_initialized():
            dist.barrier()
    return found


def alone(scenarios: Mapping[str, Scenario]) -> dict[str, Any]:
    """What one process gives."""
    with tempfile.TemporaryDirectory() as folder:
        return run_all(scenarios, None, folder)


def together(
    scenarios: Mapping[str, Scenario], layout: Mapping[str, int], timeout_s: float
) -> list[dict[str, Any]]:
    """What every rank of a layout gives."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(
            world_of(layout), run_all, scenarios, layout, folder, init=False, timeout_s=timeout_s
        )


def cell(feature: str, expected: Any, by_rank: list[dict[str, Any]]) -> str:
    """`yes`, `refused: ...`, or what differs."""
    values = {rank: found[feature] for rank, found in enumerate(by_rank) if feature in found}
    if 0 not in values:
        return "no value on rank 0"
    refusals = {value.message for value in values.values() if isinstance(value, Refused)}
    if refusals:
        everywhere = all(isinstance(value, Refused) for value in values.values())
        return f"refused: {min(refusals)}" if everywhere else "refused on some ranks only"
    for rank, value in values.items():
        difference = differs(value, expected)
        if difference:
            return f"rank {rank}: {difference}"
    return "yes"


def differs(value: Any, expected: Any, where: str = "") -> str | None:
    """Where two values differ, to `TOLERANCE`; of parameters only those that are there are compared."""
    if isinstance(expected, Tensor) and isinstance(value, Tensor):
        if value.shape != expected.shape:
            return f"{where}: shape {tuple(value.shape)}, expected {tuple(expected.shape)}"
        gap = float((value.double() - expected.double()).abs().max()) if value.numel() else 0.0
        scale = float(expected.double().abs().max()) if value.numel() else 1.0
        return None if gap <= TOLERANCE * max(scale, 1e-6) else f"{where}: off by {gap:.2e} of {scale:.2e}"
    if isinstance(expected, Mapping):
        if isinstance(expected, Parameters):
            expected = {key: item for key, item in expected.items() if key in value}
        if not isinstance(value, Mapping) or value.keys() != expected.keys():
            return f"{where}: {value!r}, expected {expected!r}"
        found = (differs(value[key], expected[key], f"{where} {key}") for key in expected)
        return next((each for each in found if each), None)
    if isinstance(expected, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(expected):
            return f"{where}: {value!r}, expected {expected!r}"
        pairs = enumerate(zip(value, expected, strict=True))
        found = (differs(mine, other, f"{where}[{index}]") for index, (mine, other) in pairs)
        return next((each for each in found if each), None)
    if isinstance(expected, float) and isinstance(value, float):
        close = math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=1e-7) or (value != value) & (
            expected != expected
        )
        return None if close else f"{where}: {value!r}, expected {expected!r}"
    return None if value == expected else f"{where}: {value!r}, expected {expected!r}"


@functools.cache
def results(layout_name: str) -> dict[str, dict[str, str]]:
    """Cells of a layout, by scenario and feature."""
    from tests.trainer_features.scenarios import SCENARIOS

    expected = reference()
    by_rank = together(SCENARIOS, LAYOUTS[layout_name], timeout_s=550)
    return {
        name: {
            feature: cell(feature, value, [found[name] for found in by_rank])
            for feature, value in expected[name].items()
        }
        for name in SCENARIOS
    }


@functools.cache
def reference() -> dict[str, Any]:
    """What one process gives, for all scenarios."""
    from tests.trainer_features.scenarios import SCENARIOS

    return alone(SCENARIOS)
