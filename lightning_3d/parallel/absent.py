# SPDX-License-Identifier: Apache-2.0
"""What another stage has: a tensor that has a shape, and that nobody may compute with."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_3d.errors import StepError

_HARMLESS = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf")
    ),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "detach", "is_floating_point", "__repr__")),
}


class AbsentTensor(Tensor):
    """Has a shape, can be kept in lists, and refuses to be computed with.

    Blocks of other stages do not run here. Zeros in place of a part of the loss that they return (a router's, say)
    would train a model without it, and nobody would notice. The same holds for a parameter of another stage, of which
    models may ask the dtype.
    """

    reason = (
        "The step computes with what a block returned beside its hidden state, but only the hidden state crosses"
        " pipeline stages. Make it part of the hidden state, leave it out of the loss, or use pp=1."
    )
    """What the error says."""

    @staticmethod
    def of(tensor: Tensor) -> "AbsentTensor":
        """A tensor of the same shape that stands for one on another stage."""
        return tensor.detach().as_subclass(AbsentTensor)

    @staticmethod
    def of_parameter(parameter: Tensor, module_name: str) -> "AbsentTensor":
        """Stands for a parameter that another stage holds; has its shape and dtype, and no memory."""
        absent = AbsentTensor.of(parameter.detach().to("meta"))
        absent.reason = (
            f"A step computes with a parameter of module {module_name!r}, which another pipeline stage holds. To use it"
            f" on several stages, name the module in the strategy's first_stage_modules=({module_name!r},) and in"
            " last_stage_modules too."
        )
        return absent

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Lets shapes be read; everything else is an error."""
        if func in _HARMLESS:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise StepError(
            next((arg.reason for arg in args if isinstance(arg, AbsentTensor)), AbsentTensor.reason)
        )
