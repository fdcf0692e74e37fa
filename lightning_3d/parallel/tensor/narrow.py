# SPDX-License-Identifier: Apache-2.0
"""Inputs of attention modules whose code takes the width of their heads from the shape of the input.

[Note: the width of the input]
Much attention code begins with `B, T, C = x.shape` and later views q, k, v and the output as `(B, T, C)` or
`(B, T, n_head, C // n_head)`. There C means the features of all heads, of which a rank has a part, while the input
itself stays whole. Such modules get a `NarrowInput`: asked for its shape it answers with this rank's part of the
width, and in every operation it is the whole tensor.
"""

import ast
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.compat import tree_map
from lightning_3d.parallel.tensor.logit_functions import is_metadata
from lightning_3d.parallel.tensor.mixing import source_of_forward


class NarrowInput(Tensor):
    """A tensor [B, S, D] that says it is [B, S, D/tp]."""

    _whole: Tensor

    @staticmethod
    def of(whole: Tensor, size: int) -> Tensor:
        """The whole tensor with a `size`-th of its width."""
        if torch.compiler.is_compiling():
            return whole
        narrow: NarrowInput = Tensor._make_wrapper_subclass(
            NarrowInput, (*whole.shape[:-1], whole.shape[-1] // size), dtype=whole.dtype, device=whole.device
        )
        narrow._whole = whole
        return narrow

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Shapes are narrow, values are whole."""
        options = dict(kwargs or {})
        if is_metadata(func) and getattr(getattr(func, "__self__", None), "__name__", "") != "requires_grad":
            return super().__torch_function__(func, types, args, options)  # type: ignore[no-untyped-call]
        return func(*tree_map(_whole_of, args), **tree_map(_whole_of, options))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a stub
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What gets here went past the Python functions."""
        return func(*tree_map(_whole_of, args), **tree_map(_whole_of, dict(kwargs or {})))


def _whole_of(value: Any) -> Any:
    return value._whole if isinstance(value, NarrowInput) else value


def reads_width(module: nn.Module, argument: str) -> bool:
    """Whether a module's forward takes the width from the shape of its input.

    Args:
        module: an attention module.
        argument: name of the forward's first argument.

    Returns:
        True for `B, T, C = x.shape` (or `x.size()`) with C used, and for `x.shape[-1]`, `x.size(2)` and the like;
        False also where the source cannot be read.
    """
    try:
        tree = ast.parse(textwrap.dedent(source_of_forward(module)))
    except SyntaxError:  # a lambda in the middle of a statement, say
        return False
    used = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    return any(_is_width(node, argument, used) for node in ast.walk(tree))


def _is_width(node: ast.AST, argument: str, used: set[str]) -> bool:
    if isinstance(node, ast.Assign) and _is_shape(node.value, argument):
        target = node.targets[0]
        last = target.elts[-1] if isinstance(target, ast.Tuple) else None
        return isinstance(last, ast.Name) and last.id in used and last.id != "_"
    if isinstance(node, ast.Subscript) and _is_shape(node.value, argument):
        return _constant(node.slice) in (-1, 2)
    if isinstance(node, ast.Call) and _is_method(node, argument, "size") and node.args:
        return _constant(node.args[0]) in (-1, 2)
    return False


def _is_shape(node: ast.AST, argument: str) -> bool:
    if isinstance(node, ast.Attribute) and node.attr == "shape":
        return isinstance(node.value, ast.Name) and node.value.id == argument
    return isinstance(node, ast.Call) and _is_method(node, argument, "size") and not node.args


def _is_method(node: ast.Call, argument: str, name: str) -> bool:
    function = node.func
    return (
        isinstance(function, ast.Attribute)
        and function.attr == name
        and isinstance(function.value, ast.Name)
        and function.value.id == argument
    )


def _constant(node: ast.AST) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
