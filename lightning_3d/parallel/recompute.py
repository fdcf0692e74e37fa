# SPDX-License-Identifier: Apache-2.0
"""Activation recomputation, block by block: what the backward computes again instead of having kept it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from lightning_3d.levers import RecomputeChoice, num_recomputed, spread_evenly

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
_ATTENTIONS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)

Call = Callable[..., Any]


Solver = Callable[[int], int]
"""Tokens of a microbatch -> how many blocks of this rank must be recomputed."""


class Recompute:
    """Calls blocks so that their activations are (partly) dropped after the forward."""

    def __init__(
        self,
        choice: RecomputeChoice,
        stages: Sequence[Sequence[int]],
        *,
        stop_early: bool,
        solve: Solver | None = None,
    ) -> None:
        """Chooses the blocks and the contexts of both forwards.

        Args:
            choice: what to keep, and of how many blocks.
            stages: blocks of each stage of this rank.
            stop_early: end a block's second forward where the backward has all it needs. Not where a block has
                collectives or random regions that must be left in order.
            solve: for a choice with a budget, where the number of blocks depends on the batch.
        """
        self._options: dict[str, Any] = {"use_reentrant": False}
        if choice.mode == "selective":
            self._options["context_fn"] = _selective_contexts
        self._stop_early = stop_early
        self._solve = solve
        self._all = [block for stage in stages for block in stage]
        self._solved: dict[int, frozenset[int]] = {}
        self._share = frozenset(
            block
            for stage in stages
            for block in spread_evenly(stage, num_recomputed(len(stage), choice.fraction))
        )

    def applies_to(self, index: int, hidden: Callable[[], Tensor]) -> bool:
        """Whether a block is recomputed.

        Args:
            index: number of the block in the model.
            hidden: gives its hidden state [..., D], on whose size a budget depends.
        """
        if not torch.is_grad_enabled():
            return False
        if self._solve is None:
            return index in self._share
        state = hidden()
        num_tokens = state.numel() // state.shape[-1]
        if num_tokens not in self._solved:
            self._solved[num_tokens] = spread_evenly(self._all, self._solve(num_tokens))
        return index in self._solved[num_tokens]

    def call(self, block: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a block; its random numbers are the same in both forwards."""
        with self._early_stop():
            return checkpoint(block, *args, **self._options, **kwargs)

    def _early_stop(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stop_early else set_checkpoint_early_stop(False)


def checkpointed(function: Call) -> Call:
    """A function whose backward recomputes all but attention and half of the matrix products; may be compiled."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False, context_fn=_selective_contexts, **kwargs)

    return call


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return create_selective_checkpoint_contexts(partial(_keep_half_of_products, [0, 0]))  # type: ignore[no-untyped-call]


def _keep_half_of_products(
    counts: list[int], context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Keeps attention and every second matrix product.

    Args:
        counts: products seen in the first and in the second forward of this block.
        context: says which of the two runs.
        operator: the operator about to run.
        *args: its arguments.
        **kwargs: its keyword arguments.
    """
    name = operator.__name__.partition(".")[0] if hasattr(operator, "__name__") else str(operator)
    if name in _ATTENTIONS:
        return CheckpointPolicy.MUST_SAVE
    if name in _PRODUCTS:
        counts[context.is_recompute] += 1
        if counts[context.is_recompute] % 2:
            return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
