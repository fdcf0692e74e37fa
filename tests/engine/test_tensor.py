# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism under the Trainer, alone and with pipeline and data parallelism."""

import pytest
import torch

from lightning_3d.errors import Lightning3DError
from tests.engine.runs import (
    PP2,
    TP2,
    Batches,
    Module,
    Run,
    be_quiet,
    check,
    few_on_many_ranks,
    lm,
    make_trainer,
    name_of,
    strategy_of,
    token_batches,
)
from tests.harness import run_ranks

STEPS = 10


class ManyOptimizers(Module):
    """An implementation of AdamW by name."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, **{self.optimizer: True})


RUNS = {
    "biases and norms": Run(module=lambda: lm(bias=True, qk_norm=True), batches=token_batches()),
    "tied": Run(module=lambda: lm(tied=True), batches=token_batches()),
    "tied, AdamW in fp64": Run(  # which would amplify the rounding of small gradients in fp32
        module=lambda: lm("adamw", tied=True),
        batches=token_batches(),
        options={"precision": "64-true"},
        compare=("gradients", "parameters"),
        tolerance=1e-10,
    ),
    "ten steps": Run(
        module=lambda: lm("adamw", bias=True),
        batches=token_batches(STEPS),
        compare=("losses",),
        options={"gradient_clip_val": 0.5},
    ),
    "odd vocabulary": Run(module=lambda: lm(vocab_size=67, tied=True), batches=token_batches()),
    "AdamW(fused)": Run(module=lambda: lm("fused", ManyOptimizers, bias=True), batches=token_batches()),
    "AdamW(foreach)": Run(module=lambda: lm("foreach", ManyOptimizers, bias=True), batches=token_batches()),
    "without sequence parallelism": Run(
        module=lambda: lm(bias=True, qk_norm=True),
        batches=token_batches(),
        strategy={"sequence_parallel": False},
    ),
}


@pytest.mark.parametrize(
    "layout",
    [TP2, {"tp": 4}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2}, {**PP2, "tp": 2}],
    ids=name_of,
)
def test_tensor_parallel_training_is_that_of_one_process(layout):
    check(
        layout, few_on_many_ranks(layout, RUNS, ("biases and norms", "tied, AdamW in fp64", "AdamW(fused)"))
    )


def test_all_axes_at_once():
    names = ("biases and norms", "tied, AdamW in fp64")
    check({**PP2, "dp_shard": 2, "tp": 2}, {name: RUNS[name] for name in names}, timeout_s=140)


@pytest.mark.parametrize(
    ("changes", "tp", "words"),
    [
        ({"n_heads": 6, "n_kv_heads": 6, "dim": 48}, 4, ("tp=4", "6")),
        ({"n_heads": 4, "n_kv_heads": 2}, 3, ("tp=3",)),
    ],
)
def test_heads_that_do_not_divide_are_refused_before_training(changes, tp, words):
    def body():
        be_quiet()
        with pytest.raises(Lightning3DError) as error:
            make_trainer(strategy_of({"tp": tp}), tp).fit(lm(**changes), Batches(token_batches(1)))
        return str(error.value)

    for message in run_ranks(tp, body, init=False, timeout_s=120):
        for word in words:
            assert word in message
