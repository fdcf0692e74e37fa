# SPDX-License-Identifier: Apache-2.0
"""`CommTrace`: bytes of every axis are those of the textbook's formulas, and of the estimate."""

import json

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger

from lightning_3d.callbacks import CommTrace
from lightning_3d.profiling.comm_recorder import CommRecorder
from lightning_3d.profiling.topology import topology_of_world
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

BATCH, LENGTH, WIDTH, VOCAB = 16, 16, 32, 64
FP32 = 4
BLOCK = 2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2 + 3 * WIDTH * 64  # q, o, k, v, feed-forward
NORMS = 2 * WIDTH
TABLES = 2 * VOCAB * WIDTH + WIDTH

DP4 = {"dp_shard": 4}
TP2_DP2 = {"tp": 2, "dp_shard": 2}
PP2_DP2 = {"pp": 2, "dp_shard": 2, "num_microbatches": 4, "reshard_after_forward": False}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # reports go there


def trace(strategy, devices, num_layers=4, folder=None, **options):
    """Trains a little with one traced step; what the callback found."""
    be_quiet()
    callback = CommTrace(num_steps=1, skip_steps=1, dirpath=folder, print_table=folder is not None)
    trainer = make_trainer(strategy, devices, callbacks=[callback], **options)
    trainer.fit(lm(n_layers=num_layers), Batches(token_batches(4, BATCH, LENGTH)))
    return callback.report


def traced_in(layout, num_layers=4, folder=None, **options):
    def body():
        return trace(strategy_of(layout), world_of(layout), num_layers, folder, **options)

    return run_ranks(world_of(layout), body, init=False, timeout_s=120)


def ring(size):
    return (size - 1) / size


def formulas(layout, num_layers):
    """Bytes a rank sends, by the rows of the usual table, all in fp32."""
    shards, tp, pp = layout.get("dp_shard", 1), layout.get("tp", 1), layout.get("pp", 1)
    parameters = num_layers * (BLOCK / tp + NORMS) / pp + TABLES / tp / pp
    tokens = BATCH * LENGTH / shards
    hidden = FP32 * tokens * WIDTH
    gathers = 1 if pp > 1 else 2  # gathered blocks are kept over the microbatches
    found = {"dp_shard": ring(shards) * (gathers + 1) * FP32 * parameters}
    if tp > 1:
        blocks = num_layers * 4 * 2 * ring(tp) * hidden
        embedding, softmax = 2 * ring(tp) * hidden, 2 * ring(tp) * FP32 * 2 * tokens
        found["tp"] = blocks + embedding + softmax
    if pp > 1:
        found["pp"] = hidden  # over all microbatches; the gradient comes from the other side of the border
    return found


# As many layers as it takes for what the table leaves out (the tables are gathered once, the sequence is split and
# joined around the blocks) to be small.
@pytest.mark.parametrize(("layout", "num_layers"), [(DP4, 12), (TP2_DP2, 32), (PP2_DP2, 4)], ids=str)
def test_bytes_are_those_of_the_formulas(layout, num_layers):
    report = traced_in(layout, num_layers)[0]
    for rank in report.ranks:
        sent = rank.bytes_by_axis()
        for axis, expected in formulas(layout, num_layers).items():
            assert sent[axis] == pytest.approx(expected, rel=0.02), f"{axis}, {rank.name}"
            assert sent[axis] == pytest.approx(rank.predicted_bytes[axis], rel=0.02), f"{axis}, {rank.name}"


@pytest.mark.parametrize(
    ("layout", "accumulate"),
    [
        ({"dp_replicate": 2, "dp_shard": 2}, 2),
        ({"pp": 2, "dp_shard": 2, "num_microbatches": 4}, 2),
        ({"pp": 2, "dp_shard": 2, "schedule": "interleaved", "virtual_stages": 2, "num_microbatches": 4}, 1),
        ({"tp": 2, "sequence_parallel": False, "recompute": "full"}, 1),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_estimate(layout, accumulate):
    report = traced_in(layout, accumulate_grad_batches=accumulate)[0]
    axes = set()
    for rank in report.ranks:
        for axis, expected in rank.predicted_bytes.items():
            assert rank.bytes_by_axis()[axis] == pytest.approx(expected, rel=0.02), f"{axis}, {rank.name}"
            axes.add(axis)
    assert axes == {axis for axis in ("pp", "dp_replicate", "dp_shard", "tp") if layout.get(axis, 1) > 1}


def test_what_is_written_logged_and_printed(tmp_path):
    def body():
        return trace("ddp", 2, folder=tmp_path, logger=CSVLogger(tmp_path, name="", version=""))

    results = run_ranks(2, body, init=False, env={"COLUMNS": "160"})
    gradients = 2 * ring(2) * FP32 * (4 * (BLOCK + NORMS) + TABLES)
    content = json.loads((tmp_path / "comm_trace.json").read_text())
    assert content["axes"]["dp"]["bytes"] == pytest.approx(gradients, rel=1e-3)
    assert content["steps"] == [2]
    axis = content["ranks"][1]["axes"]["dp"]
    assert axis["collectives"]["all_reduce"] == {"count": 1.0, "bytes": gradients}
    assert axis["predicted_bytes"] == gradients
    products = 3 * 2 * (4 * BLOCK + VOCAB * WIDTH) * BATCH * LENGTH / 2
    assert products < content["ranks"][0]["flops"] < 1.2 * products  # and attention
    assert "comm/dp_bytes" in (tmp_path / "metrics.csv").read_text()
    assert "1 all_reduce" in results.outputs[0]
    assert "1 all_reduce" not in results.outputs[1]


def test_one_process_sends_nothing():
    report = trace("auto", 1)
    assert report.totals() == {}
    assert report.ranks[0].flops > 0


def test_functional_collectives_and_groups_of_the_user():
    def body():
        group = dist.new_group([0, 1])
        alone = [dist.new_group([rank]) for rank in range(3)]
        whole, ones = torch.zeros(12), torch.ones(4)
        recorder = CommRecorder(topology_of_world(torch.device("cpu")))
        with recorder:
            torch.ops._c10d_functional.all_reduce(ones, "sum", dist.group.WORLD.group_name)
            dist.all_gather_into_tensor(whole, ones)
            dist.all_to_all_single(torch.empty(3), torch.ones(3))
            if dist.get_rank() < 2:
                dist.all_reduce(ones, group=group)
            dist.all_reduce(ones, group=alone[dist.get_rank()])
            dist.barrier()
        return {(each.axis, each.collective): (each.count, each.num_bytes) for each in recorder.transfers}

    first, _, last = run_ranks(3, body)
    world = {
        ("dp", "all_reduce"): (1, pytest.approx(4 / 3 * 16)),
        ("dp", "all_gather"): (1, pytest.approx(2 / 3 * 48)),
        ("dp", "all_to_all"): (1, pytest.approx(2 / 3 * 12)),
    }
    assert last == world
    assert first == {**world, ("other", "all_reduce"): (1, 16.0)}
