# SPDX-License-Identifier: Apache-2.0
"""Summing the partial gradients of replicated parameters, once per optimizer step."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.compat import foreach_copy_
from lightning_3d.parallel.tensor.parameters import local_data


def sum_gradients(parameters: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Sums the gradients of parameters over a group, in place, with one all-reduce per dtype.

    Args:
        parameters: plain or DTensor, before or after FSDP2; those without a gradient are left out, so a gradient
            must be missing on all ranks or on none.
        group: the tp group.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grad = local_data(parameter.grad)
            by_kind.setdefault((grad.dtype, grad.device), []).append(grad)
    for grads in by_kind.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=group)
        parts = torch.split(flat, [grad.numel() for grad in grads])
        foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])
