# SPDX-License-Identifier: Apache-2.0
"""How forwards that compute on shards get into the user's modules.

[Note: class swap]
A module becomes sharded by exchanging its class for a subclass `(Mixin, its class)`: names of parameters, `isinstance`,
hooks, `fully_shard` and `compile()` work as before, and the module's own forward is `super().forward`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_3d.errors import ModelError


class Mixin:
    """Base of what is mixed into modules, to tell our forwards from theirs."""


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward of the module's author, below everything mixed in."""
    for cls in type(module).__mro__:
        forward = vars(cls).get("forward")
        if forward is not None and not issubclass(cls, Mixin):
            return inspect.unwrap(forward)
    return module.forward


def source_of_forward(module: nn.Module) -> str:
    """Source text of a module's own forward; empty where it cannot be read."""
    try:
        return inspect.getsource(own_forward(module))
    except (OSError, TypeError):
        return ""


def first_argument(module: nn.Module) -> str:
    """Name of the first argument of a module's own forward."""
    names = [name for name in inspect.signature(own_forward(module)).parameters if name != "self"]
    return names[0] if names else ""


@functools.cache
def _mixed(mixin: Any, cls: Any) -> type[nn.Module]:
    return _derive(cls, (mixin, cls))


@functools.cache
def _mixed_below(mixin: Any, cls: Any, base: Any) -> type[nn.Module]:
    return _derive(cls, (cls, type(mixin.__name__, (mixin, base), {})))


def _derive(cls: Any, bases: tuple[type, ...]) -> type[nn.Module]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, bases, names)


def mix_in(module: nn.Module, mixin: type[Mixin]) -> None:
    """Exchanges a module's class for one with `mixin` in front."""
    front: Any = mixin
    cls: Any = type(module)
    module.__class__ = _mixed(front, cls)


def mix_in_layer(module: nn.Module, mixin: type[Mixin]) -> None:
    """Exchanges the class of a linear or embedding layer for one whose basic forward is the mixin's.

    A subclass with a forward of its own keeps it (a scaled embedding, say): the mixin takes the place of torch's layer
    below it. A layer that is none of torch's (one with a transposed weight) is replaced as a whole.
    """
    layer: Any = mixin
    cls: Any = type(module)
    base: Any = _torch_layer(module)
    if base is None or cls.forward is base.forward:
        module.__class__ = _mixed(layer, cls)
    else:
        module.__class__ = _mixed_below(layer, cls, base)


def _torch_layer(module: nn.Module) -> type[nn.Module] | None:
    return next((base for base in (nn.Linear, nn.Embedding) if isinstance(module, base)), None)


def check_layer(module: nn.Module, name: str, *, transposed: bool) -> None:
    """Raises unless `mix_in_layer` can shard a layer.

    Raises:
        ModelError: the layer is of a foreign class, whose forward may do anything.
    """
    check_forward(module, name)
    if _torch_layer(module) is None and not transposed:
        raise ModelError(
            f"{name} is a {type(module).__name__}, which is neither an nn.Linear nor an nn.Embedding, so what its"
            " forward does cannot be sharded. Give it and its partners the tp style 'replicate'."
        )


def check_forward(module: nn.Module, name: str) -> None:
    """Raises if a mixin would be bypassed.

    Raises:
        ModelError: the module's forward was replaced on the instance.
    """
    if "forward" in vars(module):
        raise ModelError(
            f"{name}.forward was replaced on the instance, so tensor parallelism cannot follow it. Undo this, or"
            " override forward in a subclass."
        )
