# SPDX-License-Identifier: Apache-2.0
"""`LinkCheck` and `StragglerMonitor` name the rank that is slow, and no other."""

import json
import os
import time

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from lightning_3d.callbacks import CommTrace, LinkCheck, StragglerMonitor, ThroughputMonitor
from lightning_3d.errors import LinkError
from lightning_3d.profiling.link_rates import bus_factor
from lightning_3d.profiling.link_report import Limits, LinkReport
from lightning_3d.profiling.outliers import outliers_above, outliers_below
from lightning_3d.profiling.step_timer import StepTimer
from tests.engine.runs import (
    Batches,
    Module,
    be_quiet,
    lm,
    make_trainer,
    strategy_of,
    token_batches,
    world_of,
)
from tests.harness import RanksError, run_ranks

PP2_DP2 = {"pp": 2, "dp_shard": 2, "num_microbatches": 2}
SLOW_TIMES = 12.0
"""Enough to stand out on a machine that is busy with other things."""


def checked(strategy, devices, folder, **options):
    be_quiet()
    callback = LinkCheck(dirpath=folder, **options)
    trainer = make_trainer(strategy, devices, max_steps=1, callbacks=[callback])
    trainer.fit(lm(), Batches(token_batches(1)))
    return callback.report


def test_a_slowed_rank_is_named_everywhere(tmp_path):
    def body():
        return checked(
            strategy_of(PP2_DP2), 4, tmp_path, slowed_ranks={2: SLOW_TIMES}, slow_below=0.4
        )

    results = run_ranks(4, body, init=False, env={"COLUMNS": "160"})
    slowest = {name: min(range(4), key=lambda rank: results[0].rates[rank][name]) for name in ("matmul", "link")}
    assert slowest == {"matmul": 2, "link": 2}
    for report in results:
        assert report.slow == results[0].slow
        ranks = [each for each in report.slow if each.what.startswith("rank 2 ")]
        assert {each.unit for each in ranks} == {"TFLOP/s", "GB/s"}
    content = json.loads((tmp_path / "link_check.json").read_text())
    assert [group["ranks"] for group in content["axes"]["pp"]["groups"]] == [[0, 2], [1, 3]]
    assert [rank["stage"] for rank in content["ranks"]] == [1, 1, 0, 0]
    assert ["next_stage_gb_s" in rank for rank in content["ranks"]] == [False, False, True, True]
    assert "matrix product" in results.outputs[0]
    assert "matrix product" not in results.outputs[1]


def test_slow_links_are_refused_on_all_ranks(tmp_path):
    def body():
        checked("ddp", 2, tmp_path, least_gb_s=1e6, on_slow="error")

    with pytest.raises(RanksError) as caught:
        run_ranks(2, body, init=False)
    assert [failure.type_name for failure in caught.value.failures.values()] == ["LinkError"] * 2
    assert "below the least that was asked for" in str(caught.value)


def test_one_process(tmp_path):
    report = checked("auto", 1, tmp_path)
    assert report.slow == []
    assert report.medians() == {"compute": report.rates[0]["matmul"]}


class Sharded(Module):
    """Shards itself, for Lightning's own strategy."""

    def configure_model(self):
        for layer in self.model.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def test_the_mesh_of_another_strategy(tmp_path):
    def body():
        be_quiet()
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        watchers = [
            LinkCheck(dirpath=tmp_path),
            CommTrace(num_steps=1, skip_steps=1, dirpath=tmp_path),
            StragglerMonitor(every_n_steps=2),
            ThroughputMonitor(every_n_steps=2),
        ]
        trainer = make_trainer(strategy, 2, callbacks=watchers)
        trainer.fit(lm(cls=Sharded), Batches(token_batches(4)))
        return [watchers[0].report.medians(), watchers[1].report.totals(), watchers[3].speed]

    rates, sent, speed = run_ranks(2, body, init=False)[1]
    assert set(rates) == {"compute", "dp_shard"}
    assert sent["dp_shard"].bytes > 3 / 2 * 4 * 35_000
    assert sent["dp_shard"].communication_over_compute > 0
    assert speed.tokens_per_s * speed.step_s == pytest.approx(64)
    assert speed.mfu > 0


