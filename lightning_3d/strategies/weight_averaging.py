# SPDX-License-Identifier: Apache-2.0
"""Lightning's averaging callbacks (EMA, SWA) on a model of which every rank holds a part.

Lightning's callbacks copy the module before a strategy has cut and sharded it. `take_over` mixes a class into the
user's callback, behind all of the user's classes and before Lightning's own: what the user overrides stays, the copy is
made of this rank's shards once there are any, and checkpoints hold training weights and averages under their own names.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_3d.compat_lightning import let_strategy_run_backward
from lightning_3d.errors import SupportError
from lightning_3d.parallel.averages import LocalParts, ShardAverage, named_tensors
from lightning_3d.strategies.process_groups import MeshedStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl

TRAINING_WEIGHTS = "current_model_state"
"""Entry of a checkpoint with the weights of training, where `state_dict` has their average (Lightning's name)."""
SWA_WEIGHTS = "average_model_state"
"""Entry of a checkpoint with the average of `StochasticWeightAveraging` (Lightning's name)."""
BESIDE = (TRAINING_WEIGHTS, SWA_WEIGHTS)
_OWN_CLASS = "class_of_the_user"


class ShardedWeightAveraging(WeightAveraging):
    """`WeightAveraging` of shards."""

    _average_model: ShardAverage | None
    _swapped = False

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Copies nothing yet."""
        if _released(self, trainer):
            WeightAveraging.setup(self, trainer, pl_module, stage)
        else:
            self._average_model, self._swapped = None, False

    def begin(self, module: "pl.LightningModule", prepare: Callable[[], None]) -> None:
        """Begins the average with this rank's part of the weights."""
        device = self._device if self._device is not None else module.device
        options = {"device": device, "use_buffers": self._use_buffers, **self._kwargs}
        self._average_model = ShardAverage(module, prepare, **options)

    def beside(self, module: "pl.LightningModule") -> tuple[str, dict[str, Tensor]]:
        """What to load beside the model: the training weights, since the averages are in its place."""
        assert self._average_model is not None
        return TRAINING_WEIGHTS, self._average_model.named(module)

    def on_save_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Puts the average in the place of the model's state and the training weights beside it, swapped or not."""
        if self._average_model is None:
            return super().on_save_checkpoint(trainer, pl_module, checkpoint)
        self._average_model.prepare()
        own, other = named_tensors(pl_module), self._average_model.named(pl_module)
        state = checkpoint["state_dict"]
        training, average = (other, own) if self._swapped else (own, other)
        checkpoint[TRAINING_WEIGHTS] = {name: training[name] for name in state if name in training}
        if not self._swapped:
            state |= {name: average[name] for name in state if name in average}
        checkpoint["averaging_state"] = {"n_averaged": self._average_model.n_averaged.clone()}
        return None

    def on_load_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """The averages were loaded into the model and the training weights in their place: exchanges them."""
        if self._average_model is None:
            return
        if "averaging_state" in checkpoint:
            self._average_model.n_averaged.copy_(checkpoint["averaging_state"]["n_averaged"])
            self._exchange(pl_module)
            return
        rank_zero_warn(
            "The checkpoint was not made with WeightAveraging: the average begins with the weights in it."
        )
        self._average_model.prepare()
        _copy(LocalParts(pl_module), self._average_model.module)

    def _swap_models(self, pl_module: "pl.LightningModule") -> None:
        self._exchange(pl_module)
        self._swapped = not self._swapped

    def _exchange(self, pl_module: "pl.LightningModule") -> None:
        assert self._average_model is not None
        self._average_model.prepare()
        super()._swap_models(LocalParts(pl_module))  # type: ignore[arg-type]

    def _copy_average_to_current(self, pl_module: "pl.LightningModule") -> None:
        assert self._average_model is not None
        self._average_model.prepare()
        super()._copy_average_to_current(LocalParts(pl_module))  # type: ignore[arg-type]


class ShardedStochasticWeightAveraging(StochasticWeightAveraging):
    """`StochasticWeightAveraging` of shards."""

    _average_model: ShardAverage | None  # type: ignore[assignment]

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Copies nothing yet."""
        if _released(self, trainer):
            StochasticWeightAveraging.setup(self, trainer, pl_module, stage)
        else:
            self._average_model = None

    def begin(self, module: "pl.LightningModule", prepare: Callable[[], None]) -> None:
        """Makes room for the average of this rank's part of the weights.

        Raises:
            SupportError: pipeline stages and BatchNorm.
        """
        if _has_stages(module.trainer) and self.pl_module_contains_batch_norm(module):
            raise SupportError(
                "StochasticWeightAveraging of a model with BatchNorm runs an epoch without backward, and pipeline stages"
                " always run both. Use pp=1, or EMAWeightAveraging."
            )
        self._average_model = ShardAverage(module, prepare, avg_fn=self._avg_fn)

    def beside(self, module: "pl.LightningModule") -> tuple[str, dict[str, Tensor]]:
        """What to load beside the model: the average."""
        assert self._average_model is not None
        return SWA_WEIGHTS, self._average_model.named(module)

    def on_train_epoch_end(self, trainer: "pl.Trainer", *args: Any) -> None:
        """Keeps what tells Lightning's loop that pipeline stages run their own backward."""
        super().on_train_epoch_end(trainer, *args)
        if _has_stages(trainer):
            let_strategy_run_backward(trainer)

    @staticmethod
    def update_parameters(average_model: Any, model: Any, n_averaged: Tensor, avg_fn: Any) -> None:
        """Takes this rank's part of the weights into the average."""
        average_model.prepare()
        parts: Any = LocalParts(model)
        StochasticWeightAveraging.update_parameters(average_model.module, parts, n_averaged, avg_fn)

    @staticmethod
    def transfer_weights(src_pl_module: Any, dst_pl_module: Any) -> None:
        """Puts this rank's part of the average in the place of the weights."""
        src_pl_module.prepare()
        parts: Any = LocalParts(dst_pl_module)
        StochasticWeightAveraging.transfer_weights(src_pl_module.module, parts)

    def state_dict(self) -> dict[str, Any]:
        """All but the average itself, which is written shard by shard."""
        average, self._average_model = self._average_model, None
        try:
            return super().state_dict()
        finally:
            self._average_model = average

    def on_save_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Hands over the average, once there is one."""
        if self._average_model is not None and self.n_averaged is not None:
            averages = self._average_model.named(pl_module)
            state = checkpoint["state_dict"]
            checkpoint[SWA_WEIGHTS] = {name: averages[name] for name in state if name in averages}

    def on_load_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Takes out the schedulers that SWA replaces, before their state is restored."""
        state = checkpoint.get("callbacks", {}).get(self.state_key, {})
        if self._average_model is not None and state.get("scheduler_state") is not None:
            self._clear_schedulers(trainer)

    def _load_average_model_state(self, model_state: Any) -> None:
        """The average has been loaded already."""


Averaging = ShardedWeightAveraging | ShardedStochasticWeightAveraging
_MIXINS = {
    WeightAveraging: ShardedWeightAveraging,
    StochasticWeightAveraging: ShardedStochasticWeightAveraging,
}


def take_over(trainer: "pl.Trainer") -> None:
    """Makes the averaging callback of a Trainer average shards.

    Raises:
        SupportError: there are several.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    averaging = [each for each in callbacks if isinstance(each, tuple(_MIXINS))]
    if len(averaging) > 1:
        names = " and ".join(type(each).__name__ for each in averaging)
        raise SupportError(f"{names} would overwrite each other's averages of the weights. Use one of them.")
    for callback in averaging:
        if not isinstance(callback, Averaging):
            base = next(base for base in _MIXINS if isinstance(callback, base))
            callback.__class__ = _mixed(type(callback), base)


def check_averages(trainer: "pl.Trainer") -> None:
    """For strategies that do not take averaging callbacks over.

    Raises:
        SupportError: there is one, which would copy the whole model and not its shards.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, tuple(_MIXINS)) and not isinstance(callback, Averaging):
            raise SupportError(
                f"{type(callback).__name__} copies the whole model before it is sharded, which {trainer.strategy.strategy_name}"  # type: ignore[attr-defined]
                " does not support. Remove the callback, or use strategy='3d'."
            )


