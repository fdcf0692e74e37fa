# SPDX-License-Identifier: Apache-2.0
"""Clipping: one norm of the whole model's gradient, whatever part of it a rank holds."""

import math

import lightning.pytorch as pl
import pytest

from tests.engine.runs import (
    DP2,
    PP2,
    PP2_DP2,
    PP2_INTERLEAVED,
    TP2,
    Module,
    Run,
    alone,
    check,
    few_on_many_ranks,
    lm,
    name_of,
    norm_of,
    token_batches,
)

LAYOUTS = [PP2, PP2_INTERLEAVED, DP2, TP2, {"dp_shard": 2, "tp": 2}, PP2_DP2, {**PP2, "tp": 2}]


class OwnClipping(Module):
    """Clips as Lightning's documentation shows."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class OtherNorms(pl.Callback):
    """Compares norms of other orders, of parameters given as a generator, with those of one process."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.world_size == 1:
            return
        gradients = trainer.strategy._parallel.gradients
        expected = alone(RUNS["norm"]).gradients[trainer.global_step]
        for p in (1.0, 3.0, math.inf):
            norm = float(gradients.norm(pl_module.parameters(), p))
            assert norm == pytest.approx(norm_of(expected, p), rel=1e-5)


def clipped(algorithm="norm", value=0.1, cls=Module, **changes):
    return Run(
        module=lambda: lm(cls=cls, **changes),
        batches=token_batches(),
        options={"gradient_clip_val": value, "gradient_clip_algorithm": algorithm},
    )


RUNS = {
    "norm": clipped(bias=True, qk_norm=True),
    "norm, tied": clipped(tied=True),
    "value": clipped("value", 1e-3, tied=True),
    "not reached": clipped(value=1e6),
    "own hook": Run(module=lambda: lm("adamw", OwnClipping), batches=token_batches()),
}
RUNS["norm"].options["callbacks"] = lambda: [OtherNorms()]


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_clipping_is_that_of_one_process(layout):
    runs = few_on_many_ranks(layout, RUNS, ("norm", "norm, tied", "value"))
    found = check(layout, runs)
    for name in runs.keys() - {"value"}:
        expected = [norm_of(gradients) for gradients in alone(runs[name]).gradients]
        for record in found[name]:
            assert record.norms == pytest.approx(expected, rel=1e-5), name
