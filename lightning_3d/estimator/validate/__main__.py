# SPDX-License-Identifier: Apache-2.0
"""`python -m lightning_3d.estimator.validate runs.csv [--golden FILE] [--single-node FILE]`.

Rows whose identity has an even first byte of SHA-256 (`metrics.is_calibration`) are the half that the constants of the
time model were fitted on (`fit.py`); nothing of the memory model is fitted. The form of both was chosen with all rows
of the first tables in view, so the other half is held out for the constants alone; a file that was not there is held
out for all.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_3d.estimator.memory import MEMORY_MARGIN
from lightning_3d.estimator.validate.golden import GoldenRun, read_golden
from lightning_3d.estimator.validate.metrics import (
    is_calibration,
    regrets,
    relative_errors,
    scaled_errors,
    summary,
)
from lightning_3d.estimator.validate.predict import (
    fits_device,
    parameter_error,
    predicted_memory_bytes,
    predicted_step_s,
)
from lightning_3d.estimator.validate.runs import Run, read_runs
from lightning_3d.estimator.validate.single_node import SingleNodeRun, read_single_node

HALVES: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("calibration half", is_calibration),
    ("held-out half", lambda identity: not is_calibration(identity)),
    ("all rows", lambda identity: True),
)
ALLOCATED_KINDS = ("last", "allocated")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report of the given tables."""
    parser = argparse.ArgumentParser(prog="python -m lightning_3d.estimator.validate", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="?", help="table with the columns of published_runs.csv")
    parser.add_argument("--golden", type=Path, help="table of Megatron-LM's measured memory")
    parser.add_argument("--single-node", type=Path, help="table of vTrain's single-node steps")
    parser.add_argument("--rows", action="store_true", help="also print predicted and measured of each row")
    options = parser.parse_args(argv)
    if options.runs:
        runs = list(read_runs(options.runs))
        for name, chosen in HALVES:
            _report_runs(name, [run for run in runs if chosen(run.identity)])
        if options.rows:
            _print_rows(runs)
    if options.golden:
        golden = list(read_golden(options.golden))
        for name, chosen in HALVES:
            _report_golden(name, [run for run in golden if chosen(run.case)])
    if options.single_node:
        steps = list(read_single_node(options.single_node))
        for name, chosen in HALVES:
            _report_steps(name, [run for run in steps if chosen(run.identity)])
    return 0


def _report_runs(name: str, runs: Sequence[Run]) -> None:
    print(f"== published runs, {name}: {len(runs)} rows that name a model and a layout")
    print(
        f"parameters            {summary([error for run in runs if (error := parameter_error(run)) is not None])}"
    )
    _report_memory(runs)
    _report_time(runs)
    _report_out_of_memory(runs)


def _report_memory(runs: Sequence[Run]) -> None:
    measured = [
        (run, predicted_memory_bytes(run), run.memory_bytes)
        for run in runs
        if run.memory_bytes and not run.out_of_memory
    ]
    for label, kinds in (
        ("allocated", ALLOCATED_KINDS),
        ("reserved", ("reserved",)),
        ("device", ("device",)),
    ):
        rows = [
            (run.source, predicted, real) for run, predicted, real in measured if run.memory_kind in kinds
        ]
        print(f"memory {label:<14} {summary(relative_errors((p, m) for _, p, m in rows))}")
        print(f"  one scale a source  {summary(scaled_errors(rows))}")


def _report_time(runs: Sequence[Run]) -> None:
    timed = [(run, predicted_step_s(run), run.step_s) for run in runs if run.step_s]
    for label, moe in (("dense", False), ("MoE", True)):
        rows = [
            (run, predicted, real) for run, predicted, real in timed if (run.shape.experts is not None) == moe
        ]
        print(f"step time {label:<11} {summary(relative_errors((p, m) for _, p, m in rows))}")
        print(f"  one scale a source  {summary(scaled_errors([(run.source, p, m) for run, p, m in rows]))}")
        by_release = [((run.source, run.release), p, m) for run, p, m in rows]
        print(f"  a source's release  {summary(scaled_errors(by_release))}")
        by_gpu = [((run.source, run.cluster.gpu.name), p, m) for run, p, m in rows]
        print(f"  a source and GPU    {summary(scaled_errors(by_gpu))}")
    found = regrets((run.group, predicted, real) for run, predicted, real in timed)
    print(f"regret of the choice  {_regret(found)}")


def _regret(found: Sequence[float]) -> str:
    if not found:
        return "no groups of rows with the same work"
    right = sum(regret == 0 for regret in found)
    return (
        f"groups={len(found)} mean {sum(found) / len(found):.1%} max {max(found):.1%} best chosen in {right}"
    )


def _report_out_of_memory(runs: Sequence[Run]) -> None:
    """How well `does not fit` is foreseen; rows that do not say what they recompute are left out."""
    stated = [run for run in runs if run.states_recompute]
    for label, margin in (("of all memory", 1.0), ("planner's share", MEMORY_MARGIN)):
        judged = [(not fits_device(run, margin), run.out_of_memory) for run in stated]
        hits = sum(predicted and real for predicted, real in judged)
        alarms, real = sum(predicted for predicted, _ in judged), sum(real for _, real in judged)
        precision = f"{hits}/{alarms}" if alarms else "none predicted"
        print(f"does not fit {label:<16} n={len(judged)} precision {precision} recall {hits}/{real}")


def _print_rows(runs: Sequence[Run]) -> None:
    for run in runs:
        step = f"step {predicted_step_s(run):.3f}/{run.step_s:.3f} s" if run.step_s else ""
        memory = ""
        if run.memory_bytes:
            memory = f"{run.memory_kind} {predicted_memory_bytes(run) / 2**30:.1f}/{run.memory_bytes / 2**30:.1f} GiB"
        print(f"{run.index} {run.source[:30]} {run.shape.name} {run.layout.describe()} {step} {memory}")


def _report_golden(name: str, runs: Sequence[GoldenRun]) -> None:
    errors = relative_errors((run.predicted_bytes, run.measured_bytes) for run in runs)
    print(f"== Megatron-LM CI memory, {name}\nmemory allocated      {summary(errors)}")


def _report_steps(name: str, runs: Sequence[SingleNodeRun]) -> None:
    rows = [(run.group, predicted_step_s(run.work), run.work.measured_s) for run in runs]
    print(f"== vTrain single node, {name}")
    print(f"step time dense       {summary(relative_errors((p, m) for _, p, m in rows))}")
    print(f"  one scale a source  {summary(scaled_errors([('vTrain', p, m) for _, p, m in rows]))}")
    print(f"regret of the choice  {_regret(regrets(rows))}")


if __name__ == "__main__":
    sys.exit(main())
