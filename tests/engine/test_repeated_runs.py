# SPDX-License-Identifier: Apache-2.0
"""Under a pipeline a step runs more than once a batch: what it logs, counts and raises comes out once, on all ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import SumMetric

from tests.engine.runs import (
    PP2,
    PP2_DP2,
    Batches,
    Module,
    Regression,
    Run,
    be_quiet,
    check,
    lm,
    make_trainer,
    name_of,
    seeded,
    strategy_of,
    token_batches,
    token_loss,
    vector_batches,
)
from tests.engine.test_cut_check import DislikesNaN, Net
from tests.harness import RanksError, run_ranks


class Counted(Module):
    """Counts how often its step ran, before the model and behind it."""

    def __init__(self, *args):
        super().__init__(*args)
        self.before, self.behind = SumMetric(), SumMetric()

    def training_step(self, batch, batch_idx):
        self.log("calls", 1.0, reduce_fx="sum")
        self.before.update(1.0)
        loss = token_loss(self.model(batch["ids"]), batch["labels"])
        self.behind.update(1.0)
        self.log_dict({"before": self.before, "behind": self.behind}, on_step=False, on_epoch=True)
        return {"loss": loss, "num_tokens": (batch["labels"] != -100).sum()}


class CountedDislike(Regression):
    def training_step(self, batch, batch_idx):
        self.log("calls", 1.0, reduce_fx="sum")
        return super().training_step(batch, batch_idx)


def first_samples_without_labels():
    """The mean over the first microbatch of the first replica is no number; that of other replicas is."""
    (batch,) = token_batches(1)
    batch["labels"][:2] = -100
    return [batch]


@pytest.mark.parametrize("layout", [PP2_DP2, {**PP2, "tp": 2}], ids=name_of)
def test_ranks_run_a_step_again_together_and_log_it_once(layout):
    """A step on NaN tells nothing where the loss is NaN anyway; one rank that runs it again alone waits for ever."""
    runs = {
        "no labels": Run(
            module=lambda: lm(cls=Counted),
            batches=first_samples_without_labels(),
            compare=("gradients", "parameters"),
        ),
        "looks for NaN": Run(module=lambda: CountedDislike(seeded(DislikesNaN)), batches=vector_batches(1)),
    }
    if "tp" in layout:
        del runs["looks for NaN"]  # it has no layer to split
    for name, records in check(layout, runs).items():
        assert [record.metrics["calls"] for record in records] == [4.0] * len(records), name
        if name == "no labels":
            expected = 4.0 * layout.get("dp_shard", 1)
            assert all(record.metrics[key] == expected for record in records for key in ("before", "behind"))


class NormFirst(Net):
    """A batch norm before the blocks, and one in each of them."""

    def __init__(self):
        super().__init__(lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)))
        self.first = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))


def test_statistics_see_every_microbatch_once():
    def body():
        module = Regression(seeded(NormFirst))
        trainer = make_trainer(strategy_of(PP2), 2)
        trainer.fit(module, Batches(vector_batches(1)))
        owned = (
            (module.model.layers[:2], module.model.first)
            if dist.get_rank() == 1
            else (module.model.layers[2:],)
        )
        return [
            int(norm.num_batches_tracked)
            for part in owned
            for norm in part.modules()
            if isinstance(norm, nn.BatchNorm1d)
        ]

    assert run_ranks(2, body, init=False) == [[4, 4], [4, 4, 4]]


class FailsOnOneReplica(Regression):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("out of memory: a device of this size")
        return loss


def test_an_error_of_one_rank_in_the_first_batch_is_told_to_all():
    def body():
        be_quiet()
        trainer = make_trainer(strategy_of(PP2_DP2), 4)
        trainer.fit(FailsOnOneReplica(seeded(Net)), Batches(vector_batches(1)))

    with pytest.raises(RanksError) as caught:
        run_ranks(4, body, init=False, timeout_s=40)
    failures = caught.value.failures
    assert len(failures) == 4
    for failure in failures.values():
        assert failure.type_name != "timeout"
        assert "out of memory: a device of this size" in failure.message + failure.output
