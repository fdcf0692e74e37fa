# SPDX-License-Identifier: Apache-2.0
"""`python -m lightning_3d.estimator.validate.fit runs.csv [--single-node FILE]`: fits the constants of the time model.

Coordinate descent on the calibration half alone (`metrics.is_calibration`), inside bounds that keep each constant
physical. The loss is the mean over sources of the spread of log(predicted/measured) around the source's median, which
one scale a source leaves, plus a part of the median itself, so that unscaled estimates are right too.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import mean, median

from lightning_3d.estimator.efficiency import DEFAULT_EFFICIENCY, Efficiency
from lightning_3d.estimator.step_time import StepTimeModel
from lightning_3d.estimator.validate.metrics import is_calibration
from lightning_3d.estimator.validate.runs import read_runs
from lightning_3d.estimator.validate.single_node import read_single_node
from lightning_3d.estimator.validate.work import TimedWork

BOUNDS: Mapping[str, tuple[float, float]] = {
    "matmul": (0.80, 0.95),
    "matmul_fp8": (0.70, 1.00),
    "flash_attention": (0.35, 0.70),
    "flash_attention_hopper": (0.25, 0.60),
    "elementwise_passes": (1.5, 3.5),
    "score_passes": (2.0, 6.0),
    "eager_passes": (2.5, 5.0),
    "launch_floor_s": (0.5e-3, 1.5e-3),
    "moe_launch_floor_s": (1.0e-3, 4.0e-3),
    "grouped_matmul": (0.4, 0.9),
    "expert_overlap": (0.05, 0.9),
    "collective_latency_s": (13e-6, 76e-6),
    "many_cards": (0.5, 0.9),
    "ring_step_latency_s": (4e-6, 12e-6),
    "data_overlap": (0.7, 1.0),
    "pipeline_exposed": (0.0, 0.5),
    "straggler_per_doubling": (0.0, 0.01),
}
"""Constants that are fitted, and the range in which each means what it says."""
STEPS = (0.2, 0.1, 0.05, 0.02)
"""Relative steps of the descent, one pass each."""
CLIP = 0.6
"""Largest deviation of one row that counts: tables have misprints."""
BIAS_WEIGHT = 0.35
CROWD_EXPONENT = 0.75
"""Weight of a source with n rows: n^0.75, so that a large table does not decide alone."""


def loss(efficiency: Efficiency, works: Sequence[TimedWork]) -> float:
    """Mean deviation over sources."""
    deviations: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for work in works:
        model = StepTimeModel(work.shape, work.workload, work.cluster, efficiency)
        key = (work.source, work.shape.experts is not None)
        deviations[key].append(log(model.estimate(work.layout).step_s / work.measured_s))
    total = weights = 0.0
    for values in deviations.values():
        middle, weight = median(values), len(values) ** CROWD_EXPONENT
        spread = mean(min(abs(value - middle), CLIP) for value in values)
        total += weight * (spread + BIAS_WEIGHT * min(abs(middle), CLIP))
        weights += weight
    return total / weights


def fit(works: Sequence[TimedWork], start: Efficiency = DEFAULT_EFFICIENCY) -> tuple[Efficiency, float]:
    """The constants with the smallest loss that coordinate descent finds, and the loss."""
    best, least = start, loss(start, works)
    for step in STEPS:
        for name, (low, high) in BOUNDS.items():
            for factor in (1 + step, 1 / (1 + step)):
                while True:
                    value = min(high, max(low, getattr(best, name) * factor))
                    candidate = replace(best, **{name: value})
                    found = loss(candidate, works)
                    if found >= least - 1e-6:
                        break
                    best, least = candidate, found
    return best, least


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the fitted constants."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_3d.estimator.validate.fit", description=__doc__
    )
    parser.add_argument("runs", type=Path, help="table with the columns of published_runs.csv")
    parser.add_argument("--single-node", type=Path, help="table of vTrain's single-node steps")
    options = parser.parse_args(argv)
    works = [
        work
        for run in read_runs(options.runs)
        if is_calibration(run.identity) and (work := run.timed()) is not None
    ]
    if options.single_node:
        rows = [run for run in read_single_node(options.single_node) if is_calibration(run.identity)]
        works += [run.work for run in rows]
    fitted, least = fit(works)
    print(
        f"{len(works)} rows of the calibration half, loss {loss(DEFAULT_EFFICIENCY, works):.4f} -> {least:.4f}"
    )
    for name, (low, high) in BOUNDS.items():
        print(
            f"{name:<24} {getattr(DEFAULT_EFFICIENCY, name):.4g} -> {getattr(fitted, name):.4g} in [{low:g}, {high:g}]"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
