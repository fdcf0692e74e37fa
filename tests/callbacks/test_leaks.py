# SPDX-License-Identifier: Apache-2.0
"""Long runs with logs, outputs, stages and a memory trace of every step keep nothing of the steps behind them."""

import gc
import resource

import lightning.pytorch as pl
import pytest
import torch

from lightning_3d.callbacks import MemoryTrace
from lightning_3d.selfcheck.model import DecoderShape, LanguageModel, TokenData
from tests.callbacks.memory_runs import fit, strategy_of
from tests.harness import run_ranks

SMALL = DecoderShape(dim=16, num_layers=2, num_heads=2, num_kv_heads=2, ffn_dim=16, sequence_length=4)
STEPS, SETTLED = 120, 60


class Logging(LanguageModel):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("epoch_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "extra": loss.detach()}


class Counting(pl.Callback):
    """Live tensors, and the most memory that the process ever had, after each step."""

    def __init__(self):
        self.tensors, self.resident_kib = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step not in (SETTLED, STEPS):
            return
        gc.collect()
        self.tensors.append(sum(isinstance(item, torch.Tensor) for item in gc.get_objects()))
        self.resident_kib.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def counted():
    counting = Counting()
    trace = MemoryTrace(steps=range(0, STEPS, 2), evaluation=False)
    data = TokenData(8 * STEPS, 8, SMALL)
    fit([counting, trace], strategy_of({"pp": 2, "num_microbatches": 2}), 2, data=data, module=Logging(SMALL, "adamw"), max_steps=STEPS)
    return counting.tensors, counting.resident_kib


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_nothing_grows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for tensors, resident_kib in run_ranks(2, counted, init=False, timeout_s=110):
        assert tensors[1] <= tensors[0]
        assert resident_kib[1] - resident_kib[0] < 8 * 1024
