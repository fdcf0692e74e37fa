# SPDX-License-Identifier: Apache-2.0
"""The data axis: FSDP2 over each block and over a root that holds the rest."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from lightning_3d.compat import fsdp_follow_requires_grad
from lightning_3d.parallel.gate import hidden_of, with_hidden

MIXED_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Dtype in which blocks are gathered and computed, by the Trainer's precision."""


class StepRoot(nn.Module):
    """The root of sharding: holds the LightningModule and runs its steps.

    Parameters outside the blocks are gathered when the root is called and are whole during the step, wherever the
    user's code reads them. The LightningModule itself stays as it is.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a step with the parameters it may read."""
        return step(*args, **kwargs)


def apply_fsdp(
    root: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    precision: str = "32-true",
    reshard_after_forward: bool = True,
    offload: bool = False,
) -> None:
    """Shards a model's parameters over the data axis, block by block, then the rest under the root; in place.

    Gradients are averaged over the mesh in fp32 whatever the dtype of computation.

    Args:
        root: module that owns everything, usually a `StepRoot`.
        blocks: modules to gather and free one at a time; those without parameters here are passed over.
        mesh: (dp_shard), or (dp_replicate, dp_shard) for HYBRID_SHARD.
        precision: the Trainer's precision; mixed ones gather and compute in 16 bits.
        reshard_after_forward: free the gathered blocks after their forward (FULL_SHARD) or after their backward.
        offload: keep shards, their gradients and so the optimizer's state in the host's memory. A mesh of one rank
            will do: what is gathered then is a copy on the device.
    """
    dtype = MIXED_DTYPES.get(precision)
    # Nothing is cast that a module is called with, but the hidden state: the root is called with the user's batch, and
    # angles, positions or masks beside the hidden state are in fp32 for a reason.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None, cast_forward_inputs=False
    )
    # Pinned memory is for copies to an accelerator; without one, torch cannot even allocate it.
    place = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    for parameter in root.parameters():
        if not parameter.is_contiguous():  # FSDP2 shards rows, and refuses other orders in memory
            parameter.data = parameter.data.contiguous()
    for block in _separable(root, blocks):
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            offload_policy=place,
        )
        block.register_forward_pre_hook(_follow_freezing)
        if dtype is not None:
            block.register_forward_pre_hook(_cast_hidden_state(dtype), with_kwargs=True)
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False, offload_policy=place)
    root.register_forward_pre_hook(_follow_freezing)


def _follow_freezing(module: nn.Module, args: Any) -> None:
    """Lets gathered parameters require a gradient as the sharded ones do now: FSDP2 asks only once.

    Without it, layers that are thawed during training would not train, and `toggle_optimizer` would do nothing.
    """
    fsdp_follow_requires_grad(module)


def _separable(root: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Blocks with parameters that nothing else uses; a weight that two modules share belongs to the root's group."""
    distinct = list({id(block): block for block in blocks}.values())
    owner_of = {id(module): index for index, block in enumerate(distinct) for module in block.modules()}
    owners: dict[int, set[int]] = {}
    for module in root.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(owner_of.get(id(module), -1))
    return [
        block
        for block in distinct
        if (held := list(block.parameters())) and all(len(owners[id(parameter)]) == 1 for parameter in held)
    ]


def _cast_hidden_state(dtype: torch.dtype) -> Callable[..., tuple[Any, Any]]:
    def cast(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        has_hidden = any(
            isinstance(value, Tensor) and value.is_floating_point() for value in (*args, *kwargs.values())
        )
        return with_hidden(args, kwargs, hidden_of(args, kwargs).to(dtype)) if has_hidden else (args, kwargs)

    return cast


def callable_parts(module: nn.Module) -> list[nn.Module]:
    """The outermost modules inside `module` with parameters that are called; a list of modules is not, they are."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += callable_parts(child)
        elif next(child.parameters(), None) is not None and type(child).forward is not nn.Module.forward:
            found.append(child)
    return [
        part
        for part in found
        if not any(part is m for other in found if other is not part for m in other.modules())
    ]


def set_gradient_sync(root: nn.Module, enabled: bool) -> None:
    """Turns the reduction of gradients on or off for the next backwards (off: they are accumulated whole)."""
    if isinstance(root, FSDPModule):
        root.set_requires_gradient_sync(enabled)
        root.set_is_last_backward(enabled)


def reshard(root: nn.Module) -> None:
    """Frees every gathered parameter, so that the next forward gathers fresh ones.

    Needed after an evaluation: with `reshard_after_forward=False` a gathered copy would survive the optimizer step.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
