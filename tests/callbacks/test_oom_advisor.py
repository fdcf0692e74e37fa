# SPDX-License-Identifier: Apache-2.0
"""Out of memory: the right first advice, a config that runs and saves what was predicted, the same end on all ranks."""

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_3d.callbacks import MemoryTrace, OOMAdvisor
from lightning_3d.errors import PlanError
from lightning_3d.selfcheck.model import DecoderShape, LanguageModel, TokenData
from lightning_3d.units import GIB, MIB
from tests.callbacks.memory_runs import SHAPE, fit, strategy_of
from tests.harness import RanksError, run_ranks

SHAPES = {
    "activations": {"vocab_size": 64, "dim": 64, "num_layers": 4, "ffn_dim": 192, "sequence_length": 64},
    "states": {"vocab_size": 64, "dim": 128, "num_layers": 4, "ffn_dim": 512, "sequence_length": 8},
    "logits": {"vocab_size": 4096, "dim": 32, "num_layers": 2, "ffn_dim": 64, "sequence_length": 64},
}
CASES = {  # what fills the rank: ranks, batch, precision, MiB of the device, the first advice, what the config sets
    "activations": (1, 8, "32-true", 12.8, "bf16", {"precision": "bf16-mixed"}),
    "states": (2, 2, "bf16-mixed", 13.0, "shard the states (FSDP)", {"dp_shard": 2, "dp_replicate": 1}),
    "logits": (1, 8, "bf16-mixed", 14.0, "smaller microbatch", {"batch_size": 2, "accumulate_grad_batches": 4}),
}


def shape_of(kind):
    return DecoderShape(num_heads=8, num_kv_heads=8, **SHAPES[kind])


class Model(LanguageModel):
    def __init__(self, kind: str = "activations"):
        super().__init__(shape_of(kind), "adamw")


class Data(TokenData):
    """`batch_size` is of each replica, as a DataLoader's."""

    def __init__(self, batch_size: int = 8, kind: str = "activations", replicas: int = 1):
        super().__init__(256, batch_size * replicas, shape_of(kind))
        self.batch_size = batch_size


def runs_out(kind, folder):
    ranks, batch, precision, limit_mib, *_ = CASES[kind]
    advisor = OOMAdvisor(limit_gib=limit_mib * MIB / GIB, dirpath=folder, warn=False)
    try:
        fit([advisor], strategy_of({"dp_replicate": ranks}), ranks, data=Data(batch, kind, ranks), module=Model(kind), precision=precision)
    except torch.OutOfMemoryError as error:
        advice = advisor.advice
        return advice.first.lever.name, advice.bound, advice.saving_bytes, error.__notes__[-1]
    return None


def measured(kind):
    ranks, batch, precision, *_ = CASES[kind]
    trace = MemoryTrace(steps=(1,), evaluation=False)
    fit([trace], strategy_of({"dp_replicate": ranks}), ranks, data=Data(batch, kind, ranks), module=Model(kind), precision=precision)
    return trace.spans[0].peak.total


def measured_from(config, kind):
    """Runs the written config with LightningCLI."""
    ranks = CASES[kind][0]
    arguments = ["--config", str(config), "--trainer.accelerator=cpu", f"--model.kind={kind}", f"--data.kind={kind}", f"--data.replicas={ranks}"]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trace = MemoryTrace(steps=(1,), evaluation=False)
    cli = LightningCLI(Model, Data, run=False, args=arguments, trainer_defaults={**quiet, "max_steps": 2, "callbacks": trace}, save_config_callback=None)
    cli.trainer.fit(cli.model, cli.datamodule)
    return max(span.peak.total for span in trace.spans)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", CASES)