@pytest.mark.parametrize("options", [{"on_slow": "stop"}, {"slow_below": 1.5}])
def test_wrong_options_are_refused(options):
    with pytest.raises(LinkError, match="Use"):
        LinkCheck(**options)


def report_of(rates):
    """A report of eight ranks on two hosts, in four groups of tp."""
    groups = tuple({"tp": (rank - rank % 2, rank - rank % 2 + 1)} for rank in range(8))
    names = tuple(f"rank {rank} on {'ab'[rank // 4]}" for rank in range(8))
    return LinkReport(
        names=names, stages=(0,) * 8, rates=tuple(rates), groups=groups, limits=Limits(), seconds=1.0
    )


def rates_of(link=400e9, all_reduce=400e9):
    collectives = {"tp/all_reduce": all_reduce, "tp/all_gather": 400e9, "tp/reduce_scatter": all_reduce / 2}
    return {"matmul": 1e12, "link": link, **collectives, "tp/latency": 1e-5}


def test_a_slow_rank_explains_its_group():
    rates = [rates_of(link=386e9) for _ in range(8)]
    rates[4] = rates[5] = rates_of(link=386e9, all_reduce=48e9)
    report = report_of(rates)
    assert [str(each) for each in report.slow] == ["tp of ranks 4, 5: all_reduce: 48 GB/s, median 400"]
    rates[5] = rates_of(link=48e9, all_reduce=48e9)
    link = "rank 5 on b: 48 GB/s, median 386"
    assert [str(each) for each in report_of(rates).slow] == [link]
    assert bus_factor("all_reduce", 2) == 1.0


def test_a_value_without_peers_is_no_outlier():
    assert outliers_below([1.0], 0.5) == []
    assert outliers_above([1.0, 9.0], 1.3, roles=[0, 1]) == []
    assert outliers_above([1.0, 1.5], 1.3, least_excess=0.6) == []


class Sleeper(Module):
    """A module whose step takes longer on one rank, by more than a busy machine would make it."""

    sleeping_rank, seconds, from_batch = 1, 0.4, 0

    def training_step(self, batch, batch_idx):
        if int(os.environ["RANK"]) == self.sleeping_rank and batch_idx >= self.from_batch:
            time.sleep(self.seconds)
        return super().training_step(batch, batch_idx)


def monitored(strategy, devices, cls=Sleeper, num_batches=3):
    be_quiet()
    monitor = StragglerMonitor(every_n_steps=3)
    trainer = make_trainer(strategy, devices, callbacks=[monitor])
    trainer.fit(lm(cls=cls), Batches(token_batches(num_batches)))
    return monitor.stragglers


@pytest.mark.parametrize("layout", ["ddp", {"tp": 2}, PP2_DP2], ids=str)
def test_a_sleeping_rank_is_named(layout):
    devices = 2 if layout == "ddp" else world_of(layout)

    def body():
        return monitored("ddp" if layout == "ddp" else strategy_of(layout), devices)

    for stragglers in run_ranks(devices, body, init=False, timeout_s=120):
        assert stragglers, "nobody was named"
        slowest = max(stragglers, key=lambda each: each.busy_s - each.median_s)
        assert slowest.rank == 1
        assert "falls behind" in str(slowest)
        assert ("on stage 1" in str(slowest)) == (layout == PP2_DP2)


def test_a_rank_without_peers_is_compared_with_itself():
    class Later(Sleeper):
        from_batch = 3

    def body():
        return monitored(strategy_of({"pp": 2, "num_microbatches": 2}), 2, cls=Later, num_batches=6)

    stragglers = run_ranks(2, body, init=False, timeout_s=120)[0]
    assert 1 in [each.rank for each in stragglers]
    assert any("its best window" in str(each) for each in stragglers)


def test_waiting_is_put_back():
    before = torch.distributed.Work.wait
    first, second = (StepTimer(torch.device("cpu")) for _ in range(2))
    first.start(None)
    second.start(None)
    assert torch.distributed.Work.wait is not before
    first.stop()
    second.stop()
    assert torch.distributed.Work.wait is before
