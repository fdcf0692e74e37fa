# SPDX-License-Identifier: Apache-2.0
"""Moments in 8 bits, in and out of a file in which they look like those of any Adam.

[Note: how 8-bit moments are stored]
A moment in 8 bits is a code for each element and a scale for each 256 of them, in the order in which they lie on a
rank: cut elsewhere, the same tensor has other scales. So what is stored is the moment's value in fp32, which loads in
any layout and into any Adam, and beside it each box's scales under a name that says which box. A rank that holds the
same box takes these, and has its codes back bit for bit; any other computes scales of its own, as the next step would.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.shards import Piece, ShardedTensor, sharded
from lightning_3d.compat_torchao import is_8bit_state, new_moment, quantize, scale_of


def scales_name(name: str, box: str) -> str:
    """Name of the scales of one box of a moment."""
    return f"{name}.scales[{box}]"


def stored_moment(name: str, moment: Tensor) -> dict[str, ShardedTensor]:
    """A moment of a low-bit optimizer as tensors of the file; copies, on the host.

    Args:
        name: in the file.
        moment: in 8 bits or, of a small tensor, as any other optimizer has it.
    """
    local = _local(moment)
    if not is_8bit_state(local):
        return {name: sharded(name, moment, local.to("cpu", torch.float32))}
    values: Any = local
    whole = sharded(name, moment, values.dequantize(torch.float32).cpu())
    scale = scale_of(local).cpu()
    scales = ShardedTensor(shape=scale.shape, dtype=scale.dtype, pieces=(Piece(offsets=(0,), local=scale),))
    return {name: whole, scales_name(name, whole.box): scales}


def restored_moment(
    optimizer: Any, parameter: Tensor, key: str, values: Tensor, scale: Tensor | None
) -> Tensor:
    """A moment as a low-bit optimizer keeps it.

    Args:
        optimizer: a low-bit one.
        parameter: whose moment it is.
        key: which one, as the optimizer calls it.
        values: what was stored, placed as the parameter is.
        scale: of this rank's box, if it was stored.
    """
    with torch.no_grad():
        moment = new_moment(optimizer, parameter, key)
        target, source = _local(moment), _local(values)
        if not is_8bit_state(target):
            target.copy_(source)
        elif scale is None or scale.shape != scale_of(target).shape:
            target.copy_(source.float())
        else:
            quantize(source.float(), target, scale.to(source.device))
    return moment


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor
