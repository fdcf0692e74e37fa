# SPDX-License-Identifier: Apache-2.0
"""Which rows of a vocabulary a tp rank holds."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_3d.parallel.tensor.parameters import shard_bounds


@dataclass(frozen=True)
class VocabShard:
    """Which rows of the vocabulary a rank has. Equal parts rounded up; the last ranks have fewer."""

    group: dist.ProcessGroup
    size: int
    """Rows V of the whole vocabulary."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "VocabShard":
        """Copies of a model work in the same group."""
        return self

    @property
    def bounds(self) -> tuple[int, int]:
        """First row and one past the last row of this rank."""
        return shard_bounds(self.size, self.group.size(), self.group.rank())

    @property
    def part(self) -> int:
        """Rows of the largest shard."""
        return -(-self.size // self.group.size())
