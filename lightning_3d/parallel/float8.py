# SPDX-License-Identifier: Apache-2.0
"""Linear layers that compute in 8 bits and whose weights FSDP2 gathers in 8 bits (torchao), block by block."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lightning_3d.compat_torchao import convert_linear_layers
from lightning_3d.errors import ModelError, SupportError

_UNIT = 16
"""Products of 8-bit numbers want both sides of a weight to be multiples of 16."""
_FIRST_CAPABILITY = (8, 9)
"""Of the first GPUs with such products (Ada, Hopper)."""
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
"""The Trainer's precisions in which weights have the exponents that 8 bits are scaled from."""


def convert_blocks(root: nn.Module, blocks: Iterable[nn.Module], device: torch.device, precision: str) -> int:
    """Swaps the linear layers of blocks, in place; before they are sharded. Names of parameters stay.

    Layers stay as they are where their sizes are no multiples of 16, where their weight is another module's too, and
    where they are of a class of their own.

    Args:
        root: the model, in which weights may be shared.
        blocks: of this rank.
        device: where they compute; one without products of 8-bit numbers does them in more bits.
        precision: the Trainer's.

    Returns:
        Number of layers that were swapped.

    Raises:
        SupportError: torchao is not installed, or does not know the precision.
        ModelError: no block has such a layer.
    """
    if precision not in PRECISIONS:
        raise SupportError(
            f"float8_all_gather=True does not work in precision={precision!r}. Use one of {', '.join(PRECISIONS)}."
        )
    users = Counter(id(p) for m in root.modules() for p in m.parameters(recurse=False))
    emulate = device.type != "cuda" or torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY
    count = 0
    for block in blocks:
        names = {name for name, module in block.named_modules() if name and _fits(module, users)}
        if names:
            _convert(block, names, emulate=emulate)
            count += len(names)
            if device.type == "cpu":
                _follow_autocast(block, names)
    if not count:
        raise ModelError(
            "float8_all_gather=True finds no nn.Linear inside the blocks with sizes that are multiples of 16."
            " Use layer sizes that are, or float8_all_gather=False."
        )
    return count


def _fits(module: nn.Module, users: Counter[int]) -> bool:
    if type(module) is not nn.Linear or module.in_features % _UNIT or module.out_features % _UNIT:
        return False
    return users[id(module.weight)] == 1


def _convert(block: nn.Module, names: set[str], *, emulate: bool) -> None:
    try:
        convert_linear_layers(block, names, emulate=emulate)
    except ImportError as error:
        raise SupportError(
            "float8_all_gather=True needs torchao, which is not installed. Run: pip install 'lightning-3d[fp8]'."
        ) from error


def _follow_autocast(block: nn.Module, names: set[str]) -> None:
    """Casts inputs as autocast would: torchao's layers ask about that of the GPU alone."""

    def cast(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not torch.is_autocast_enabled("cpu"):
            return args
        return (args[0].to(torch.get_autocast_dtype("cpu")), *args[1:])

    for name in names:
        block.get_submodule(name).register_forward_pre_hook(cast)
