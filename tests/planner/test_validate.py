# SPDX-License-Identifier: Apache-2.0
"""Predicted against measured on a few published runs, and the command that reports on any table of them."""

from pathlib import Path

import pytest

from lightning_3d.estimator.efficiency import DEFAULT_EFFICIENCY
from lightning_3d.estimator.validate.__main__ import main
from lightning_3d.estimator.validate.fit import BOUNDS, fit, loss
from lightning_3d.estimator.validate.metrics import is_calibration, regrets, scaled_errors, summary
from lightning_3d.estimator.validate.predict import (
    fits_device,
    parameter_error,
    predicted_memory_bytes,
    predicted_step_s,
)
from lightning_3d.estimator.validate.runs import read_runs

TABLE = Path(__file__).with_name("published_rows.csv")
RUNS = list(read_runs(TABLE))


def test_most_rows_are_read():
    assert len(RUNS) >= 36


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.source[:12]}-{run.index}")
def test_parameters_within_a_thousandth(run):
    error = parameter_error(run)
    assert error is None or error < 1e-3


def allocated():
    return [run for run in RUNS if run.memory_bytes and run.memory_kind in ("last", "formula", "reserved")]


@pytest.mark.parametrize("run", allocated(), ids=lambda run: f"{run.source[:12]}-{run.index}")
def test_memory_within_eight_percent(run):
    assert predicted_memory_bytes(run) == pytest.approx(run.memory_bytes, rel=0.08)


def test_step_times():
    errors = sorted(abs(predicted_step_s(run) / run.step_s - 1) for run in RUNS if run.step_s)
    assert errors[len(errors) // 2] < 0.12
    assert errors[int(0.8 * len(errors))] < 0.3


def test_out_of_memory_is_foreseen_and_not_invented():
    alarms = {run.index for run in RUNS if run.states_recompute and not fits_device(run)}
    real = {run.index for run in RUNS if run.out_of_memory}
    assert alarms & real
    assert len(alarms - real) <= 2


def test_metrics():
    assert regrets([("a", 1.0, 5.0), ("a", 2.0, 4.0), ("b", 1.0, 1.0)]) == [0.25]
    assert scaled_errors([("a", 1.0, 2.0), ("a", 2.0, 4.0)]) == [0.0, 0.0]
    assert summary([]) == "no rows"
    halves = [is_calibration(str(number)) for number in range(1000)]
    assert 400 < sum(halves) < 600


def test_the_command_reports(capsys):
    assert main([str(TABLE), "--rows"]) == 0
    text = capsys.readouterr().out
    for words in ("held-out half", "parameters", "step time dense", "regret of the choice", "does not fit"):
        assert words in text


def test_the_fit_never_makes_the_loss_larger():
    works = [work for run in RUNS[:12] if (work := run.timed()) is not None]
    fitted, least = fit(works)
    assert least <= loss(DEFAULT_EFFICIENCY, works)
    assert all(low <= getattr(fitted, name) <= high for name, (low, high) in BOUNDS.items())
