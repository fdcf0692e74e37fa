# SPDX-License-Identifier: Apache-2.0
"""`VocabParallelLogits`: logits that look whole and are sharded over the vocabulary for as long as nobody minds.

The user's code gets a tensor of the full shape [..., V]. The way to `F.cross_entropy` and the loss itself work on this
rank's classes (see `logit_functions`); any other operation gathers the full logits first and gives a plain tensor. The
gather's backward keeps this rank's classes, because whatever follows it is computed, and differentiated, on every rank
alike. For the same reason it must not be done on one rank alone (`if rank == 0: logits.argmax()`), except to print.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.compat import tree_map
from lightning_3d.errors import StepError
from lightning_3d.parallel.tensor.logit_functions import FUNCTIONS, Keep, is_metadata, writes_in_place
from lightning_3d.parallel.tensor.vocab_shard import VocabShard


class VocabParallelLogits(Tensor):
    """Logits [..., V] of which this rank holds [..., V/tp]."""

    _local: Tensor
    _shard: VocabShard
    _full: Tensor | None
    """The full logits, once something has written into them."""
    _derived: bool
    """Whether these are a view of other logits."""

    @staticmethod
    def wrap(local: Tensor, shard: VocabShard, *, derived: bool = False) -> Tensor:
        """Local logits [..., V/tp] -> logits of shape [..., V]; inside `torch.compile` they are gathered at once."""
        if torch.compiler.is_compiling():
            return gather_classes(local, shard)
        logits: VocabParallelLogits
        if local.requires_grad and torch.is_grad_enabled():
            logits = _Wrap.apply(local, shard)  # type: ignore[no-untyped-call]
        else:
            logits = _wrapper(local, shard)
        logits._local, logits._derived = (
            local,
            derived,
        )  # with its history, which it does not have inside `_Wrap`
        return logits

    @property
    def local_logits(self) -> Tensor:
        """This rank's classes [..., V/tp]."""
        return self._local

    def full_logits(self) -> Tensor:
        """All classes [..., V] as a plain tensor, differentiable; collective over the tp group."""
        return gather_classes(self._local, self._shard) if self._full is None else self._full

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Keeps the shard where the function allows it, else gathers."""
        options = dict(kwargs or {})
        if is_metadata(func):
            return super().__torch_function__(func, types, args, options)  # type: ignore[no-untyped-call]
        if not args and "input" in options:
            args = (options.pop("input"),)
        first = args[0] if args else None
        if isinstance(first, VocabParallelLogits):
            if writes_in_place(func, options):
                return _write(first, func, args, options)
            if func in FUNCTIONS and first._full is None:
                result = first._try_local(func, args[1:], options)
                if result is not NotImplemented:
                    return result
        return func(*tree_map(_gathered, args), **tree_map(_gathered, options))

    def _try_local(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function on the local logits, or NotImplemented."""
        keep, function = FUNCTIONS[func]
        result = function(self._local, self._shard, *tree_map(_local, args), **tree_map(_local, kwargs))
        if result is NotImplemented or keep is Keep.NOTHING:
            return result
        derived = keep is Keep.VIEW
        if isinstance(result, Tensor):
            return VocabParallelLogits.wrap(result, self._shard, derived=derived)
        return type(result)(VocabParallelLogits.wrap(part, self._shard, derived=derived) for part in result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a stub
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What gets here went past the Python functions, its autograd is done: work on the full logits."""
        if func is torch.ops.aten.detach.default:
            return _wrapper(args[0]._local, args[0]._shard)
        return func(*tree_map(_gathered, args), **tree_map(_gathered, dict(kwargs or {})))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Without the other ranks' values: printing on one rank alone must not wait for the others."""
        if self._full is not None:
            return repr(self._full)
        start, stop = self._shard.bounds
        return (
            f"VocabParallelLogits(shape={tuple(self.shape)}, dtype={self.dtype},"
            f" classes {start}:{stop} on this rank: {self._local!r})"
        )

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.full_logits().detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full_logits().detach().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _wrapper(local: Tensor, shard: VocabShard) -> VocabParallelLogits:
    logits: VocabParallelLogits = Tensor._make_wrapper_subclass(
        VocabParallelLogits,
        (*local.shape[:-1], shard.size),
        dtype=local.dtype,
        device=local.device,
        requires_grad=False,
    )
    logits._local, logits._shard, logits._full, logits._derived = local.detach(), shard, None, False
    return logits


class _Wrap(torch.autograd.Function):
    """Gives the wrapper a place in the graph, for what takes it below the Python functions (custom Functions)."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, shard: VocabShard) -> VocabParallelLogits:
        ctx.shard = shard
        return _wrapper(local, shard)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if isinstance(grad, VocabParallelLogits):
            return grad.local_logits, None
        start, stop = ctx.shard.bounds
        return grad[..., start:stop], None


class _GatherClasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, shard: VocabShard) -> Tensor:
        ctx.shard = shard
        size, part = shard.group.size(), shard.part
        padded = F.pad(local, (0, part - local.shape[-1])) if local.shape[-1] < part else local
        rows = padded.reshape(-1, part)
        gathered = rows.new_empty((size * rows.shape[0], part))
        dist.all_gather_into_tensor(gathered, rows.contiguous(), group=shard.group)
        by_token = gathered.view(size, -1, part).transpose(0, 1)
        full = local.new_empty((*local.shape[:-1], shard.size))  # no view: it may be written into
        if size * part == shard.size:
            full.view(-1, size, part).copy_(by_token)
        else:
            full.view(-1, shard.size).copy_(by_token.reshape(-1, size * part)[:, : shard.size])
        return full

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        start, stop = ctx.shard.bounds
        return grad[..., start:stop], None


def gather_classes(local: Tensor, shard: VocabShard) -> Tensor:
    """Local logits [..., V/tp] -> [..., V]; the gradient is this rank's part of a replicated gradient."""
    return _GatherClasses.apply(local, shard)  # type: ignore[no-untyped-call]


def _gathered(value: Any) -> Any:
    return value.full_logits() if isinstance(value, VocabParallelLogits) else value


def _local(value: Any) -> Any:
    return value.local_logits if isinstance(value, VocabParallelLogits) else value


def _write(logits: VocabParallelLogits, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """An operation in place: the logits become whole, and stay so."""
    if logits._derived:
        raise StepError(
            f"{getattr(func, '__name__', func)} writes into a slice or view of logits that are sharded over the"
            " tp ranks; the logits it was taken from would not change. Write it out of place, or write into the"
            " logits themselves."
        )
    full = logits.full_logits()
    result = func(full, *tree_map(_gathered, args[1:]), **tree_map(_gathered, dict(kwargs)))
    logits._full = full
    return logits if result is full else result
