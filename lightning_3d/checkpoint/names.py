# SPDX-License-Identifier: Apache-2.0
"""Names that do not depend on how a model is wrapped or laid out."""

from collections.abc import Mapping

import torch
from torch import nn

from lightning_3d.errors import CheckpointError

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Attributes by which torch's wrappers hold the module that they wrap (compile, checkpointing, FSDP1)."""


def canonical(name: str) -> str:
    """A state dict key without the traces of wrappers."""
    if not any(wrapper in name for wrapper in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def live_tensors(model: nn.Module) -> dict[int, list[str]]:
    """Canonical names of every parameter and buffer by the tensor's id; a tied one has several, in model order."""
    names: dict[int, list[str]] = {}
    for entries in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in entries:
            known = names.setdefault(id(tensor), [])
            if canonical(name) not in known:
                known.append(canonical(name))
    return names


def parameter_names(model: nn.Module, aliases: Mapping[str, str]) -> dict[int, str]:
    """The one name under which each parameter is stored, by the parameter's id.

    Args:
        model: the module, or one stage of it.
        aliases: a name to the name of the tensor that it is tied to, where the two live on different ranks.

    Raises:
        CheckpointError: two parameters have the same name.
    """
    names = live_tensors(model)
    result: dict[int, str] = {}
    taken: dict[str, torch.Tensor] = {}
    for parameter in model.parameters():
        name = names[id(parameter)][0]
        name = aliases.get(name, name)
        if name in taken:
            raise CheckpointError(
                f"Two parameters are called {name} without their wrappers. Rename one of them."
            )
        taken[name] = parameter
        result[id(parameter)] = name
    return result
