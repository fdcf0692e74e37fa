# SPDX-License-Identifier: Apache-2.0
"""`import pytorch_lightning`, names in YAML that no code imports, and `lightning-3d fit`."""

import ast
import textwrap

import pytest
import pytorch_lightning as old
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch.utils.data import DataLoader

import lightning_3d.pytorch_lightning as twin
from tests.engine.runs import token_loss, whole
from tests.harness import run_ranks
from tests.models import decoder, tokens

pytestmark = pytest.mark.filterwarnings("ignore")


class Module(old.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = decoder()

    def loss_of(self, batch):
        return token_loss(self.model(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(strategy, devices, folder, resume=None, max_epochs=2):
    pairs = list(zip(*tokens(8, 8), strict=True))
    module, averaging = Module(), EMAWeightAveraging(decay=0.5)
    trainer = old.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        max_epochs=max_epochs,
        logger=False,
        use_distributed_sampler=False,
        callbacks=[averaging, ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(pairs, batch_size=4)
    trainer.fit(module, data, data, ckpt_path=resume)
    return {name: whole(value) for name, value in module.named_parameters()}, type(trainer.strategy)


def test_pytorch_lightning_trains_the_same(tmp_path):
    expected, _ = train("auto", 1, tmp_path / "alone")
    for parameters, strategy in run_ranks(2, train, "pipeline", 2, tmp_path, init=False):
        assert strategy is twin.PipelineStrategy
        assert issubclass(strategy, old.strategies.Strategy)
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    resumed = run_ranks(2, train, twin.ThreeDStrategy(tp=2, dp_shard=1), 2, tmp_path, tmp_path / "epoch=0.ckpt", init=False)
    for parameters, _ in resumed:
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_imports_are_renamed_and_nothing_else():
    source = textwrap.dedent(
        """
        import lightning
        import lightning.pytorch as pl
        from lightning.fabric.plugins import ClusterEnvironment
        from lightning_utilities.core import rank_zero
        from lightning_3d.errors import PlanError
        from lightning_3d.strategies import checkpoint_choice
        from lightning_3d.compat_lightning import call_hook
        """
    )
    assert ast.unparse(twin._OtherImports().visit(ast.parse(source))).splitlines() == [
        "import pytorch_lightning as lightning",
        "import pytorch_lightning as pl",
        "from lightning_fabric.plugins import ClusterEnvironment",
        "from lightning_utilities.core import rank_zero",
        "from lightning_3d.errors import PlanError",
        "from lightning_3d.pytorch_lightning.strategies import checkpoint_choice",
        "from lightning_3d.pytorch_lightning.compat_lightning import call_hook",
    ]


def test_callbacks_are_of_the_other_namespace():
    assert issubclass(twin.AsyncCheckpoint, old.Callback)
    with pytest.raises(AttributeError, match="Nothing"):
        twin.Nothing  # noqa: B018
