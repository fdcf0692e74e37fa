# SPDX-License-Identifier: Apache-2.0
"""ZeRO trains as one process does: losses, learning rates, clipping, accumulation and the weights at the end."""

import functools

import pytest

from tests.engine.runs import lm
from tests.zero.runs import (
    BATCHES,
    Record,
    Scheduled,
    difference,
    largest_error,
    on_ranks,
    train,
    zero,
)

TOLERANCE = 1e-4
CONFIGURATIONS = [
    {"stage": stage, "offload_optimizer": where} for stage in (1, 2, 3) for where in ("none", "cpu")
] + [{"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"}]
NAMES = ["-".join(str(value) for value in options.values()) for options in CONFIGURATIONS]


@functools.cache
def alone(**options) -> Record:
    """What one process computes."""
    sgd, count = options.pop("sgd", False), options.pop("count", len(BATCHES))
    return train("auto", module=lambda: module(sgd), batches=BATCHES[:count], **options)


def module(sgd=False):
    return lm("sgd" if sgd else "adamw", Scheduled, tied=True)


def check(records, reference, name):
    for record in records:
        assert record.global_step == reference.global_step, name
        assert record.rates == reference.rates, name
        assert difference(record.losses, reference.losses) < TOLERANCE, name
        assert largest_error(record.parameters, reference.parameters) < TOLERANCE, name


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=NAMES)
def test_twenty_steps_equal_one_process(options):
    reference = alone(gradient_clip_val=0.5)
    body = lambda: train(zero(**options), devices=2, module=module, gradient_clip_val=0.5)  # noqa: E731
    records = on_ranks(2, body)
    assert len(records[0].losses) == 20
    check(records, reference, options)


def test_clipping_is_what_the_trainer_says():
    """The clip above is one: it changes the run, and without one DeepSpeed's own default does not clip."""
    clipped, free = alone(gradient_clip_val=0.5), alone()
    assert difference(clipped.losses, free.losses) > 10 * TOLERANCE
    records = on_ranks(2, lambda: train(zero(stage=2), devices=2, module=module))
    check(records, free, "no clipping")


@pytest.mark.parametrize("options", [CONFIGURATIONS[0], CONFIGURATIONS[3], CONFIGURATIONS[5]])
def test_accumulates_as_the_loop_does(options):
    """Seven batches by three over two epochs: the rest of an epoch is a step of its own."""
    run = {"accumulate_grad_batches": 3, "max_epochs": 2}
    reference = alone(sgd=True, count=7, **run)
    assert reference.global_step == 6

    def body():
        return train(zero(**options), devices=2, module=lambda: module(True), batches=BATCHES[:7], **run)

    check(on_ranks(2, body), reference, options)


@pytest.mark.parametrize("world_size", [1, 4])
def test_any_number_of_ranks(world_size):
    reference = alone(count=4)

    def body():
        return [
            train(zero(stage=stage), devices=world_size, module=module, batches=BATCHES[:4])
            for stage in (2, 3)
        ]

    for records in zip(*on_ranks(world_size, body), strict=True):
        check(records, reference, world_size)


def test_bf16_is_close():
    reference = alone(count=8)

    def body():
        strategy = zero(stage=3, offload_optimizer="cpu")
        return train(strategy, devices=2, module=module, batches=BATCHES[:8], precision="bf16-mixed")

    # The loss itself is in bf16, with 8 bits: half a step is 0.2% of it, and processors round sums in their own ways.
    for record in on_ranks(2, body):
        assert record.losses == pytest.approx(reference.losses, rel=0.01)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_module_is_trained_again(stage):
    """A second fit goes on from the weights of the first, under an optimizer of its own, as in one process."""

    def twice(strategy, devices):
        trained = module()
        for begin in (0, 2):
            record = train(
                strategy(), devices=devices, module=lambda: trained, batches=BATCHES[begin : begin + 2]
            )
        return record

    reference = twice(lambda: "auto", 1)
    check(on_ranks(2, lambda: twice(lambda: zero(stage=stage), 2)), reference, stage)
