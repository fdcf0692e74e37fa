# SPDX-License-Identifier: Apache-2.0
"""`ThroughputMonitor` counts every token once, measures steps and not validations, and says so everywhere."""

import csv
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_3d.callbacks import CommTrace, LinkCheck, StragglerMonitor, ThroughputMonitor
from lightning_3d.callbacks.batches import BatchSize, size_of_batch
from lightning_3d.callbacks.throughput import num_replicas
from lightning_3d.estimator.flops import model_flops_per_token, recomputed_flops_per_token
from lightning_3d.models import shape_of_module
from lightning_3d.profiling.throughput import FlopCount, RankWindow, speed_of
from tests.engine.runs import (
    Batches,
    be_quiet,
    lm,
    make_trainer,
    strategy_of,
    token_batches,
    world_of,
)
from tests.harness import run_ranks

BATCH, LENGTH = 8, 8


class TinyLM(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(
            self.embed(batch["tokens"]).flatten(0, 1), batch["tokens"].flatten()
        )
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx).detach(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader([{"tokens": torch.arange(8)} for _ in range(16)], batch_size=2)

    def val_dataloader(self):
        return self.train_dataloader()


def fit(**kwargs: object) -> Trainer:
    trainer = make_trainer(
        "auto",
        limit_train_batches=4,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        callbacks=[ThroughputMonitor(**kwargs)],  # type: ignore[arg-type]
    )
    trainer.fit(TinyLM())
    return trainer


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"tokens": torch.zeros(2, 8, dtype=torch.long), "mask": torch.zeros(2, 1)}, (2, 16)),
        ((torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)), (4, 4)),
        ([{"image": torch.zeros(4, 3, 5, 5)}], (4, 4)),
        ({"text": ["a", "b"]}, (0, 0)),
        (torch.tensor(1.0), (0, 0)),
    ],
)
def test_size_of_a_batch(batch: object, expected: tuple[int, int]) -> None:
    assert size_of_batch(batch) == BatchSize(*expected)


def test_replicas_are_the_samplers() -> None:
    """Pipeline and tensor ranks read the same batch: eight ranks in pp2 x dp2 x tp2 are two replicas."""
    strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": 0}, world_size=8)
    assert num_replicas(SimpleNamespace(strategy=strategy)) == 2  # type: ignore[arg-type]
    assert num_replicas(SimpleNamespace(strategy=SimpleNamespace())) == 1  # type: ignore[arg-type]