def test_first_advice_and_its_config(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ranks, _, _, limit_mib, first, settings = CASES[kind]
    ended = run_ranks(ranks, runs_out, kind, tmp_path, init=False, timeout_s=60)
    assert None not in ended
    for name, bound, _, note in ended:
        assert (name, bound) == (first, kind)
        assert f"First: {first}" in note
    assert sum("│ 1 │ bf16 " in text for text in ended.outputs) == 1  # printed once
    config = next(tmp_path.glob("oom_advice_*.yaml"))
    written = yaml.safe_load(config.read_text())
    flat = {**written["trainer"], **written["trainer"]["strategy"]["init_args"], **written.get("data", {})}
    assert {key: flat[key] for key in settings} == settings

    before = max(run_ranks(ranks, measured, kind, init=False, timeout_s=60))
    after = max(run_ranks(ranks, measured_from, config, kind, init=False, timeout_s=60))
    assert before > limit_mib * MIB > after
    assert before - after == pytest.approx(ended[0][2], rel=0.15)


class FailsOnOneRank(LanguageModel):
    """Memory runs out on rank 1 alone."""

    def __init__(self, phase):
        super().__init__(SHAPE, "adamw")
        self.phase = phase

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 1 and self.phase == "forward":
            raise torch.OutOfMemoryError("no memory left")
        if self.global_rank == 1 and self.phase == "backward":
            loss.register_hook(self.run_out)
        return loss

    def run_out(self, gradient):
        raise torch.OutOfMemoryError("no memory left")

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if self.global_rank == 1 and self.phase == "optimizer":
            optimizer._init_group = self.run_out_of_states
        return optimizer

    def run_out_of_states(self, *arguments):
        raise torch.OutOfMemoryError("no memory left")


def fails(phase, folder):
    fit([OOMAdvisor(limit_gib=1, dirpath=folder)], strategy_of({"dp_shard": 2}), 2, 2, module=FailsOnOneRank(phase))


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_one_rank_runs_out_and_all_end_with_the_advice(phase, tmp_path):
    with pytest.raises(RanksError) as raised:
        run_ranks(2, fails, phase, tmp_path, init=False, timeout_s=60)
    failures = raised.value.failures
    assert set(failures) == {0, 1}
    assert failures[1].type_name == "OutOfMemoryError"
    assert failures[1].message == "no memory left"
    for failure in failures.values():
        told = failure.details + failure.output
        assert f"Out of memory on rank 1 in {phase}" in told
        assert "The config is" in told
    tables = [failure.output.count("│ 1 │ bf16 ") for failure in failures.values()]
    assert sum(tables) == 1
    assert len(list(tmp_path.glob("*.yaml"))) == 1


def test_warning_before_the_first_step(tmp_path):
    advisor = OOMAdvisor(limit_gib=8 * MIB / GIB, dirpath=tmp_path)
    with pytest.warns(UserWarning, match="This run will not fit"), pytest.raises(torch.OutOfMemoryError):
        fit([advisor], max_steps=1, hush=False)
    assert advisor.advice is not None
    assert advisor.advice.failure.phase == "forward"


def test_other_errors_pass_and_plain_lightning_works(tmp_path):
    class Broken(LanguageModel):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck") as raised:
        fit([OOMAdvisor(limit_gib=1, dirpath=tmp_path)], module=Broken(SHAPE, "sgd"))
    assert not getattr(raised.value, "__notes__", [])
    fit([OOMAdvisor(limit_gib=1, dirpath=tmp_path)])
    assert not list(tmp_path.iterdir())


def test_a_limit_that_is_none():
    with pytest.raises(PlanError, match="limit_gib=-1 is no memory"):
        OOMAdvisor(limit_gib=-1)


def test_a_model_that_is_larger_than_the_limit_by_itself(tmp_path):
    """Memory runs out before anything is computed; the error is that, and every mode is left."""
    advisor = OOMAdvisor(limit_gib=1 * MIB / GIB, dirpath=tmp_path, warn=False)
    trace = MemoryTrace(steps="all", dirpath=tmp_path)
    with pytest.raises(torch.OutOfMemoryError, match="the limit is 1,048,576") as raised:
        fit([advisor, trace], module=Model("states"), data=Data(2, "states"))
    assert "states" in raised.value.__notes__[-1]
    fit([MemoryTrace(steps=(0,), dirpath=tmp_path)], max_steps=1)


def test_a_model_that_cannot_be_read_gets_the_order(tmp_path):
    module = LanguageModel(SHAPE, "sgd")
    module.model.layers = torch.nn.Sequential(*module.model.layers)  # no ModuleList
    module.model.forward = lambda ids: module.model.head(module.model.embed(ids))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        fit([OOMAdvisor(limit_gib=2 * MIB / GIB, dirpath=tmp_path)], module=module)
    note = raised.value.__notes__[-1]
    assert note.index("bf16-mixed") < note.index("recompute=") < note.index("dp_shard") < note.index("offload=")
    assert not list(tmp_path.iterdir())
