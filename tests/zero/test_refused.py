# SPDX-License-Identifier: Apache-2.0
"""What only the module shows is refused on every rank, in one line, when a fit begins."""

import pytest
import torch

from tests.engine.runs import Module, lm
from tests.zero.runs import BATCHES, on_ranks, train, zero


class Optimized(Module):
    """Whatever optimizers the class attribute says."""

    make = staticmethod(lambda parameters: None)

    def configure_optimizers(self):
        return type(self).make(list(self.parameters()))


def with_optimizer(make):
    return type("Made", (Optimized,), {"make": staticmethod(make)})


class CountsTokens(Module):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "num_tokens": 3}


class ClipsItself(Module):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


CASES = {
    "manual": (
        type("Manual", (Module,), {"automatic_optimization": False}),
        {},
        "Use automatic optimization",
    ),
    "none": (
        with_optimizer(lambda p: None),
        {},
        "ZeRO steps one optimizer, and configure_optimizers() gave none",
    ),
    "shapes": (with_optimizer(torch.optim.Adafactor), {}, "Adafactor looks at the shape"),
    "replaced": (with_optimizer(torch.optim.Adagrad), {}, "makes a new Adagrad"),
    "foreign": (
        with_optimizer(lambda p: torch.optim.SGD([*p, torch.nn.Parameter(torch.ones(3))], 0.1)),
        {},
        "shape (3,) that is not in the model",
    ),
    "by value": (Module, {"gradient_clip_algorithm": "value", "gradient_clip_val": 1.0}, "by value"),
    "own clipping": (ClipsItself, {}, "DeepSpeed clips in its step, at the norm 0"),
    "tokens": (CountsTokens, {}, "num_tokens"),
}


def test_refused_on_every_rank():
    """One launch: each case fails alike on both ranks, and the next one starts afresh."""

    def attempt(cls, options):
        try:
            train(zero(stage=2), devices=2, module=lambda: lm("adamw", cls), batches=BATCHES[:1], **options)
        except Exception as error:
            return f"{error}"
        return "trained"

    # A rank that fails while others train ends the others: cases that fail in a step have a launch of their own.
    early = [name for name in CASES if name not in ("own clipping", "tokens")]
    for messages in on_ranks(2, lambda: [attempt(*CASES[name][:2]) for name in early]):
        for name, message in zip(early, messages, strict=True):
            assert CASES[name][2] in message, name


@pytest.mark.parametrize("name", ["own clipping", "tokens"])
def test_refused_in_a_step(name):
    cls, options, expected = CASES[name]

    def attempt():
        with pytest.raises(Exception, match=r"num_tokens|DeepSpeed clips") as caught:
            train(zero(stage=2), devices=1, module=lambda: lm("adamw", cls), batches=BATCHES[:1], **options)
        return str(caught.value)

    assert expected in on_ranks(1, attempt)[0]
