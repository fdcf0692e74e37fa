# SPDX-License-Identifier: Apache-2.0
"""What a loss is multiplied by, so that parts of a batch add up to the gradient of the whole."""

from collections.abc import Iterable
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from lightning_3d.errors import StepError
from lightning_3d.mesh import ParallelMesh
from lightning_3d.parallel.agreement import by_value, say_ranks, total_over_replicas
from lightning_3d.parallel.gradients import scale_gradients

LossReduction: TypeAlias = Literal["mean", "sum"]

_ALWAYS = "Return {'loss': loss, 'num_tokens': n} from every step, also with n=0, or num_tokens from none."


class LossWeighting:
    """Weights the losses of one accumulation window: microbatches x accumulated batches x replicas.

    Without token counts, parts count alike: a mean loss is averaged over all parts, a sum loss is added up.
    With counts n_i (`num_tokens` beside the loss) the gradient is that of the mean over all tokens,
    sum_i(n_i L_i) / sum_i(n_i) for mean losses and sum_i(L_i) / sum_i(n_i) for sums, whatever part they fell into.
    The counts of the window are only known at its end, so the division happens on the gradients.

    A run counts or does not: parts with a count and parts without have no common weight, and the division is a
    collective that all replicas take part in. The first part decides, ranks compare once, and every other part is held
    to it.
    """

    def __init__(self, mesh: ParallelMesh, reduction: LossReduction, device: torch.device) -> None:
        """Begins with an empty window.

        Args:
            mesh: the mesh.
            reduction: whether the user's loss is a mean or a sum over its part of the batch.
            device: where collectives run.
        """
        self._mesh, self._reduction, self._device = mesh, reduction, device
        self._tokens = 0.0
        self._counts: bool | None = None
        """Whether this run counts tokens; None before its first part."""
        self._is_compared = False

    def weigh(self, loss: Tensor, num_tokens: float | None, parts: int) -> Tensor:
        """The loss from which a part's backward starts.

        Args:
            loss: scalar loss of the part.
            num_tokens: tokens it was reduced over, if known.
            parts: microbatches times accumulated batches of the window.

        Raises:
            StepError: parts before this one came with a count and this one does not, or the other way round.
        """
        self._hold_to_first(num_tokens is not None)
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

    def count(self, num_tokens: float | None) -> None:
        """Adds the tokens of a batch to the window; None where the step does not count them.

        Raises:
            StepError: see `weigh`.
        """
        self._hold_to_first(num_tokens is not None)
        self._tokens += num_tokens or 0.0

    def finish(self, parameters: Iterable[nn.Parameter]) -> None:
        """Ends the window: divides the gradients by the tokens of all replicas; collective if the run counts them.

        Raises:
            StepError: on every rank, at the end of the first window, if some ranks count and others do not.
        """
        if not self._is_compared:
            self._compare_ranks()
        if not self._counts:
            return
        total = total_over_replicas(self._tokens, self._mesh, self._device)
        self._tokens = 0.0
        scale_gradients(parameters, self._mesh.dp_size / max(total, 1.0))

    def _hold_to_first(self, counts: bool) -> None:
        if self._counts is None:
            self._counts = counts
        if self._counts != counts:
            now, before = ("with", "without") if counts else ("without", "with")
            raise StepError(
                f"{self._mesh.describe_rank()}: training_step returned a loss {now} num_tokens after losses {before},"
                f" of other batches or microbatches. {_ALWAYS}"
            )

    def _compare_ranks(self) -> None:
        self._is_compared = True
        ranks = by_value(bool(self._counts))
        if len(ranks) > 1:
            raise StepError(
                f"training_step returned num_tokens on {say_ranks(ranks[True])} and none on {say_ranks(ranks[False])}."
                f" {_ALWAYS}"
            )


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