def test_lines_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = fit(every_n_steps=2, print_lines=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    steps = [line.split()[1] for line in lines]
    assert steps == ["1", "2", "4", "4", "4"]
    assert "train_loss" in lines[1]
    assert "tokens/s" in lines[1]
    assert lines[3].startswith("step 4  val_loss")
    assert " -> " in lines[4]
    assert trainer.callback_metrics["tokens_per_s"] > 0
    assert trainer.callback_metrics["step_s"] > 0


def test_nothing_said_when_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = fit(every_n_steps=2, log_speed=False)
    assert "step " not in capsys.readouterr().out
    assert "tokens_per_s" not in trainer.callback_metrics


@pytest.mark.parametrize(
    "layout",
    ["ddp", {"dp_shard": 2, "tp": 2}, {"pp": 2, "num_microbatches": 4, "recompute": "full"}],
    ids=str,
)
def test_tokens_and_operations_are_counted_once(layout):
    """Whatever the layout, a step reads 8 x 8 tokens; operations follow from tokens and time alone."""
    devices, peak = (2 if layout == "ddp" else world_of(layout)), 1e-3

    def body():
        be_quiet()
        monitor = ThroughputMonitor(every_n_steps=2, peak_tflops=peak)
        strategy = "ddp" if layout == "ddp" else strategy_of(layout)
        trainer = make_trainer(strategy, devices, callbacks=[monitor])
        trainer.fit(lm(), Batches(token_batches(4, BATCH, LENGTH)))
        return monitor.speed, dict(trainer.callback_metrics)

    shape = shape_of_module(lm())
    flops = model_flops_per_token(shape, LENGTH)
    again = recomputed_flops_per_token(shape, LENGTH, "full")
    for speed, metrics in run_ranks(devices, body, init=False, timeout_s=120):
        assert speed.tokens_per_s * speed.step_s == pytest.approx(BATCH * LENGTH)
        assert speed.samples_per_s * speed.step_s == pytest.approx(BATCH)
        assert float(metrics["tokens_per_s"]) == pytest.approx(speed.tokens_per_s, rel=1e-5)
        assert speed.tflops_per_rank * 1e12 == pytest.approx(flops * speed.tokens_per_s / devices)
        assert speed.mfu == pytest.approx(speed.tflops_per_rank / peak)
        assert 0 <= speed.exposed_comm < 1
        pipelined = layout != "ddp" and "pp" in layout
        assert speed.hfu / speed.mfu == pytest.approx((flops + again) / flops if pipelined else 1.0)
        assert (speed.bubble is not None) == pipelined
        assert set(speed.stage_tokens_per_s) == ({0, 1} if pipelined else set())
        assert all(rate > speed.tokens_per_s for rate in speed.stage_tokens_per_s.values())


def test_rates_of_a_window():
    def window(stage, tokens, wait_s):
        return RankWindow(
            stage=stage, samples=2, tokens=tokens, step_s=4.0, wait_s=wait_s, idle_s=1.0, bubble=0.25
        )

    windows = [window(1, 100, 2.0), window(1, 60, 1.0), window(0, 100, 3.0), window(0, 60, 1.0)]
    count = FlopCount(model=6e9, recomputed=2e9, peak_per_s=1e11)
    speed = speed_of(windows, num_replicas=2, num_steps=2, seconds=4.0, flops=count)
    assert (speed.tokens_per_s, speed.samples_per_s, speed.step_s) == (40.0, 1.0, 2.0)
    assert speed.exposed_comm == pytest.approx((0.25 + 0 + 0.5 + 0) / 4)
    assert speed.bubble == 0.25
    assert speed.stage_tokens_per_s == {0: 160 / 2.0, 1: 160 / 2.5}
    assert (speed.mfu, speed.hfu) == (pytest.approx(0.6), pytest.approx(0.8))
    assert speed.text() == "40 tokens/s  2.00 s/step  MFU 60.0% HFU 80.0%  bubble 25%  exposed 19%"
    assert set(speed.scalars()) >= {"tflops_per_rank", "stage0_tokens_per_s", "hfu"}


def callbacks(folder):
    return [
        LinkCheck(dirpath=folder),
        CommTrace(num_steps=1, skip_steps=1, dirpath=folder),
        StragglerMonitor(every_n_steps=2),
        ThroughputMonitor(every_n_steps=2),
    ]


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_loggers_and_progress_bars(tmp_path, bar, capsys):
    be_quiet()
    loggers = [CSVLogger(tmp_path, name="", version=""), TensorBoardLogger(tmp_path / "tb", name="", version="")]
    progress = bar(refresh_rate=1)
    trainer = make_trainer(
        "auto",
        logger=loggers,
        enable_progress_bar=True,
        log_every_n_steps=2,
        callbacks=[*callbacks(tmp_path), progress],
    )
    trainer.fit(lm(), Batches(token_batches(4)))
    shown = progress.get_metrics(trainer, trainer.lightning_module)
    assert {"tokens_per_s", "step_s", "mfu"} <= set(shown)  # the peak is what the link check measured
    assert "hfu" not in shown
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    logged = {name for row in rows for name, value in row.items() if value}
    assert {"tokens_per_s", "hfu", "samples_per_s", "stragglers", "links/matmul_tflops"} <= logged
    assert any(path.name.startswith("events") for path in (tmp_path / "tb").iterdir())


def test_callbacks_from_yaml(tmp_path, monkeypatch):
    be_quiet()
    config = tmp_path / "config.yaml"
    config.write_text(
        f"""
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 4
  limit_val_batches: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  default_root_dir: {tmp_path}
  callbacks:
    - class_path: lightning_3d.callbacks.LinkCheck
      init_args: {{on_slow: warn, slow_below: 0.5, slowed_ranks: {{0: 1.5}}}}
    - class_path: lightning_3d.callbacks.CommTrace
      init_args: {{num_steps: 1, skip_steps: 1}}
    - class_path: lightning_3d.callbacks.StragglerMonitor
      init_args: {{every_n_steps: 2}}
    - class_path: lightning_3d.callbacks.ThroughputMonitor
      init_args: {{every_n_steps: 2, peak_tflops: 1.0}}
"""
    )
    monkeypatch.chdir(tmp_path)
    cli = LightningCLI(TinyLM, args=["fit", "--config", str(config)], save_config_callback=None)
    assert cli.trainer.global_step == 4
    assert (tmp_path / "comm_trace.json").exists()
    assert (tmp_path / "link_check.json").exists()
