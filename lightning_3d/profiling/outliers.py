# SPDX-License-Identifier: Apache-2.0
"""Which of several values that should be equal is not: each against the median of its peers."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Outlier:
    """A value far from those it should equal."""

    index: int
    value: float
    median: float
    """Of its peers, itself left out."""

    @property
    def ratio(self) -> float:
        """Value over median."""
        return self.value / self.median if self.median else float("inf")


def outliers_below(values: Sequence[float], share: float, roles: Sequence[Hashable] = ()) -> list[Outlier]:
    """Values below a share of the median of their peers: rates.

    Args:
        values: one of each rank.
        share: of the median, below which a value is named.
        roles: values with the same role are peers; all, if left out.

    >>> [(found.index, found.median) for found in outliers_below([386, 390, 48, 380], 0.6)]
    [(2, 386)]
    """
    return [found for found in _with_peers(values, roles) if found.value < share * found.median]


def outliers_above(
    values: Sequence[float], factor: float, roles: Sequence[Hashable] = (), *, least_excess: float = 0.0
) -> list[Outlier]:
    """Values above a multiple of the median of their peers: times.

    Args:
        values: one of each rank.
        factor: times the median, above which a value is named.
        roles: values with the same role are peers; all, if left out.
        least_excess: a value that exceeds the median by less is not named.

    >>> [found.index for found in outliers_above([1.0, 1.1, 3.0, 1.2], 1.3)]
    [2]
    >>> [found.index for found in outliers_above([1.0, 3.0, 9.0, 9.1], 1.3, roles=("a", "a", "b", "b"))]
    [1]
    """
    return [
        found
        for found in _with_peers(values, roles)
        if found.value > factor * found.median and found.value - found.median > least_excess
    ]


def _with_peers(values: Sequence[float], roles: Sequence[Hashable]) -> list[Outlier]:
    roles = roles or [None] * len(values)
    found = []
    for index, value in enumerate(values):
        peers = [other for at, other in enumerate(values) if at != index and roles[at] == roles[index]]
        if peers:
            found.append(Outlier(index, value, median(peers)))
    return found
