# SPDX-License-Identifier: Apache-2.0
"""Trainer features that a layout does not have, refused in one line before training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import nn

from lightning_3d.compat_lightning import plain_optimizer
from lightning_3d.compat_torchao import is_from_torchao
from lightning_3d.errors import SupportError
from lightning_3d.parallel.gradients import SharedGradScaler
from lightning_3d.plan import ParallelPlan
from lightning_3d.strategies.weight_averaging import check_averages

if TYPE_CHECKING:
    import lightning.pytorch as pl

_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
_EMPTY_NAME = "nothing_to_train"
_PRECISION_PLUGINS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)


def check_precision(plugin: Precision) -> None:
    """Checks the precision plugin and gives a mixed one a scaler whose ranks skip steps together.

    Raises:
        SupportError: the plugin or its scaler is one that the sharded engine would silently get wrong.
    """
    if type(plugin) not in _PRECISION_PLUGINS:
        raise SupportError(
            f"{type(plugin).__name__} is not supported by this strategy."
            f" Use Trainer(precision=...) with one of {', '.join(_PRECISIONS)}."
        )
    scaler = getattr(plugin, "scaler", None)
    if scaler is None or isinstance(scaler, SharedGradScaler):
        return
    if type(scaler) is not torch.amp.GradScaler:
        raise SupportError(
            f"The gradient scaler {type(scaler).__name__} would skip steps on one rank only. Use"
            " MixedPrecision('16-mixed', device) with torch.amp.GradScaler, or with lightning_3d's SharedGradScaler."
        )
    plugin.scaler = SharedGradScaler(  # type: ignore[attr-defined]
        device=plugin.device,  # type: ignore[attr-defined]
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
    )


def check_trainer(trainer: "pl.Trainer", module: "pl.LightningModule", plan: ParallelPlan) -> None:
    """Checks the Trainer and the LightningModule against the layout.

    Raises:
        SupportError: a feature cannot work in this layout; the message names the remedy.
    """
    pp, tp = plan.size("pp"), plan.size("tp")
    if plan.world_size > 1:
        check_averages(trainer)
    if not module.automatic_optimization and (pp > 1 or tp > 1):
        raise SupportError(
            f"Manual optimization (automatic_optimization=False) needs pp=1 and tp=1, not pp={pp} and tp={tp}:"
            " a schedule runs the backward itself. Use data parallelism, or automatic optimization."
        )
    if pp > 1:
        _check_step_arguments(module)


@contextmanager
def something_to_optimize(module: "pl.LightningModule") -> Iterator[nn.Parameter | None]:
    """Gives a pipeline stage whose parameters are all frozen an empty one, while its optimizer is built.

    `AdamW(p for p in self.parameters() if p.requires_grad)` is right for the whole model, and an error for such a part.

    Yields:
        The empty parameter, to be taken out of the optimizer again; None where it is not needed.

    Raises:
        SupportError: the optimizer was given other parameters, of which this rank has none.
    """
    empty = None if any(p.requires_grad for p in module.parameters()) else nn.Parameter(torch.empty(0))
    if empty is not None:
        module.register_parameter(_EMPTY_NAME, empty)
    try:
        yield empty
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        raise SupportError(
            "configure_optimizers() found no parameters on this pipeline stage: those it names are held by others."
            " Build the optimizer from self.parameters(), in groups where they need different options."
        ) from error
    finally:
        if empty is not None:
            delattr(module, _EMPTY_NAME)


def check_optimizers(
    optimizers: list[Any],
    names_before: dict[int, str],
    module: "pl.LightningModule",
    stand_in: nn.Parameter | None = None,
) -> None:
    """Points optimizers that were built before the model was sharded at the sharded parameters, in place.

    Args:
        optimizers: from `configure_optimizers`.
        names_before: names of the parameters before sharding, by identity.
        module: the sharded module.
        stand_in: from `something_to_optimize`; taken out.

    Raises:
        SupportError: an optimizer holds parameters that are not of this module, or computes with all of them at once.
    """
    now = dict(module.named_parameters())
    own = {id(parameter) for parameter in now.values()}
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS) and dist.get_world_size() > 1:
            raise SupportError(
                "LBFGS takes inner products over all parameters, of which each rank has a part. Use one rank, or an"
                " optimizer that treats parameters one by one."
            )
        _check_states(plain_optimizer(optimizer))
        for group in optimizer.param_groups:
            kept = []
            for parameter in group["params"]:
                if id(parameter) in own:
                    kept.append(parameter)
                    continue
                if parameter is stand_in:
                    continue
                name = names_before.get(id(parameter))
                if name is None:
                    raise SupportError(
                        f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that is not in"
                        " the model. Build the optimizer in configure_optimizers() from self.parameters()."
                    )
                if name in now:
                    kept.append(now[name])
            group["params"] = kept


_UNSHARDED_STATES = ("Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8")


def _check_states(optimizer: torch.optim.Optimizer) -> None:
    """Refuses optimizers whose states cannot be cut into shards, or follow them into a checkpoint.

    Raises:
        SupportError: with the optimizer that can.
    """
    kind, origin = type(optimizer).__name__, type(optimizer).__module__.partition(".")[0]
    instead = "Use torchao.optim.AdamW8bit or Adam8bit, whose states can"
    if is_from_torchao(optimizer, *_UNSHARDED_STATES):
        raise SupportError(
            f"The states of torchao's {kind} cannot be sharded and stored shard by shard. {instead}."
        )
    if is_from_torchao(optimizer, "CPUOffloadOptimizer"):
        raise SupportError(
            f"torchao's {kind} moves whole tensors of one device. Use the strategy's offload='cpu' with any optimizer."
        )
    if origin == "bitsandbytes":
        raise SupportError(f"bitsandbytes' {kind} does not work on sharded tensors. {instead}.")


def _check_step_arguments(module: "pl.LightningModule") -> None:
    import inspect

    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise SupportError(
            "training_step(dataloader_iter) reads batches by itself, which a pipeline has to split."
            " Use training_step(batch, batch_idx), or pp=1."
        )
