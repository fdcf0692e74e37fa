# SPDX-License-Identifier: Apache-2.0
"""How much a batch holds: samples and tokens."""

from dataclasses import dataclass
from typing import Any

from lightning_3d.pipeline.microbatch import tensors_of


@dataclass(frozen=True)
class BatchSize:
    """Samples and tokens of a batch of one replica."""

    num_samples: int
    num_tokens: int
    """Elements of the batch's first integer tensor; samples where it has none."""

    @property
    def seq_len(self) -> int:
        """Tokens of a sample."""
        return self.num_tokens // self.num_samples if self.num_samples else 0


def size_of_batch(batch: Any) -> BatchSize:
    """Counts samples and tokens; zeros for a batch without tensors of any dimension."""
    tensors = [tensor for tensor in tensors_of(batch) if tensor.dim()]
    if not tensors:
        return BatchSize(0, 0)
    integers = [tensor for tensor in tensors if not (tensor.is_floating_point() or tensor.is_complex())]
    if not integers:
        return BatchSize(len(tensors[0]), len(tensors[0]))
    return BatchSize(len(integers[0]), integers[0].numel())
