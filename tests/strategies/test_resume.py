# SPDX-License-Identifier: Apache-2.0
"""A run that is stopped, saved and resumed in another layout ends where a run that never stopped ends."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_3d.checkpoint import load_full_state_dict
from tests.engine.runs import (
    PP2,
    PP2_DP2,
    TP2,
    Batches,
    Run,
    be_quiet,
    fit,
    lm,
    make_trainer,
    name_of,
    relative_error,
    strategy_of,
    token_batches,
    whole,
    world_of,
)
from tests.harness import run_ranks

BATCHES = token_batches(4)
DP2_TP2 = {"dp_shard": 2, "tp": 2}
CASES = [
    (PP2_DP2, DP2_TP2, "adamw"),
    (TP2, PP2, "sgd"),
    (PP2, {"dp_replicate": 2}, "adamw"),
    ({"dp_shard": 2}, {"pp": 2, "tp": 2}, "sgd"),
]
TOLERANCE = {"sgd": 1e-5, "adamw": 5e-5}  # Adam divides rounding of small gradients by small moments


def train(layout, batches, folder, *, optimizer, resume=None, max_steps):
    be_quiet()
    keep = ModelCheckpoint(folder, filename="end", every_n_train_steps=max_steps, save_last=True)
    trainer = make_trainer(
        strategy_of(layout),
        world_of(layout),
        callbacks=[keep],
        enable_checkpointing=True,
        max_steps=max_steps,
    )
    module = lm(optimizer, tied=True)
    trainer.fit(module, Batches(batches), ckpt_path=resume)
    dist.barrier()
    return {name: whole(parameter) for name, parameter in module.named_parameters()}, trainer.global_step


@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    CASES,
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_resumes_in_another_layout(before, after, optimizer, tmp_path):
    reference = fit(Run(module=lambda: lm(optimizer, tied=True), batches=BATCHES))
    first = {"folder": tmp_path / "first", "optimizer": optimizer, "max_steps": 2}
    run_ranks(world_of(before), lambda: train(before, BATCHES, **first), init=False, timeout_s=120)
    saved = tmp_path / "first" / "end.ckpt"
    assert saved.is_dir()

    def go_on():
        folder = tmp_path / "second"
        return train(after, BATCHES, folder, optimizer=optimizer, resume=saved, max_steps=4)

    results = run_ranks(world_of(after), go_on, init=False, timeout_s=120)
    for parameters, global_step in results:
        assert global_step == 4
        for name, value in parameters.items():
            assert relative_error(value, reference.parameters[name]) < TOLERANCE[optimizer], name
    final = load_full_state_dict(tmp_path / "second" / "last.ckpt")
    for name, value in reference.parameters.items():
        assert relative_error(final[name], value) < TOLERANCE[optimizer], name


def test_weights_only_and_one_process(tmp_path):
    """A checkpoint of weights loads for evaluation, and a plain Lightning module reads it whole."""

    def save():
        be_quiet()
        trainer = make_trainer(strategy_of(TP2), 2, max_steps=1)
        trainer.fit(lm(), Batches(BATCHES[:1]))
        trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)

    run_ranks(2, save, init=False, timeout_s=60)
    weights = load_full_state_dict(tmp_path / "weights.ckpt")
    module = lm()
    before = module.model.norm.weight.clone()
    module.load_state_dict(weights)
    assert not torch.equal(before, module.model.norm.weight)


def test_checkpoint_of_another_model_is_refused(tmp_path):
    def save():
        be_quiet()
        trainer = make_trainer(strategy_of({"dp_shard": 2}), 2, max_steps=1)
        trainer.fit(lm(), Batches(BATCHES[:1]))
        trainer.save_checkpoint(tmp_path / "small.ckpt")

    def load():
        be_quiet()
        trainer = make_trainer(strategy_of({"dp_shard": 2}), 2, max_steps=2)
        try:
            trainer.fit(lm(n_layers=6), Batches(BATCHES[:2]), ckpt_path=tmp_path / "small.ckpt")
        except Exception as error:
            return type(error).__name__, str(error)
        return None

    run_ranks(2, save, init=False, timeout_s=60)
    for kind, message in run_ranks(2, load, init=False, timeout_s=60):
        assert kind == "CheckpointError"
        assert "layers.4" in message
