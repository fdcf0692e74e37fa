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


class Sometimes(Regression):
    """Parameters beside the network: all batches use one, half of a batch another, and no batch the last."""

    def __init__(self, direct=False):
        super().__init__(MLP(depth=2))
        self.automatic_optimization, self.direct = False, direct
        self.always, self.sometimes, self.never = (nn.Parameter(torch.ones(16)) for _ in range(3))

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        made = self.model(batch["x"]) * self.always
        chosen = batch["chosen"].bool()
        if chosen.any():  # on one of two replicas
            made = torch.where(chosen, made + self.sometimes, made)
        loss = F.mse_loss(made, batch["y"])
        if self.direct:
            loss.backward()
        else:
            self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)


def half_chosen():
    """The first half of a batch is chosen, in the second batch the second half, in the third none."""
    batches = vector_batches()
    for batch, values in zip(batches, ([1, 0], [0, 1], [0, 0]), strict=True):
        batch["chosen"] = torch.tensor(values).repeat_interleave(4).reshape(8, 1)
    return batches


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


@pytest.mark.parametrize("layout", [DP2, {"dp_replicate": 2}], ids=name_of)
def test_a_parameter_beside_the_networks_may_be_unused_on_a_replica(layout):
    options = {"batches": half_chosen(), "compare": ("losses", "parameters")}
    check(
        layout,
        {
            "manual_backward": Run(module=lambda: seeded(Sometimes), **options),
            "loss.backward": Run(module=lambda: seeded(lambda: Sometimes(direct=True)), **options),
        },
        timeout_s=40,
    )
