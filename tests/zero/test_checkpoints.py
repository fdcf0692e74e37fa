# SPDX-License-Identifier: Apache-2.0
"""A run moves between ZeRO and the 3D engine; what a checkpoint holds; evaluation from one."""

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder

from lightning_3d.checkpoint import load_full_state_dict
from tests.engine.runs import DP2, TP2, lm, make_trainer, strategy_of
from tests.zero.runs import (
    BATCHES,
    Data,
    Record,
    Recorder,
    Scheduled,
    be_quiet,
    difference,
    largest_error,
    on_ranks,
    train,
    zero,
)

TOLERANCE = 1e-4


def module():
    return lm("adamw", Scheduled, tied=True)


def leg(strategy, folder, number, steps=3):
    """Trains three more steps from the last checkpoint and saves."""
    resume = folder / f"{number - 1}.ckpt" if number else None
    strategy_options = {"devices": 2, "module": module, "max_steps": (number + 1) * steps}
    return train(strategy, **strategy_options, resume=resume, save=folder / f"{number}.ckpt")


@pytest.mark.parametrize(
    "legs",
    [
        ({"stage": 2, "offload_optimizer": "cpu"}, TP2, {"stage": 2, "offload_optimizer": "cpu"}),
        (DP2, {"stage": 3, "offload_optimizer": "none", "save_async": True}, TP2),
        ({"stage": 1, "offload_optimizer": "none"}, {"stage": 3, "offload_optimizer": "cpu"}, DP2),
    ],
    ids=["zero2-tp2-zero2", "fsdp2-zero3-tp2", "zero1-zero3-fsdp2"],
)
def test_moves_between_engines(legs, tmp_path):
    """Weights, both moments, step counters, the scheduler and the position in the data arrive."""
    reference = train("auto", module=module, batches=BATCHES[:9])
    losses, rates = [], []
    for number, options in enumerate(legs):
        make = zero if "stage" in options else lambda **layout: strategy_of(layout)
        record = on_ranks(2, lambda: leg(make(**options), tmp_path, number))[1]  # noqa: B023
        losses += record.losses
        rates += record.rates
        assert record.global_step == 3 * (number + 1)
    assert rates == reference.rates
    assert difference(losses, reference.losses) < TOLERANCE
    saved = load_full_state_dict(tmp_path / "2.ckpt")
    assert (
        largest_error({name: saved[name] for name in reference.parameters}, reference.parameters) < TOLERANCE
    )


def test_same_strategy_resumes_bit_by_bit(tmp_path):
    """Nothing is lost on the way through a checkpoint, in half precision neither."""

    def body():
        options = {"devices": 2, "module": module, "precision": "bf16-mixed"}
        strategy = {"stage": 2, "offload_optimizer": "cpu"}
        whole = train(zero(**strategy), batches=BATCHES[:4], **options)
        train(zero(**strategy), max_steps=2, save=tmp_path / "half.ckpt", **options)
        rest = train(zero(**strategy), max_steps=4, resume=tmp_path / "half.ckpt", **options)
        return whole.losses[2:] == rest.losses, largest_error(rest.parameters, whole.parameters)

    assert on_ranks(2, body) == [(True, 0.0)] * 2


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_stage_3_is_tested_without_an_optimizer(precision, tmp_path):
    path = tmp_path / "end.ckpt"

    def fit():
        be_quiet()
        trainer = make_trainer(
            zero(stage=3), 2, callbacks=[Recorder(Record())], max_steps=2, precision=precision
        )
        trained = module()
        trainer.fit(trained, Data(BATCHES))
        trainer.save_checkpoint(path)
        return trainer.test(trained, datamodule=Data(BATCHES[:2]), verbose=False)[0][
            "tested"
        ]  # the engine that trained

    def test(stage):
        be_quiet()
        trainer = make_trainer(zero(stage=stage), 2, precision=precision)
        return trainer.test(module(), Data(BATCHES[:2]), ckpt_path=path, verbose=False)[0]["tested"]

    tolerance = 1e-6 if precision == "32-true" else 1e-2
    expected = on_ranks(2, fit)
    fresh = on_ranks(2, lambda: [test(stage) for stage in (3, 2)])
    for mine, others in zip(expected, fresh, strict=True):
        assert difference(others, [mine] * 2) < tolerance


@pytest.mark.parametrize("stage", [2, 3])
def test_learning_rate_finder_leaves_no_trace(stage, tmp_path):
    """Afterwards training goes on as if it had not run, with the rate that it found, on all ranks."""
    finder = {"num_training_steps": 5, "min_lr": 1e-4, "max_lr": 1e-1, "update_attr": False}

    def body():
        plain = train(zero(stage=stage), devices=2, module=lambda: lm("adamw"), batches=BATCHES[:3])
        callback = LearningRateFinder(**finder)
        found = train(
            zero(stage=stage),
            devices=2,
            module=lambda: lm("adamw"),
            batches=BATCHES[:8],
            callbacks=[callback],
            max_steps=3,
            default_root_dir=tmp_path,
        )
        return (
            plain.losses,
            found.losses[-3:],
            largest_error(found.parameters, plain.parameters),
            callback.optimal_lr.suggestion(),
        )

    results = on_ranks(2, body)
    for plain, found, error, _ in results:
        assert found == plain
        assert error == 0.0
    assert results[0][3] == results[1][3]
    assert not list(tmp_path.glob(".lr_find*"))


def test_deepspeeds_own_format(tmp_path):
    """It resumes, and what was resumed from it is exported to the format that any layout loads."""
    reference = train("auto", module=module, batches=BATCHES[:4])

    def body():
        options = {"devices": 2, "module": module}
        own = {"stage": 3, "offload_optimizer": "cpu", "checkpoint_format": "deepspeed"}
        first = train(zero(**own), max_steps=2, save=tmp_path / "own.ckpt", **options)
        again = {"max_steps": 4, "resume": tmp_path / "own.ckpt", "save": tmp_path / "ours.ckpt"}
        rest = train(zero(stage=3, offload_optimizer="cpu"), **again, **options)
        return first.losses + rest.losses

    for losses in on_ranks(2, body):
        assert difference(losses, reference.losses) < TOLERANCE
    exported = load_full_state_dict(tmp_path / "ours.ckpt")
    values = {name: exported[name] for name in reference.parameters}
    assert largest_error(values, reference.parameters) < TOLERANCE
    assert all(value.dtype == torch.float32 for value in values.values())
