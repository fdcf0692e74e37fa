# SPDX-License-Identifier: Apache-2.0
"""Gradients over all meshes: what must still be added up after the backward, their norm, and clipping."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isinf, prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.compat import foreach_mul_
from lightning_3d.mesh import ParallelMesh


@dataclass(frozen=True, kw_only=True)
class GradientLayout:
    """Which gradients of this rank are partial or duplicated beyond what their `DTensor` placements say."""

    mesh: ParallelMesh
    tp_partial: Callable[[], Sequence[nn.Parameter]] = tuple
    """Replicated over tp but used on split activations: each tp rank has a part of the sum. Asked after a forward."""
    pp_shared: Sequence[nn.Parameter] = ()
    """Held by every stage, used by some: each stage has a part of the sum."""
    pp_tied: Sequence[nn.Parameter] = ()
    """Held by the first and the last stage (tied embeddings): each has a part of the sum."""
    tied_group: dist.ProcessGroup | None = None
    """This replica's first and last stage."""
    loose: Sequence[nn.Parameter] = ()
    """Beside the modules that are sharded one by one (manual optimization): whole on every rank, reduced by nobody."""

    def complete(self) -> None:
        """Adds up the partial gradients, in place; collective, once per optimizer step.

        These sums commute with FSDP's average over replicas, so they run on the shards that it left.
        """
        device = self.mesh.device_mesh.device_type
        if self.mesh.tp_mesh is not None:
            _all_reduce_gradients(self.tp_partial(), self.mesh.group("tp"), device)
        if self.pp_shared:
            _all_reduce_gradients(self.pp_shared, self.mesh.group("pp"), device)
        if self.pp_tied and self.tied_group is not None:
            _all_reduce_gradients(self.pp_tied, self.tied_group, device)

    def average_loose(self) -> None:
        """Averages over replicas the gradients that no sharded module reduces, in place; collective over dp.

        A replica that did not use a parameter adds zero. To do it again is harmless: all replicas have the average.
        """
        if self.loose:
            _all_reduce_gradients(self.loose, self.mesh.dp_group, self.mesh.device_mesh.device_type)
            scale_gradients(self.loose, 1.0 / self.mesh.dp_size)

    def copies(self, parameter: nn.Parameter) -> int:
        """Number of ranks that hold each element of a parameter's gradient."""
        mesh = self.mesh
        sharded = prod(
            size
            for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True)
            if not placement.is_replicate()  # FSDP over tp gives strided shards, which are no `Shard`
        ) if isinstance(parameter, DTensor) else 1  # fmt: skip
        stages = 1
        if any(parameter is shared for shared in self.pp_shared):
            stages = mesh.pp_size
        elif any(parameter is tied for tied in self.pp_tied):
            stages = 2
        return stages * dist.get_world_size() // mesh.pp_size // sharded

    def norm(self, parameters: Iterable[nn.Parameter], norm_type: float = 2.0) -> Tensor:
        """Norm of the whole model's gradient; one collective over the world.

        Every rank adds its elements divided by the number of ranks that hold them, so that nothing is counted twice,
        however a parameter is sharded, replicated or tied.

        Args:
            parameters: this rank's parameters; those without gradient count as zero.
            norm_type: p of the p-norm; `inf` for the largest absolute value.

        Returns:
            A scalar in fp64, equal on all ranks.
        """
        by_copies: dict[int, list[Tensor]] = {}
        device = self.mesh.device_mesh.device_type
        for parameter in parameters:
            if parameter.grad is not None:
                by_copies.setdefault(self.copies(parameter), []).append(_widened(local_gradient(parameter)))
        # Always fp64: a rank without gradients does not know in which dtype the others add.
        total = torch.zeros((), dtype=torch.float64, device=device)
        for copies, gradients in by_copies.items():
            norm = torch.nn.utils.get_total_norm(gradients, norm_type).double().to(device)
            total = torch.maximum(total, norm) if isinf(norm_type) else total + norm**norm_type / copies
        dist.all_reduce(total, op=dist.ReduceOp.MAX if isinf(norm_type) else dist.ReduceOp.SUM)
        return total if isinf(norm_type) else total ** (1.0 / norm_type)

    def clip_by_norm(
        self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Scales the gradients so that the norm of the whole model's gradient is at most `max_norm`.

        Returns:
            The norm before clipping.
        """
        parameters = list(parameters)  # a generator would be used up by the norm and leave nothing to clip
        norm = self.norm(parameters, norm_type)
        scale_gradients(parameters, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm


def clip_by_value(parameters: Iterable[nn.Parameter], max_value: float) -> None:
    """Limits every element of the gradients to `[-max_value, max_value]`."""
    for parameter in parameters:
        if parameter.grad is not None:
            local_gradient(parameter).clamp_(-max_value, max_value)


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor | float) -> None:
    """Multiplies gradients in place."""
    by_device: dict[
        torch.device, list[Tensor]
    ] = {}  # offloaded gradients are on the host, loose ones are not
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local_gradient(parameter)
            by_device.setdefault(gradient.device, []).append(gradient)
    for device, gradients in by_device.items():
        foreach_mul_(gradients, factor.to(device) if isinstance(factor, Tensor) else factor)


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient, as a plain tensor that shares its memory."""
    gradient = parameter.grad
    if gradient is None:
        raise ValueError("The parameter has no gradient.")
    gradient = gradient.detach()
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _all_reduce_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, device: str) -> None:
    """Sums gradients over a group in one collective a dtype, on the device, wherever they are kept.

    A missing gradient counts as zero, unless all ranks miss it: then it stays missing, and an optimizer leaves a
    parameter that nobody used alone, weight decay included.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    missing: set[int] = set()
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            missing.add(id(parameter))
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter)
    for same in by_dtype.values():
        gradients = [local_gradient(parameter) for parameter in same]
        absent = [id(parameter) in missing for parameter in same]
        holders = gradients[0].new_tensor(
            [not each for each in absent]
        )  # beside the values: ranks that have one
        flat = torch.cat([holders, *(gradient.reshape(-1) for gradient in gradients)]).to(device)
        dist.all_reduce(flat, group=group)
        holders, *parts = torch.split(flat, [len(same), *(gradient.numel() for gradient in gradients)])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        for index in (index for index, is_absent in enumerate(absent) if is_absent):
            if holders[index] == 0:
                same[index].grad = None


def _widened(gradient: Tensor) -> Tensor:
    return gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient


class SharedGradScaler(torch.amp.GradScaler):
    """A gradient scaler whose ranks skip a step together: an overflow on one rank is known to all."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscales this rank's shards and shares whether any rank found a non-finite gradient; collective.

        A rank without gradients reports too. Optimizers that unscale by themselves (fused ones) pass here as well.
        """
        flag = found_inf.clone()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = local_gradient(parameter)
                    gradient.mul_(inv_scale.to(gradient))
                    overflows = (~torch.isfinite(gradient)).any().to(flag).reshape(flag.shape)
                    flag = torch.maximum(flag, overflows)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return {flag.device: flag}
