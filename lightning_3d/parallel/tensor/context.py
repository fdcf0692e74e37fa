# SPDX-License-Identifier: Apache-2.0
"""`TensorContext`: what the sharded modules of one model share."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.parallel.tensor.collectives import (
    copy_to_shards,
    gather_sequence,
    join_sequence,
    split_sequence,
    sum_scatter_sequence,
    sum_shards,
)
from lightning_3d.parallel.tensor.region import ShardedRegion


class TensorContext:
    """The tp group, the sequence in flight and the random state of one model."""

    def __init__(self, mesh: DeviceMesh, *, sequence_parallel: bool, random: bool) -> None:
        self.group: dist.ProcessGroup = mesh.get_group()
        self.size: int = self.group.size()
        self.rank: int = self.group.rank()
        self.sequence_parallel = sequence_parallel
        self.region = ShardedRegion(rank=self.rank, device_type=mesh.device_type, random=random)
        self.sequence_length: int | None = None
        """Length S of the sequence that is in the blocks; decides how much of a shard is padding."""
        self.partial_modules: set[str] = set()
        """Modules whose replicated parameters were seen to work on sharded activations."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorContext":
        """A copy of the model, as for weight averaging, works in the same group."""
        return self

    def whole_length(self, part: int) -> int:
        """Length of the sequence of which each rank holds `part` positions, padding cut off."""
        length = self.sequence_length
        if length is not None and -(-length // self.size) == part:
            return length
        return part * self.size

    def own_part(self, per_head: Tensor) -> Tensor:
        """This rank's values of a vector with one for each head."""
        part = per_head.shape[0] // self.size
        return per_head[self.rank * part : (self.rank + 1) * part]

    def to_shards(self, hidden: Tensor) -> Tensor:
        """The input of column layers: whole along the sequence; its gradient is summed over ranks."""
        if self.sequence_parallel:
            if (
                hidden.dim() == 2
            ):  # tokens [B * S/tp, D]: their order is that of the ranks, until `from_shards`
                return gather_sequence(hidden[None], hidden.shape[0] * self.size, self.group)[0]
            return gather_sequence(hidden, self.whole_length(hidden.shape[1]), self.group)
        return copy_to_shards(hidden, self.group)

    def from_shards(self, partial: Tensor) -> Tensor:
        """The output of row layers: the sum over ranks, of the own part of the sequence if that is sharded."""
        if self.sequence_parallel:
            if partial.dim() == 2:
                return sum_scatter_sequence(partial[None], self.group)[0]
            return sum_scatter_sequence(partial, self.group)
        return sum_shards(partial, self.group)

    def enter_blocks(self, hidden: Tensor) -> Tensor:
        """Replicated [B, S, ...] -> what the blocks work on."""
        if not self.sequence_parallel:
            return hidden
        self.sequence_length = hidden.shape[1]
        return split_sequence(hidden, self.group)

    def exit_blocks(self, hidden: Tensor) -> Tensor:
        """What the blocks work on -> replicated [B, S, ...]."""
        if not self.sequence_parallel:
            return hidden
        return join_sequence(hidden, self.whole_length(hidden.shape[1]), self.group)
