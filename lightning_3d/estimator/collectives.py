# SPDX-License-Identifier: Apache-2.0
"""Time of collectives on a cluster: latency plus bytes over the bandwidth of the slowest link that a ring crosses.

`t(n, S) = alpha(n) + f S / BW` with f = 2(n-1)/n for all-reduce and (n-1)/n for gather, scatter and exchange
(Thakur et al. 2005). A group with g members in each island drives g network cards at once, so its ring is bound by
min(island link, g x network).
"""

from dataclasses import dataclass
from math import log2

from lightning_3d.estimator.efficiency import Efficiency
from lightning_3d.hardware import Cluster


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate, by where they lie."""

    size: int
    islands: int
    """Islands over which they lie."""
    bytes_per_s: float
    """Bandwidth of a rank in a ring over them."""
    latency_s: float
    """Of a gather or scatter, in a ring."""
    tree_latency_s: float
    """Of an all-reduce or a transfer: trees are as deep as the logarithm of the islands."""

    @property
    def crosses(self) -> bool:
        """Whether the group uses the network between islands."""
        return self.islands > 1


class Network:
    """Groups and collective times on one cluster."""

    def __init__(self, cluster: Cluster, efficiency: Efficiency) -> None:
        self.cluster = cluster
        self._efficiency = efficiency
        self._groups: dict[tuple[int, int], Group] = {}

    def group(self, size: int, stride: int) -> Group:
        """The group of `size` ranks that are `stride` apart, innermost axes having the smallest stride."""
        key = (size, stride)
        if key not in self._groups:
            members = max(1, min(size, self.cluster.island // stride))
            islands = -(-size // members)
            link, cross = self.cluster.link_bytes_per_s, self.cluster.cross_bytes_per_s
            efficiency = self._efficiency
            together = cross if members == 1 else members * cross * efficiency.many_cards
            rate = link if islands == 1 else min(link, together)
            steps = size - 1 if islands > 1 else 0
            latency = efficiency.collective_latency_s + efficiency.ring_step_latency_s * steps
            self._groups[key] = Group(
                size, islands, rate, latency, efficiency.collective_latency_s * (1 + log2(islands))
            )
        return self._groups[key]

    @staticmethod
    def gather_s(num_bytes: float, group: Group) -> float:
        """All-gather to, or reduce-scatter from, `num_bytes` on each rank; also an all-to-all of that much."""
        if group.size == 1 or not num_bytes:
            return 0.0
        return group.latency_s + (group.size - 1) / group.size * num_bytes / group.bytes_per_s

    @staticmethod
    def all_reduce_s(num_bytes: float, group: Group) -> float:
        """All-reduce of `num_bytes`: the bytes of a scatter and a gather."""
        if group.size == 1 or not num_bytes:
            return 0.0
        return group.tree_latency_s + 2 * (group.size - 1) / group.size * num_bytes / group.bytes_per_s

    def exchange_s(self, num_bytes: float, group: Group, top_k: int = 1) -> float:
        """All-to-all of `num_bytes` from each rank, made of rows that each go to `top_k` places.

        What leaves the island goes over the rank's own network card, and a row only once to each island (DeepEP):
        I (1 - (1 - 1/I)^K) islands instead of K.
        """
        if group.size == 1 or not num_bytes:
            return 0.0
        islands = group.islands
        visited = islands * (1 - (1 - 1 / islands) ** top_k) / top_k
        outside = (1 - 1 / islands) * visited
        inside = (group.size - 1) / group.size
        cluster = self.cluster
        seconds = num_bytes * (inside / cluster.link_bytes_per_s + outside / cluster.cross_bytes_per_s)
        return group.tree_latency_s + seconds

    def send_s(self, num_bytes: float, group: Group) -> float:
        """One transfer between neighbours of a pipeline."""
        rate = self.cluster.cross_bytes_per_s if group.crosses else self.cluster.link_bytes_per_s
        return group.tree_latency_s + num_bytes / rate
