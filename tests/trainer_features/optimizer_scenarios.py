# SPDX-License-Identifier: Apache-2.0
"""Schedulers, optimizers, adapters, averages, the learning rate finder."""

import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from torch import nn

from tests.trainer_features.matrix import Module, Place, attempt, everybody, numbers, parameters_of


def schedulers(place: Place):
    class Scheduled(Module):
        def __init__(self, kind) -> None:
            super().__init__()
            self.kind, self.rates = kind, []

        def on_train_batch_end(self, *_):
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler
            if self.kind == "cycle":
                total = self.trainer.estimated_stepping_batches
                one = {
                    "scheduler": schedule.OneCycleLR(optimizer, 0.2, total_steps=total),
                    "interval": "step",
                }
            elif self.kind == "step":
                one = {"scheduler": schedule.StepLR(optimizer, 1, 0.5), "interval": "step", "frequency": 2}
            else:
                one = {"scheduler": schedule.ExponentialLR(optimizer, 0.5), "interval": "epoch"}
            return {"optimizer": optimizer, "lr_scheduler": one}

    found = {}
    for kind, name in (("cycle", "estimated_stepping_batches"), ("step", "step"), ("epoch", "epoch")):
        module = Scheduled(kind)
        place.trainer(max_epochs=2).fit(module)
        found[f"LR scheduler: {name}"] = [module.rates, parameters_of(module)]
    return found


def frozen(place: Place):
    """The base frozen, low-rank adapters trained."""

    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.in_features, 2, bias=False)
            self.up = nn.Linear(2, base.out_features, bias=False)
            nn.init.constant_(self.up.weight, 0.01)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    class Adapted(Module):
        def __init__(self) -> None:
            super().__init__()
            self.model.requires_grad_(False)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(5)
                for layer in self.model.layers:
                    layer.attention.wq = Lora(layer.attention.wq)

        def configure_optimizers(self):
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)

    module = Adapted()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    place.trainer(max_epochs=1).fit(module)
    after = parameters_of(module)
    return {
        "LoRA: adapters trained": after,
        "LoRA: base unchanged": all(
            torch.equal(value, before[name])
            for name, value in after.items()
            if "up" not in name and "down" not in name
        ),
    }


def clipping(place: Place):
    class Clips(Module):
        def configure_gradient_clipping(
            self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
        ):
            self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="norm")

    module = Clips()
    place.trainer(max_epochs=1).fit(module)
    return {"configure_gradient_clipping override": parameters_of(module)}


def averages(place: Place):
    names = {"EMAWeightAveraging": EMAWeightAveraging, "StochasticWeightAveraging": StochasticWeightAveraging}
    found = {}
    for name, cls in names.items():

        def train(name=name, cls=cls):
            module = Module()
            options = (
                {"swa_lrs": 0.05, "swa_epoch_start": 1}
                if cls is StochasticWeightAveraging
                else {"decay": 0.5}
            )
            place.trainer(max_epochs=3, callbacks=[cls(**options)]).fit(module)
            return {name: parameters_of(module)}

        found |= attempt(train, [name])
    return found


def thawing(place: Place):
    """Layers that are frozen at first, as BaseFinetuning does it."""

    class Thaws(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.model.layers)

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.model.layers, optimizer, lr=0.1)

    class Partly(Module):
        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)

    module = Partly()
    place.trainer(max_epochs=2, callbacks=[Thaws()]).fit(module)
    return {"BaseFinetuning: layers thawed in training": parameters_of(module)}


class Manual(Module):
    """Two networks, two optimizers, steps by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.generator, self.critic = (
                nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)
            )

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        x = batch["ids"].float() / 32
        self.toggle_optimizer(first)
        loss = self.critic(self.generator(x)).square().mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        other = (self.critic(self.generator(x).detach()) - self.critic(x)).square().mean()
        second.zero_grad()
        self.manual_backward(other)
        self.clip_gradients(second, 0.5, "norm")
        second.step()
        self.untoggle_optimizer(second)
        self.log_dict({"g": loss, "c": other}, sync_dist=True)

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.critic)]


def manual(place: Place):
    names = ["manual optimization, two optimizers (GAN)", "global_step counts every optimizer step"]

    def train():
        module = Manual()
        trainer = place.trainer(max_epochs=1)
        trainer.fit(module)
        return {
            names[0]: [parameters_of(module), numbers(trainer.callback_metrics)],
            names[1]: trainer.global_step,
        }

    return attempt(train, names)


class Diverges(Module):
    """Explodes after some steps, on the first replica or on the others."""

    def __init__(self, on_first) -> None:
        super().__init__()
        self.on_first = on_first

    def training_step(self, batch, batch_idx):
        replica = (self.trainer.distributed_sampler_kwargs or {"rank": 0})["rank"]
        grown = self.trainer.global_step > 5 and (replica == 0) == self.on_first
        return self.loss_of(batch) * (1e4 if grown else 1)


def finder(place: Place):
    module = Module()
    trainer = place.trainer(max_epochs=10)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    found = Tuner(trainer).lr_find(
        module, num_training=20, min_lr=1e-3, max_lr=1.0, early_stop_threshold=None
    )
    after = parameters_of(module)
    rates = everybody(module.lr)
    diverged = []
    for first in (True, False):  # the loss of one replica alone explodes: all stop at the same step
        trainer = place.trainer(max_epochs=10)
        search = Tuner(trainer).lr_find(Diverges(first), num_training=20, update_attr=False)
        diverged.append(len(set(everybody(len(search.results["loss"])))))
    finding = LearningRateFinder(num_training_steps=10, early_stop_threshold=None)
    tuned = Module()
    place.trainer(max_epochs=1, callbacks=[finding]).fit(tuned)
    return {
        "LearningRateFinder: one suggestion, weights restored": [
            len(set(everybody(tuned.lr))),
            tuned.lr != 0.1,
        ],
        "LR finder: a loss that explodes on one replica": diverged,
        "LR finder: one suggestion for all ranks": [
            len(set(rates)),
            module.lr != 0.1,
            len(found.results["lr"]),
        ],
        "LR finder: weights restored": all(
            torch.equal(after[name], before[name]) for name in {*before} & {*after}
        ),
        "LR finder: no file left": [path.name for path in place.folder.glob(".lr_find*")],
    }
