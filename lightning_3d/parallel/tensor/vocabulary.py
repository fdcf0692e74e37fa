# SPDX-License-Identifier: Apache-2.0
"""Embedding and head with the vocabulary sharded over the tp ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.parallel.tensor.collectives import copy_to_shards, sum_shards
from lightning_3d.parallel.tensor.logits import VocabParallelLogits
from lightning_3d.parallel.tensor.mixing import Mixin
from lightning_3d.parallel.tensor.parameters import local
from lightning_3d.parallel.tensor.vocab_shard import VocabShard


class VocabEmbedding(Mixin):
    """ids [...] -> [..., D]: each rank looks up the ids it has, the sum completes them."""

    def forward(self, ids: Tensor) -> Tensor:
        """See the class."""
        shard: VocabShard = self._vocab_shard  # type: ignore[attr-defined]
        start, stop = shard.bounds
        _check_range(ids, shard.size)
        weight = local(self._parameters["weight"])  # type: ignore[attr-defined]
        foreign = (ids < start) | (ids >= stop)
        own = (ids - start).masked_fill(foreign, 0)
        padding: int | None = self.padding_idx  # type: ignore[attr-defined]
        padding = padding - start if padding is not None and start <= padding < stop else None
        rows = F.embedding(own, weight, padding)
        filling = rows.new_zeros(ids.shape).masked_fill((ids < 0) | (ids >= shard.size), torch.nan)
        return sum_shards(torch.where(foreign.unsqueeze(-1), filling.unsqueeze(-1), rows), shard.group)


def _check_range(ids: Tensor, size: int) -> None:
    """On the CPU an id outside of the vocabulary raises, as without shards; elsewhere its row is not a number."""
    if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
        low, high = (int(value) for value in torch.aminmax(ids))
        if low < 0 or high >= size:
            raise IndexError(
                f"index out of range: token ids from {low} to {high}, but the embedding has {size} rows."
            )


class VocabHead(Mixin):
    """[..., D] -> `VocabParallelLogits` [..., V]."""

    def forward(self, hidden: Tensor) -> Tensor:
        """See the class."""
        shard: VocabShard = self._vocab_shard  # type: ignore[attr-defined]
        bias = self._parameters.get("bias")  # type: ignore[attr-defined]
        weight = local(self._parameters["weight"])  # type: ignore[attr-defined]
        hidden = copy_to_shards(hidden, shard.group)
        logits = F.linear(hidden, weight, None if bias is None else local(bias))
        return VocabParallelLogits.wrap(logits, shard)
