# SPDX-License-Identifier: Apache-2.0
"""What a training step returned for each microbatch, as one output of the batch."""

from typing import Any

import torch
from torch import Tensor

from lightning_3d.parallel.loss_weighting import LossReduction
from lightning_3d.pipeline.steps import StepOutcome


def merge_outcome(outcome: StepOutcome, reduction: LossReduction) -> dict[str, Any]:
    """Merges losses and extras of the microbatches.

    Args:
        outcome: of a batch; empty on ranks without the last stage.
        reduction: whether losses are means or sums.

    Returns:
        `loss` as the step would have returned it for the whole batch, tensors joined along the batch dimension, scalar
        tensors averaged, counts added, anything else as a list; nothing where the outcome is empty.
    """
    if not outcome.losses:
        return {}
    losses = torch.stack([loss.double() for loss in outcome.losses])
    if reduction == "sum":
        loss = losses.sum()
    elif outcome.num_tokens:
        weights = torch.tensor(outcome.num_tokens, dtype=losses.dtype, device=losses.device)
        loss = (torch.nan_to_num(losses) * weights).sum() / weights.sum().clamp(min=1)
    else:
        loss = losses.mean()
    merged: dict[str, Any] = {"loss": loss}
    for key in outcome.extras[0]:
        values = [extras[key] for extras in outcome.extras if key in extras]
        merged[key] = sum(outcome.num_tokens) if key == "num_tokens" else _merge(values)
    return merged


def _merge(values: list[Any]) -> Any:
    if not all(isinstance(value, Tensor) for value in values):
        return values
    if values[0].ndim:
        return torch.cat([value.detach() for value in values])
    return torch.stack([value.detach().double() for value in values]).mean().to(values[0].dtype)
