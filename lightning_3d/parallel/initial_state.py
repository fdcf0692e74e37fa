# SPDX-License-Identifier: Apache-2.0
"""One initial state for all ranks: values that agree, and modules that were made on the meta device."""

import hashlib
import zlib
from collections.abc import Iterable
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.boxes import local_part
from lightning_3d.errors import ModelError
from lightning_3d.parallel.agreement import by_value, say_ranks


def is_on_meta(module: nn.Module) -> bool:
    """Whether any parameter has no memory yet."""
    return any(parameter.is_meta for parameter in module.parameters())


def check_same_model(module: nn.Module) -> None:
    """Checks that all ranks have made the same model, values aside; collective over the world.

    Args:
        module: before anything is made of it.

    Raises:
        ModelError: on every rank, with the first parameter or buffer that is another on some rank.
    """
    mine = _outline(module)
    # Digests first: a list of all tensors of every rank would be large.
    if len(by_value(hashlib.sha256("\n".join(mine).encode()).digest())) == 1:
        return
    outlines = by_value(mine)
    first, other = list(outlines)[:2]
    here, there = next((a, b) for a, b in zip_longest(first, other, fillvalue="nothing") if a != b)
    raise ModelError(
        f"Ranks have made different models: {here} on {say_ranks(outlines[first])}, but {there} on"
        f" {say_ranks(outlines[other])}. Make the model alike on all. For large weights, make it on the meta device on"
        " all (configure_model, or trainer.init_module(empty_init=True)) and load them with ckpt_path, of which each"
        " rank reads its part."
    )


def _outline(module: nn.Module) -> tuple[str, ...]:
    """What must be the same on all ranks, a line for each parameter and buffer."""
    return tuple(
        f"{name} {list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
        f"{'' if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ', frozen,'}"
        f" {'on the meta device' if tensor.is_meta else 'with values'}"
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    )


def broadcast_state(module: nn.Module, device: torch.device) -> None:
    """Gives every rank the parameters and buffers of rank 0; collective over the world.

    Ranks that seeded differently would otherwise hold different copies of what is replicated, and nobody would notice.

    Args:
        module: a module with its whole state on every rank, before it is cut and sharded.
        device: where collectives run.
    """
    with torch.no_grad():
        for tensor in _unique(module):
            if tensor.is_meta or not tensor.numel():
                continue
            # A backend reads and writes storage from front to back: it needs memory of its own in that order. Bytes,
            # because not every backend knows every dtype.
            value = tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)
            dist.broadcast(value.reshape(-1).view(torch.uint8), src=0)
            if 0 in tensor.stride():  # expanded: several elements in one place cannot be written to
                tensor.data = value.to(tensor.device)
            else:
                tensor.copy_(value)


def move_unsharded(module: nn.Module, device: torch.device) -> None:
    """Moves parameters and buffers to a device, in place; shards stay on the host, where offload keeps them."""
    with torch.no_grad():
        for tensor in _unique(module):
            if not (isinstance(tensor, DTensor) or tensor.is_meta):
                tensor.data = tensor.data.to(device)


def check_meta(module: nn.Module) -> None:
    """Checks that a module on the meta device can be given values.

    Raises:
        ModelError: a module cannot initialise its parameters, or a buffer would be lost.
    """
    for name, child in module.named_modules():
        own = [key for key, parameter in child.named_parameters(recurse=False) if parameter.is_meta]
        if own and not callable(getattr(child, "reset_parameters", None)):
            raise ModelError(
                f"{name or type(child).__name__} was made on the meta device and has parameters {own}, but no"
                " reset_parameters() to give them values. Define it, or create the model outside init_module()."
            )
        lost = [key for key, buffer in child.named_buffers(recurse=False) if buffer.is_meta]
        if lost and not callable(getattr(child, "reset_parameters", None)):
            raise ModelError(
                f"Buffer {lost[0]!r} of {name or type(child).__name__} was made on the meta device and has no values."
                " Compute it in reset_parameters(), or create the model outside init_module()."
            )


def materialize(root: nn.Module, device: torch.device, seed: int) -> None:
    """Gives memory and values to modules on the meta device, one module at a time, sharded or not.

    A module's values depend on the seed and its name only, so they are the same in every layout.

    Args:
        root: a module that may be cut, tensor-parallel and sharded.
        device: where its parameters shall live.
        seed: equal on all ranks.
    """
    made: dict[
        int, nn.Parameter
    ] = {}  # by the identity of the meta parameter: modules that share one keep sharing
    replaced: list[nn.Parameter] = []  # alive until the end, so that an identity means one object
    for name, module in root.named_modules():
        before = dict(module.named_parameters(recurse=False))
        if any(tensor.is_meta for tensor in (*before.values(), *module.buffers(recurse=False))):
            if any(id(tensor) not in made for tensor in (*before.values(), *module.buffers(recurse=False))):
                _materialize_one(module, name, device, seed)
            for key, parameter in before.items():
                replaced.append(parameter)
                if id(parameter) in made:
                    setattr(module, key, made[id(parameter)])
                else:
                    made[id(parameter)] = module.get_parameter(key)


def _materialize_one(module: nn.Module, name: str, device: torch.device, seed: int) -> None:
    whole = _whole_copy(module, device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed ^ zlib.crc32(name.encode()))
        whole.reset_parameters()  # type: ignore[operator]
    values = _own_tensors(whole)
    kept = {key: tensor.clone() for key, tensor in _own_tensors(module).items() if not tensor.is_meta}
    module.to_empty(device=device, recurse=False)
    with torch.no_grad():
        for key, tensor in _own_tensors(module).items():
            if key in kept:
                tensor.copy_(kept[key])
            elif isinstance(tensor, DTensor):
                tensor.to_local().copy_(local_part(values[key], tensor))
            else:
                tensor.copy_(values[key])


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))


def _whole_copy(module: nn.Module, device: torch.device) -> nn.Module:
    """One module alone, with unsharded parameters that have memory and no values."""
    alone: nn.Module = object.__new__(
        type(module)
    )  # FSDP2's classes cannot be copied, and nothing else needs to be
    alone.__dict__.update(module.__dict__)
    alone.__dict__["_parameters"] = {
        key: None if old is None else nn.Parameter(torch.empty(old.shape, dtype=old.dtype, device=device))
        for key, old in module._parameters.items()
    }
    alone.__dict__["_buffers"] = {
        key: None if old is None else torch.empty_like(old, device=device)
        for key, old in module._buffers.items()
    }
    alone.__dict__["_modules"] = dict.fromkeys(module._modules)
    return alone


def _unique(module: nn.Module) -> Iterable[Tensor]:
    seen: set[int] = set()
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor
