# SPDX-License-Identifier: Apache-2.0
"""Names of torchao that are not in its public modules, and nothing else; torchao is optional and imported late.

What tells torchao's objects apart goes by their type's name, so that a run without torchao never imports it.
"""

from typing import Any

import torch
from torch import Tensor

LOW_BIT_OPTIMIZERS = ("Adam8bit", "AdamW8bit")
"""Optimizers of torchao whose states can be sharded and stored."""


def is_from_torchao(value: object, *names: str) -> bool:
    """Whether a value's class, or one that it derives from, is one of torchao's of these names."""
    return any(
        base.__name__ in names and base.__module__.startswith("torchao.") for base in type(value).__mro__
    )


def is_low_bit(optimizer: object) -> bool:
    """Whether an optimizer keeps its moments in 8 bits (those of small tensors are kept as they are)."""
    return is_from_torchao(optimizer, *LOW_BIT_OPTIMIZERS)


def is_8bit_state(tensor: Tensor) -> bool:
    """Whether a tensor is a moment in 8 bits (`torchao.optim.subclass_8bit.OptimState8bit`)."""
    return is_from_torchao(tensor, "OptimState8bit")


def scale_of(state: Tensor) -> Tensor:
    """The largest magnitude of each block of a moment in 8 bits: [numel / block size]."""
    scale: Tensor = state.scale  # type: ignore[attr-defined]
    return scale


def new_moment(optimizer: Any, parameter: Tensor, key: str) -> Tensor:
    """Zeros in the form in which an optimizer keeps a moment (`_new_buffer`; only the first moment has a sign)."""
    moment: Tensor = optimizer._new_buffer(parameter, key == "exp_avg")
    return moment


def quantize(values: Tensor, state: Tensor, scale: Tensor) -> None:
    """Puts values into a moment in 8 bits under scales that are known, where `copy_` would work them out anew."""
    from torchao.optim.quant_utils import quantize_8bit_with_qmap

    target: Any = state
    blocks = values.view(scale.numel(), -1) / scale.view(-1, 1)
    target.codes.copy_(quantize_8bit_with_qmap(blocks.view(values.shape), target.qmap))
    target.scale.copy_(scale)


def plain_weight(tensor: Tensor) -> Tensor:
    """The tensor in a weight that is gathered in 8 bits (`WeightWithDynamicFloat8CastTensor`); others as they are."""
    if is_from_torchao(tensor, "WeightWithDynamicFloat8CastTensor"):
        inner: Tensor = tensor._tensor  # type: ignore[attr-defined]
        return inner
    return tensor


def convert_linear_layers(module: torch.nn.Module, names: set[str], *, emulate: bool) -> None:
    """Swaps linear layers for those that compute in 8 bits and are gathered in 8 bits by FSDP2, in place.

    Args:
        module: what holds them; is not one itself.
        names: of the layers to swap.
        emulate: compute the products of 8-bit numbers in more bits, where the device has no such products.

    Raises:
        ImportError: torchao is not there.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=emulate)
    convert_to_float8_training(module, config=config, module_filter_fn=lambda _, name: name in names)
