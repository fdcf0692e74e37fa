# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of logits whose classes are sharded over the tp ranks.

The softmax needs three numbers of the other ranks for each token: the maximum, the sum of exponentials and the logit
of the target (Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3). The last two travel together.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.parallel.tensor.vocab_shard import VocabShard


class _TokenLosses(torch.autograd.Function):
    """Local logits [N, V/tp] in float32 or float64, targets [N] -> loss of each token [N], 0 where ignored."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, shard: VocabShard, ignore_index: int, smoothing: float
    ) -> Tensor:
        start, stop = shard.bounds
        ignored = target == ignore_index
        own = (target >= start) & (target < stop) & ~ignored
        index = (target - start).masked_fill(~own, 0).unsqueeze(-1)
        maximum = logits.amax(-1)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=shard.group)
        shifted = logits - maximum.unsqueeze(-1)
        sums = [shifted.exp().sum(-1), shifted.gather(-1, index).squeeze(-1).masked_fill(~own, 0.0)]
        if smoothing:
            sums.append(shifted.sum(-1))
        summed = torch.stack(sums)
        dist.all_reduce(summed, group=shard.group)
        log_sum = summed[0].log()
        losses = (1 - smoothing) * (log_sum - summed[1])
        if smoothing:
            losses = losses + smoothing * (log_sum - summed[2] / shard.size)
        ctx.save_for_backward(logits, maximum + log_sum, index, own, ignored)
        ctx.smoothing, ctx.size = smoothing, shard.size
        wrong = (target < 0) | (
            target >= shard.size
        )  # devices other than the CPU get no error for it, but no loss
        return losses.masked_fill(wrong, torch.nan).masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, normaliser, index, own, ignored = ctx.saved_tensors
        result = (logits - normaliser.unsqueeze(-1)).exp_()
        if ctx.smoothing:
            result.sub_(ctx.smoothing / ctx.size)
        result.scatter_add_(-1, index, own.to(result.dtype).mul_(ctx.smoothing - 1).unsqueeze(-1))
        result.mul_(grad.masked_fill(ignored, 0.0).unsqueeze(-1))
        return result, None, None, None, None


def sharded_cross_entropy(
    logits: Tensor, target: Tensor, shard: VocabShard, *, ignore_index: int, reduction: str, smoothing: float
) -> Tensor:
    """As `F.cross_entropy` with class indices, for one rank's classes.

    Args:
        logits: [N, V/tp] or [V/tp].
        target: [N] or [], the same on all ranks.
        shard: this rank's classes.
        ignore_index: target value that does not count.
        reduction: `mean`, `sum` or `none`.
        smoothing: label smoothing.

    Returns:
        The loss, the same on all ranks, in the dtype that `F.cross_entropy` gives.

    Raises:
        IndexError: a target is not a class (checked on the CPU, as torch does).
    """
    _check_targets(target, shard.size, ignore_index)
    autocast = torch.is_autocast_enabled(logits.device.type)
    dtype = torch.float32 if autocast and logits.dtype != torch.float64 else logits.dtype
    wide = logits if logits.dtype == torch.float64 else logits.float()
    rows, targets = (wide, target) if wide.dim() == 2 else (wide.unsqueeze(0), target.unsqueeze(0))
    losses = _TokenLosses.apply(rows, targets, shard, ignore_index, smoothing)  # type: ignore[no-untyped-call]
    if reduction == "none":
        losses = losses if wide.dim() == 2 else losses.squeeze(0)
    elif reduction == "sum":
        losses = losses.sum()
    else:
        losses = losses.sum() / (targets != ignore_index).sum()
    return losses.to(dtype)


def _check_targets(target: Tensor, size: int, ignore_index: int) -> None:
    if target.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = ((target < 0) | (target >= size)) & (target != ignore_index)
        if bool(wrong.any()):
            raise IndexError(f"Target {int(target[wrong].flatten()[0])} is out of bounds for {size} classes.")


def can_shard(logits: Tensor, target: Any, weight: Any) -> bool:
    """Whether `sharded_cross_entropy` knows this form: class indices, classes last, no class weights."""
    return (
        weight is None
        and isinstance(target, Tensor)
        and not target.is_floating_point()
        and logits.dim() in (1, 2)
        and target.shape == logits.shape[:-1]
    )


def reduction_of(reduction: str, size_average: bool | None, reduce: bool | None) -> str:
    """The reduction that `F.cross_entropy`'s old arguments mean."""
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"
