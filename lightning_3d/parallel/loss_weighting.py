# SPDX-License-Identifier: Apache-2.0
"""What a loss is multiplied by, so that parts of a batch add up to the gradient of the whole."""

from collections.abc import Iterable
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from lightning_3d.mesh import ParallelMesh
from lightning_3d.parallel.agreement import total_over_replicas
from lightning_3d.parallel.gradients import scale_gradients

LossReduction: TypeAlias = Literal["mean", "sum"]


class LossWeighting:
    """Weights the losses of one accumulation window: microbatches x accumulated batches x replicas.

    Without token counts, parts count alike: a mean loss is averaged over all parts, a sum loss is added up.
    With counts n_i (`num_tokens` beside the loss) the gradient is that of the mean over all tokens,
    sum_i(n_i L_i) / sum_i(n_i) for mean losses and sum_i(L_i) / sum_i(n_i) for sums, whatever part they fell into.
    The counts of the window are only known at its end, so the division happens on the gradients.
    """

    def __init__(self, mesh: ParallelMesh, reduction: LossReduction, device: torch.device) -> None:
        """Begins with an empty window.

        Args:
            mesh: the mesh.
            reduction: whether the user's loss is a mean or a sum over its part of the batch.
            device: where collectives run.
        """
        self._mesh, self._reduction, self._device = mesh, reduction, device
        self._tokens: float | None = None

    def weigh(self, loss: Tensor, num_tokens: float | None, parts: int) -> Tensor:
        """The loss from which a part's backward starts.

        Args:
            loss: scalar loss of the part.
            num_tokens: tokens it was reduced over, if known.
            parts: microbatches times accumulated batches of the window.
        """
        if num_tokens is not None:
            if (
                num_tokens == 0
            ):  # a mean over nothing is not a number, which must not reach other parts' gradients
                _zero_gradients_behind(loss)
                return torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss)) * 0.0
            return loss * num_tokens if self._reduction == "mean" else loss
        if self._reduction == "sum":
            return loss * self._mesh.dp_size  # the reduction over replicas is an average
        return loss / parts

    def count(self, num_tokens: Iterable[float]) -> None:
        """Adds the token counts of a batch to the window."""
        counts = list(num_tokens)
        if counts:
            self._tokens = (self._tokens or 0.0) + sum(counts)

    def finish(self, parameters: Iterable[nn.Parameter]) -> None:
        """Ends the window: divides the gradients by the tokens of all replicas; collective if any were counted."""
        if self._tokens is None:
            return
        total = total_over_replicas(self._tokens, self._mesh, self._device)
        self._tokens = None
        scale_gradients(parameters, self._mesh.dp_size / max(total, 1.0))


def _zero_gradients_behind(loss: Tensor) -> None:
    """Makes every gradient of a coming backward zero: zero divided by no tokens would be no number further back."""

    def zeros(
        gradients: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        return tuple(gradient if gradient is None else torch.zeros_like(gradient) for gradient in gradients)

    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or not node.next_functions:
            continue
        seen.add(node)
        node.register_hook(zeros)
        waiting += [before for before, _ in node.next_functions]
