# SPDX-License-Identifier: Apache-2.0
"""The YAML of a plan trains: three layouts of a tiny model, through LightningCLI, on CPU ranks."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, Dataset

from lightning_3d.hardware import load_cluster
from lightning_3d.models import shape_of_module
from lightning_3d.planner import plan_for
from lightning_3d.planner.lightning_config import batch_size, write_config
from tests.engine.runs import whole
from tests.harness import run_ranks
from tests.models import decoder, tokens

LENGTH, GLOBAL_BATCH = 8, 16
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Tiny(pl.LightningModule):
    """An ordinary LightningModule."""

    def __init__(self):
        super().__init__()
        self.model = decoder()  # always with the same weights

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Sentences(Dataset):
    """Sixteen sentences."""

    def __init__(self):
        self.ids, self.labels = tokens(GLOBAL_BATCH, LENGTH, seed=1)

    def __len__(self):
        return GLOBAL_BATCH

    def __getitem__(self, index):
        return {"ids": self.ids[index], "labels": self.labels[index]}


class Data(pl.LightningDataModule):
    """Batches of the size that the plan says."""

    def __init__(self, batch_size: int):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(Sentences(), batch_size=self.batch_size)


def trained(arguments, size):
    """Parameters that this rank holds after one epoch, which is one step of the planned batch."""
    cli = LightningCLI(Tiny, run=False, args=arguments, trainer_defaults=QUIET, save_config_callback=None)
    cli.trainer.fit(cli.model, Data(size))
    assert cli.trainer.global_step == 1
    return {name: whole(parameter) for name, parameter in cli.model.named_parameters()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fixed", [{"pp": 2}, {"tp": 2}, {"dp_shard": 2}], ids=str)
def test_written_config_trains(fixed, tmp_path):
    torch.manual_seed(0)
    shape = shape_of_module(Tiny())
    report = plan_for(
        shape, load_cluster("2xCPU"), seq_len=LENGTH, global_batch=GLOBAL_BATCH, precision="fp32", fixed=fixed
    )
    path = tmp_path / "plan.yaml"
    plan = write_config(report, path)
    size = batch_size(report, plan)
    expected = trained(
        ["--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.devices=1"], GLOBAL_BATCH
    )
    by_rank = run_ranks(
        2, lambda: trained([f"--config={path}", "--trainer.max_epochs=1"], size), init=False, timeout_s=100
    )
    assert set().union(*by_rank) == set(expected)
    for held in by_rank:
        for name, value in held.items():
            torch.testing.assert_close(value, expected[name], msg=f"{plan.layout.describe()}: {name}")
