# SPDX-License-Identifier: Apache-2.0
"""Averages of weights (EMA, SWA) of a model of which every rank holds a part.

Averaging treats each element by itself, so a rank averages the elements that it holds and nothing travels. What needs
whole weights (an `avg_fn` that takes norms) is found by trying it on a tensor and on its halves.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from lightning_3d.errors import SupportError


class LocalParts(nn.Module):
    """A rank's parts of a module's parameters and buffers as plain tensors in their order, sharing their memory.

    FSDP must hold its shards at the time, not gathered parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        with torch.no_grad():
            parts = [_local(parameter) for parameter in module.parameters()]
            self.weights = nn.ParameterList(nn.Parameter(part, requires_grad=False) for part in parts)
            for number, buffer in enumerate(module.buffers()):
                self.register_buffer(f"buffer{number}", _local(buffer))


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class ShardAverage(AveragedModel):
    """torch's `AveragedModel` over the parts of the weights that this rank holds."""

    def __init__(self, module: nn.Module, prepare: Callable[[], None], **options: Any) -> None:
        """Begins with the weights as they are.

        Args:
            module: the sharded module.
            prepare: called before weights are read or written: frees gathered parameters, and waits for a checkpoint
                that is still copying them.
            options: of `AveragedModel`.

        Raises:
            SupportError: the averaging function does not treat each element by itself.
        """
        check_elementwise(options.get("avg_fn"), options.get("multi_avg_fn"))
        prepare()
        super().__init__(LocalParts(module), **options)
        self.prepare = prepare

    def update_parameters(self, model: nn.Module) -> None:
        """Takes the weights of the sharded module into the average."""
        self.prepare()
        super().update_parameters(LocalParts(model))

    def named(self, module: nn.Module) -> dict[str, Tensor]:
        """The average under all names of the sharded module, laid out as its own tensors are; shares the memory."""
        own = chain(module.parameters(), module.buffers())
        averages = chain(self.module.parameters(), self.module.buffers())
        by_id = {id(mine): _laid_out(average, mine) for mine, average in zip(own, averages, strict=True)}
        return {name: by_id[id(tensor)] for name, tensor in named_tensors(module).items()}


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all their names: a tied one has several."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _laid_out(part: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return part.detach()
    return DTensor.from_local(
        part.detach(),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def check_elementwise(avg_fn: Callable[..., Any] | None, multi_avg_fn: Callable[..., Any] | None) -> None:
    """Tries an averaging function on two tensors and on their halves.

    Raises:
        SupportError: the halves come out differently, so that it cannot be applied to shards.
    """
    generator = torch.Generator().manual_seed(0)
    average, current = (torch.rand(2, 4, 6, generator=generator) for _ in range(2))

    def averaged(averages: list[Tensor], currents: list[Tensor]) -> list[Tensor]:
        averages = [part.clone() for part in averages]
        count = torch.tensor(3)
        if multi_avg_fn is not None:
            multi_avg_fn(averages, currents, count)
            return averages
        assert avg_fn is not None
        return [avg_fn(mine, other, count) for mine, other in zip(averages, currents, strict=True)]

    function = multi_avg_fn or avg_fn
    if function is None:
        return
    whole = averaged(list(average), list(current))
    halves = [averaged(list(average[:, rows]), list(current[:, rows])) for rows in (slice(2), slice(2, 4))]
    if not all(torch.equal(mine, torch.cat(parts)) for mine, *parts in zip(whole, *halves, strict=True)):
        raise SupportError(
            f"The averaging function {getattr(function, '__name__', function)} computes with a whole weight, of which a"
            " rank holds a part. Use one that treats each element by itself, as torch's get_ema_avg_fn() does."
        )
