# SPDX-License-Identifier: Apache-2.0
"""Manual optimization under data parallelism: each network is sharded on its own, several backwards a step."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.engine.runs import DP2, Regression, Run, check, name_of, seeded, vector_batches
from tests.models import MLP


class Adversarial(Regression):
    """Two networks, two optimizers, one after the other; a parameter that belongs to neither network."""

    def __init__(self):
        super().__init__(MLP())
        self.automatic_optimization = False
        self.critic = MLP(depth=2)
        self.shift = nn.Parameter(torch.zeros(16))

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        made = self.model(batch["x"]) + self.shift
        first.zero_grad()
        loss = F.mse_loss(made, batch["y"]) - 0.1 * self.critic(made).mean()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        first.step()
        second.zero_grad()
        self.manual_backward((self.critic(made.detach()) - self.critic(batch["y"])).square().mean())
        second.step()
        return {"loss": loss.detach()}

    def configure_optimizers(self):
        return [
            torch.optim.SGD([*self.model.parameters(), self.shift], lr=0.1, momentum=0.9),
            torch.optim.SGD(self.critic.parameters(), lr=0.1),
        ]


class Listed(Regression):
    """Networks in containers."""

    def __init__(self):
        super().__init__(nn.ModuleList([MLP(depth=2), MLP(depth=2)]))
        self.automatic_optimization = False
        self.heads = nn.ModuleDict({"head": nn.Linear(16, 16)})

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for part in range(2):  # two backwards before one step
            x, y = batch["x"], batch["y"]
            loss = F.mse_loss(self.heads["head"](self.model[part](x)), y)
            self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}


RUNS = {
    "two networks": Run(
        module=lambda: seeded(Adversarial), batches=vector_batches(), compare=("losses", "parameters")
    ),
    "containers": Run(
        module=lambda: seeded(Listed), batches=vector_batches(), compare=("losses", "parameters")
    ),
}


@pytest.mark.parametrize("layout", [DP2, {"dp_replicate": 2}], ids=name_of)
def test_manual_optimization(layout):
    check(layout, RUNS)
