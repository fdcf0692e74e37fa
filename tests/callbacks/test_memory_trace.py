# SPDX-License-Identifier: Apache-2.0
"""What the memory trace measures, against arithmetic and against the estimator."""

import json

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_3d.callbacks import MemoryTrace
from lightning_3d.callbacks.run_facts import local_of
from lightning_3d.errors import TraceError
from lightning_3d.profiling.memory_meter import MemoryMeter
from lightning_3d.profiling.memory_page import headline
from lightning_3d.selfcheck.model import LanguageModel, TokenData
from lightning_3d.trace import CATEGORIES, OUTSIDE, MemoryTrace as Trace, Moment, read_trace, thinned
from tests.callbacks.memory_runs import BATCH, SHAPE, fit, strategy_of, world_of
from tests.harness import run_ranks

LAYOUTS = (
    {"dp_shard": 2},
    {"tp": 2},
    {"dp_shard": 2, "recompute": "selective"},
    {"pp": 2, "num_microbatches": 4},
)


def traced(layout):
    trace, module = MemoryTrace(steps=(1,), evaluation=False), LanguageModel(SHAPE, "adamw")
    fit([trace], strategy_of(layout), world_of(layout), layout.get("dp_shard", 1), module=module)
    return trace.spans[0], trace.estimate, sum(local_of(p).numel() for p in module.parameters())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_states_are_the_arithmetic_and_activations_the_estimate(layout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for span, estimate, held in run_ranks(world_of(layout), traced, layout, init=False, timeout_s=100):
        step = span.peak_of_phase["optimizer"]
        assert step.of("parameters") == pytest.approx(4 * held, rel=0.01)
        assert step.of("gradients") == pytest.approx(4 * held, rel=0.01)
        assert step.of("optimizer") == pytest.approx(8 * held, rel=0.01)
        in_blocks = sum(
            values["activations"] for block, values in span.blocks_at_peak.items() if block != OUTSIDE
        )
        assert in_blocks == pytest.approx(estimate["activations"], rel=0.05)
        assert span.peak.total == pytest.approx(estimate["allocated"] - estimate["framework"], rel=0.1)


def test_files_pages_and_logs_of_plain_lightning(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="")
    trace = MemoryTrace(steps=[1], dirpath=tmp_path)
    fit([trace], logger=logger, log_every_n_steps=1, data=TokensToValidate(), module=Validated(SHAPE, "adamw"), val_check_interval=2)
    written = read_trace(tmp_path / "rank0.json")
    assert written == Trace.from_dict(json.loads(json.dumps(trace.traces[0].to_dict())))
    assert [span.name for span in written.spans] == ["step 1", "validation"]
    assert written.fullest.name == "step 1"
    page = (tmp_path / "memory.html").read_text()
    assert headline(trace.traces) in page
    assert "<svg" in page
    assert (tmp_path / "memory.png").stat().st_size > 10_000
    assert "memory/activations_gib" in (tmp_path / "metrics.csv").read_text()


class Validated(LanguageModel):
    def validation_step(self, batch, batch_idx):
        self.model(batch[:, :-1])


class TokensToValidate(TokenData):
    def __init__(self):
        super().__init__(8 * BATCH, BATCH, SHAPE)

    def val_dataloader(self):
        return self.train_dataloader()


def accumulated():
    trace = MemoryTrace(steps="all")
    fit([trace], "ddp", 2, 2, accumulate_grad_batches=2, max_steps=2)
    return [span.name for span in trace.spans], trace.spans[1].peak_of_phase["forward"].of("gradients"), len(trace.traces)


def test_every_batch_of_an_accumulation_under_ddp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (names, held, everyone), (_, _, alone) = run_ranks(2, accumulated, init=False)
    assert names == ["step 0, batch 0", "step 0, batch 1", "step 1, batch 0", "step 1, batch 1"]
    assert held > 0  # gradients of the first batch wait for the second
    assert (everyone, alone) == (2, 1)


def test_what_is_temporary_and_what_is_kept():
    """Of exp(w + 1) the backward needs the result alone."""
    weight = nn.Parameter(torch.zeros(1000))
    meter = MemoryMeter(torch.device("cpu"))
    meter.start({"parameters": [weight]}, {"block": [weight]})
    meter.phase = "forward"
    total = (weight + 1).exp().sum()
    total.backward()
    del total
    meter.mark([weight.grad], "gradients")
    span = meter.stop("step", {})
    assert span.peak_of_phase["forward"].of("activations") == 4000
    assert span.peak_of_phase["forward"].of("temporary") == 4000
    assert span.peak_of_phase["backward"].of("gradients") == 4000
    assert span.timeline[-1].num_bytes == (4000, 4000, 0, 0, 0, 0, 0)
    assert span.blocks_at_peak["block"]["parameters"] == 4000


def test_a_limit_is_an_out_of_memory_error():
    meter = MemoryMeter(torch.device("cpu"), limit_bytes=10_000)
    meter.start({}, {})
    meter.phase = "forward"
    with pytest.raises(torch.OutOfMemoryError, match=r"limit is 10,000: tried to allocate 8,000 bytes in forward"):
        held = [torch.zeros(2000), torch.zeros(2000)]
        del held
    assert meter.stop("step", {}).peak.total == 16_000


def test_a_short_timeline_keeps_the_peak():
    moments = [
        Moment(phase="forward", block=OUTSIDE, num_bytes=(value, *[0] * (len(CATEGORIES) - 1)))
        for value in [1, 5, 2, 9, 3, 4]
    ]
    assert [moment.total for moment in thinned(moments, 2)] == [5, 9]
    assert thinned(moments, 6) == tuple(moments)


def test_a_file_that_is_no_trace(tmp_path):
    (tmp_path / "rank0.json").write_text("{}")
    with pytest.raises(TraceError, match="not a memory trace"):
        read_trace(tmp_path / "rank0.json")
    with pytest.raises(TraceError, match="does not read"):
        read_trace(tmp_path / "rank1.json")


def test_a_run_that_traced_nothing(tmp_path):
    trace = MemoryTrace(steps=[7], dirpath=tmp_path / "memory")
    fit([trace], max_steps=1)
    assert not (tmp_path / "memory").exists()
    with pytest.raises(TraceError, match="rank 0 traced no step"):
        _ = trace.traces[0].fullest
