# SPDX-License-Identifier: Apache-2.0
"""Which optimizers ZeRO gets right, and DeepSpeed's Adam in place of torch's where the step runs on the host."""

import warnings
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_3d.errors import SupportError

_ELEMENTWISE = ("Adam", "AdamW", "SGD", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")
"""Torch's optimizers whose step treats every element by itself."""

_NOT_SWITCHED = ("amsgrad", "maximize", "capturable", "differentiable")
"""Options of torch's Adam that DeepSpeed's does not have."""


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuses optimizers that a flat partition of many parameters makes wrong.

    Raises:
        SupportError: the optimizer looks at shapes or norms of parameters, or DeepSpeed replaces it.
    """
    kind = type(optimizer)
    if kind is torch.optim.Adagrad:
        raise SupportError(
            "DeepSpeed makes a new Adagrad of yours, which learning rate schedulers do not reach. Use AdamW, or"
            " deepspeed.ops.adagrad.DeepSpeedCPUAdagrad with offload_optimizer='cpu'."
        )
    if kind.__module__.startswith("torch.optim") and kind.__name__ not in _ELEMENTWISE:
        raise SupportError(
            f"{kind.__name__} looks at the shape or the norm of whole parameters, and ZeRO hands it flat pieces of"
            f" many. Use one of {', '.join(_ELEMENTWISE)}, or strategy='3d'."
        )
    if not kind.__module__.startswith(("torch.optim", "deepspeed.")):
        warnings.warn(
            f"ZeRO hands {kind.__name__} flat pieces of many parameters: right if its step treats every element by"
            " itself, wrong if it looks at shapes or norms.",
            stacklevel=3,
        )


def can_be_cpu_adam(optimizer: Optimizer) -> bool:
    """Whether DeepSpeed's Adam for CPUs computes the same steps."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    return not any(group.get(name) for group in optimizer.param_groups for name in _NOT_SWITCHED) and not any(
        isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups
    )


def as_cpu_adam(optimizer: Optimizer) -> Optimizer:
    """DeepSpeed's Adam over the same groups: learning rates that a scheduler sets there are its own."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    first = optimizer.param_groups[0]
    decoupled = bool(first.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW))
    options = {name: first[name] for name in ("lr", "betas", "eps", "weight_decay")}
    switched: Any = DeepSpeedCPUAdam(optimizer.param_groups, adamw_mode=decoupled, **options)
    return switched


def is_cpu_adam(optimizer: Optimizer) -> bool:
    """Whether an optimizer is DeepSpeed's Adam for CPUs, which counts steps in a plain number."""
    return type(optimizer).__name__ == "DeepSpeedCPUAdam"


def stored_type(optimizer: Optimizer) -> type[Optimizer]:
    """The class under which state is stored: torch's where DeepSpeed's is the same to the run."""
    if not is_cpu_adam(optimizer):
        return type(optimizer)
    return torch.optim.AdamW if getattr(optimizer, "adam_w_mode", True) else torch.optim.Adam
