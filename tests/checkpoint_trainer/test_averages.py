# SPDX-License-Identifier: Apache-2.0
"""Averages of weights (EMA, SWA): shard by shard what one process gets, in files, and resumed in other layouts."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_3d.checkpoint import load_full_state_dict
from lightning_3d.checkpoint.agreement import Ranks
from lightning_3d.checkpoint.load import open_checkpoint
from lightning_3d.checkpoint.model_state import BESIDE_PREFIX
from lightning_3d.checkpoint.shards import sharded
from lightning_3d.checkpoint.tensor_files import Target, read_tensors
from lightning_3d.errors import SupportError
from lightning_3d.parallel.averages import check_elementwise
from lightning_3d.strategies.weight_averaging import SWA_WEIGHTS, TRAINING_WEIGHTS
from tests.checkpoint_trainer.samples import Numbered, Watched, on_ranks, train
from tests.engine.runs import Layout, seeded, strategy_of, whole

ONE: Layout = {"dp_shard": 1}
DP2: Layout = {"dp_shard": 2}
PP2: Layout = {"pp": 2, "num_microbatches": 2}
DP2_TP2: Layout = {"dp_shard": 2, "tp": 2}
EPOCHS = 3
pytestmark = pytest.mark.filterwarnings("ignore")


class Steady(Watched):
    """Plain SGD, so that rounding stays rounding; a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps.fill_(float(self.trainer.global_step))
        return super().training_step(batch, batch_idx)

    def data(self, size: int) -> DataLoader[Any]:
        """In order: a global batch has the same samples in every layout."""
        where = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler: Any = DistributedSampler(Numbered(size), shuffle=False, **where)
        return DataLoader(Numbered(size), batch_size=4 // where["num_replicas"], sampler=sampler)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.data(8)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.data(4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Late(EMAWeightAveraging):
    """A user's own: begins late, and has a setup of its own."""

    def __init__(self) -> None:
        super().__init__(decay=0.5)
        self.set_up = 0

    def setup(self, *args: Any, **options: Any) -> None:
        super().setup(*args, **options)
        self.set_up += 1

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx >= 1


class Notes(pl.Callback):
    """Weights of training and their average when the validation of an epoch has ended."""

    def __init__(self, averaging: Any) -> None:
        self.averaging = averaging
        self.training: list[dict[str, Tensor]] = []
        self.average: list[dict[str, Tensor]] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        average = getattr(self.averaging._average_model, "module", self.averaging._average_model)
        if not trainer.sanity_checking:
            self.training.append({name: value.clone() for name, value in pl_module.state_dict().items()})
            self.average.append({name: value.clone() for name, value in average.state_dict().items()})


class SavesInValidation(pl.Callback):
    """Saves while the averages are swapped in."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def run(layout: Layout | None, *callbacks: Any, epochs: int = EPOCHS, resume: Any = None) -> Steady:
    size = layout or ONE
    module, _ = train(
        size,
        None,
        module=seeded(Steady),
        callbacks=callbacks,
        max_epochs=epochs,
        resume=resume,
        strategy="auto" if layout is None else strategy_of(layout),
        num_sanity_val_steps=1,
    )
    return module


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value) for name, value in module.state_dict().items()}


def keep(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=False)


def beside(path: Path, label: str) -> dict[str, Tensor]:
    """What a checkpoint has beside the model."""
    stored, prefix = open_checkpoint(path), f"{BESIDE_PREFIX}{label}."
    keys = [key for key in stored.index.state_dict_metadata if key.startswith(prefix)]
    tensors = {key: torch.empty(stored.tensor(key).size) for key in keys}
    targets = [Target(source=key, tensor=sharded(key, tensor)) for key, tensor in tensors.items()]
    read_tensors(stored.folder, stored.index, targets, Ranks(None))
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() <= expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_ema_of_shards(tmp_path: Path) -> None:
    """Swapped in or not, files hold training weights and averages apart, and any layout goes on from them."""
    averaging = Late()
    notes = Notes(averaging)
    expected = state_of(run(None, averaging, notes))
    assert not torch.equal(notes.training[0]["layers.0.up_proj.weight"], expected["layers.0.up_proj.weight"])

    def save() -> Any:
        averaging = Late()
        module = run(DP2_TP2, averaging, SavesInValidation(tmp_path / "swapped.ckpt"), keep(tmp_path))
        return state_of(module), averaging.set_up, type(averaging).__name__

    for found, set_up, name in on_ranks(DP2_TP2, save):
        assert_same(found, expected)
        assert (set_up, name) == (1, "Late")
    for path in ("epoch=0.ckpt", "swapped.ckpt"):
        assert_same(load_full_state_dict(tmp_path / path), notes.average[0])
        training = beside(tmp_path / path, TRAINING_WEIGHTS)
        assert training.keys() == notes.training[0].keys()
        assert_same(training, notes.training[0])
    for layout in (PP2, ONE):
        body = lambda layout=layout: state_of(run(layout, Late(), resume=tmp_path / "epoch=0.ckpt"))  # noqa: E731
        found = on_ranks(layout, body)
        assert {name for each in found for name in each} == expected.keys()
        for each in found:
            assert_same(each, expected)


def test_swa_of_shards(tmp_path: Path) -> None:
    def swa() -> StochasticWeightAveraging:
        return StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=2)

    averaging = swa()
    notes = Notes(averaging)
    expected = state_of(run(None, averaging, notes))

    for found in on_ranks(PP2, lambda: state_of(run(PP2, swa(), keep(tmp_path)))):
        assert_same(found, expected)
    averages = beside(tmp_path / "epoch=1.ckpt", SWA_WEIGHTS)
    parameters = dict(seeded(Steady).named_parameters())
    assert averages.keys() == expected.keys()
    assert_same({name: averages[name] for name in parameters}, notes.average[1])
    assert_same(load_full_state_dict(tmp_path / "epoch=1.ckpt"), notes.training[1])
    for found in on_ranks(DP2, lambda: state_of(run(DP2, swa(), resume=tmp_path / "epoch=1.ckpt"))):
        assert_same(found, expected)


def test_a_checkpoint_without_averages_begins_one(tmp_path: Path) -> None:
    def body() -> Any:
        run(DP2, keep(tmp_path), epochs=1)
        averaging = WeightAveraging()
        module = run(DP2, averaging, epochs=1, resume=tmp_path / "epoch=0.ckpt")
        return state_of(module), int(averaging._average_model.n_averaged)

    for found, count in on_ranks(DP2, body):
        assert_same(found, load_full_state_dict(tmp_path / "epoch=0.ckpt"))
        assert count == 0


def test_the_callback_serves_other_strategies_afterwards() -> None:
    def body() -> bool:
        averaging = Late()
        run(ONE, averaging)
        mine = type(averaging)
        again = run(None, averaging)
        return mine is not Late and type(averaging) is Late and averaging.set_up == 2 and again is not None

    assert on_ranks(ONE, body) == [True]


def test_two_averages_are_refused() -> None:
    def body() -> str:
        with pytest.raises(SupportError, match="overwrite each other's averages") as error:
            run(ONE, Late(), StochasticWeightAveraging(0.1))
        return str(error.value)

    assert "Late and StochasticWeightAveraging" in on_ranks(ONE, body)[0]


def test_stages_refuse_swa_with_batch_norm() -> None:
    class Normed(Steady):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

    def body() -> None:
        with pytest.raises(SupportError, match="BatchNorm"):
            train(PP2, None, module=seeded(Normed), callbacks=[StochasticWeightAveraging(0.1)])

    on_ranks(PP2, body)


def test_averages_of_whole_weights_are_refused() -> None:
    def normed(average: Tensor, current: Tensor, count: Any) -> Tensor:
        return average + (current - average) / current.norm()

    def all_at_once(averages: list[Tensor], currents: list[Tensor], count: Any) -> None:
        for average, current in zip(averages, currents, strict=True):
            average.copy_(current - current.mean())

    with pytest.raises(SupportError, match="normed computes with a whole weight"):
        check_elementwise(normed, None)
    with pytest.raises(SupportError, match="all_at_once"):
        check_elementwise(None, all_at_once)
    check_elementwise(torch.optim.swa_utils.get_ema_avg_fn(0.9), None)
    check_elementwise(None, torch.optim.swa_utils.get_swa_multi_avg_fn())
    check_elementwise(None, None)
