# SPDX-License-Identifier: Apache-2.0
"""Errors of predictions: split, scale, order statistics, regret."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from hashlib import sha256
from statistics import mean, median
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def is_calibration(identity: str) -> bool:
    """Whether a row is in the half that constants were fitted on: the first byte of its SHA-256 is even."""
    return sha256(identity.encode()).digest()[0] % 2 == 0


def relative_errors(pairs: Iterable[tuple[float, float]]) -> list[float]:
    """|predicted / measured - 1| of each (predicted, measured)."""
    return [abs(predicted / measured - 1) for predicted, measured in pairs]


def scaled_errors(pairs: Sequence[tuple[Key, float, float]]) -> list[float]:
    """Errors after one scale for each key: the median of measured over predicted."""
    ratios: dict[Key, list[float]] = defaultdict(list)
    for key, predicted, measured in pairs:
        ratios[key].append(measured / predicted)
    scales = {key: median(values) for key, values in ratios.items()}
    return [abs(predicted * scales[key] / measured - 1) for key, predicted, measured in pairs]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(errors: Sequence[float]) -> str:
    """Count, median, mean and 90th percentile in percent."""
    if not errors:
        return "no rows"
    parts = (median(errors), mean(errors), percentile(errors, 0.9))
    return "n={:<4} median {:5.1%}  mean {:5.1%}  p90 {:5.1%}".format(len(errors), *parts)


def regrets(rows: Iterable[tuple[Key, float, float]]) -> list[float]:
    """For each group of rows (key, predicted, measured): how much slower the predicted best is than the real best."""
    groups: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    for key, predicted, measured in rows:
        groups[key].append((predicted, measured))
    found = []
    for members in groups.values():
        if len(members) > 1:
            chosen = min(members)[1]
            found.append(chosen / min(measured for _, measured in members) - 1)
    return found