def _mixed(cls: type, base: type) -> type:
    """A class of the same name, under which checkpoints find its state."""
    names = {"__qualname__": cls.__qualname__, "__module__": cls.__module__, _OWN_CLASS: cls}
    return type(cls.__name__, (_MIXINS[base],) if cls is base else (cls, _MIXINS[base]), names)


def _released(callback: Callback, trainer: "pl.Trainer") -> bool:
    """Gives a callback that another strategy uses next its own class back."""
    if isinstance(trainer.strategy, MeshedStrategy):
        return False
    callback.__class__ = getattr(type(callback), _OWN_CLASS)
    return True


def _has_stages(trainer: "pl.Trainer") -> bool:
    return isinstance(trainer.strategy, MeshedStrategy) and trainer.strategy.plan.size("pp") > 1


def averaging_of(trainer: "pl.Trainer") -> Averaging | None:
    """The Trainer's averaging callback, if it has one."""
    return next((each for each in trainer.callbacks if isinstance(each, Averaging)), None)  # type: ignore[attr-defined]


def begin(trainer: "pl.Trainer", module: "pl.LightningModule", prepare: Callable[[], None]) -> None:
    """Begins the average, now that the module is sharded."""
    callback = averaging_of(trainer)
    if callback is not None and trainer.state.fn == TrainerFn.FITTING:
        callback.begin(module, prepare)


def beside(trainer: "pl.Trainer", module: "pl.LightningModule") -> dict[str, Mapping[str, Tensor]]:
    """What to load beside the model, by entry of the checkpoint and name; nothing outside of `fit`."""
    callback = averaging_of(trainer)
    if callback is None or trainer.state.fn != TrainerFn.FITTING:
        return {}
    label, tensors = callback.beside(module)
    kept = module.state_dict()
    return {label: {name: tensor for name, tensor in tensors.items() if name in kept}}


def _copy(source: nn.Module, target: nn.Module) -> None:
    for getter in (nn.Module.parameters, nn.Module.buffers):
        for mine, other in zip(getter(source), getter(target), strict=True):
            other.data.copy_(mine.data)
