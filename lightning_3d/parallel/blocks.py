# SPDX-License-Identifier: Apache-2.0
"""Finding a model's blocks: the list of repeated layers that every axis works along."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from lightning_3d.errors import ModelError


@dataclass(frozen=True)
class Blocks:
    """The repeated layers of a model, in order."""

    name: str
    """Name of the list inside the LightningModule, e.g. `model.layers`."""
    modules: tuple[nn.Module, ...]

    def __len__(self) -> int:
        return len(self.modules)

    def names(self) -> list[str]:
        """Fully qualified names of the blocks."""
        return [f"{self.name}.{index}" for index in range(len(self))]


def find_blocks(module: nn.Module, name: str | None = None) -> Blocks | None:
    """Finds the blocks: the named list, or else the longest list of modules that hold parameters.

    A `ModuleList` is preferred over a `Sequential`, and the outer of two lists of one length over the inner.

    Args:
        module: the LightningModule.
        name: fully qualified name of a `ModuleList` or `Sequential`, when the choice shall not be left to length.

    Returns:
        The blocks, or None if the model has no list of two or more parameterised modules.

    Raises:
        ModelError: `name` is no such list.
    """
    candidates = dict(_lists(module))
    if name is not None:
        if name not in candidates:
            known = ", ".join(candidates) or "none"
            raise ModelError(
                f"blocks={name!r} is not a ModuleList or Sequential with parameters in {type(module).__name__}."
                f" Lists found: {known}."
            )
        return Blocks(name, tuple(candidates[name]))
    for kind in (nn.ModuleList, nn.Sequential):
        fitting = {
            key: found for key, found in candidates.items() if isinstance(found, kind) and len(found) > 1
        }
        if fitting:
            longest = max(fitting, key=lambda key: len(fitting[key]))
            return Blocks(longest, tuple(fitting[longest]))
    return None


def make_distinct(module: nn.Module, blocks: Blocks) -> Blocks:
    """Gives a stateless module that stands in several places (one activation for all layers) a copy for each, in place.

    Calls of one module in two places could not be told apart.

    Raises:
        ModelError: the repeated module has parameters.
    """
    container = module.get_submodule(blocks.name)
    seen: set[int] = set()
    distinct = []
    for index, block in enumerate(blocks.modules):
        if id(block) in seen:
            if _has_parameters(block):
                raise ModelError(
                    f"{blocks.name!r} holds the same module more than once (again at {index}), so pipeline stages and"
                    " tensor parallelism cannot tell its calls apart. Use data parallelism, or a module for each layer."
                )
            block = copy.deepcopy(block)
            setattr(container, str(index), block)
        seen.add(id(block))
        distinct.append(block)
    return Blocks(blocks.name, tuple(distinct))


def _lists(module: nn.Module) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    for name, child in module.named_modules():
        if (
            name
            and isinstance(child, nn.ModuleList | nn.Sequential)
            and any(_has_parameters(m) for m in child)
        ):
            yield name, child


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
