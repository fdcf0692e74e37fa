# SPDX-License-Identifier: Apache-2.0
"""Whatever one rank meets, every rank ends within seconds, with the first cause."""

import json
import time

import pytest

from tests.engine.runs import name_of
from tests.failures.trial import train
from tests.harness import RanksError, RanksTimeoutError, run_ranks, run_script
from tests.processes import PATIENCE

PP2_TP2 = {"pp": 2, "tp": 2}
DP2_TP2 = {"dp_shard": 2, "tp": 2}
PP2_DP2 = {"pp": 2, "dp_shard": 2}
DP2 = {"dp_shard": 2}
ENDS_WITHIN_S = 30

RAISES = [
    (PP2_TP2, "configure_model"),
    (PP2_TP2, "training_step"),
    (PP2_DP2, "dataset"),
    (PP2_DP2, "validation_step"),
    (DP2_TP2, "checkpoint hook"),
    (DP2, "training_step"),
    (DP2, "late"),
]


def failures_of(layout, failure, folder):
    """How every rank ended, with what it wrote."""
    world = 1
    for degree in layout.values():
        world *= degree
    start = time.monotonic()
    with pytest.raises(RanksError) as error:
        run_ranks(world, train, layout, failure, folder, init=False, timeout_s=90)
    assert not isinstance(error.value, RanksTimeoutError), str(error.value)
    failures = error.value.failures
    assert set(failures) == set(range(world)), "every rank fails"
    assert all(each.type_name != "timeout" for each in failures.values()), str(error.value)
    assert time.monotonic() - start < 60 * PATIENCE
    return failures


def text_of(failure):
    return f"{failure.message}\n{failure.details}\n{failure.output}"


@pytest.mark.parametrize(
    ("layout", "where"), RAISES, ids=lambda value: value if isinstance(value, str) else name_of(value)
)
def test_an_exception_is_told_to_every_rank(layout, where, tmp_path):
    failures = failures_of(layout, where, tmp_path)
    for rank, failure in failures.items():
        assert f"on purpose in {where}" in text_of(failure), f"rank {rank}: {text_of(failure)}"


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_process_that_is_gone_is_named_by_every_other(how, tmp_path):
    failures = failures_of(PP2_TP2, how, tmp_path)
    for rank in (0, 1, 3):
        assert "rank 2 (pp=1 tp=0) ended without an exception" in text_of(failures[rank]), text_of(
            failures[rank]
        )


def test_the_rank_of_the_hub_may_be_the_one_that_is_gone(tmp_path):
    failures = failures_of(DP2_TP2, "kill rank 0", tmp_path)
    for rank in (1, 2, 3):
        assert "rank 0" in text_of(failures[rank])
        assert "killed" in text_of(failures[rank])


@pytest.mark.parametrize("where", ["save on rank 0", "rank_zero_only save", "save at the end"])
def test_a_save_that_not_all_ranks_make_is_an_error(where, tmp_path):
    failures = failures_of(DP2_TP2, where, tmp_path)
    for failure in failures.values():
        assert "All ranks must call it" in text_of(failure)
    assert not (tmp_path / "lonely.ckpt").exists()


def test_a_forward_on_one_stage_alone_is_an_error(tmp_path):
    failures = failures_of(PP2_DP2, "forward on the last stage", tmp_path)
    assert "outside a step" in text_of(failures[0])


def test_a_monitor_that_rank_0_alone_logs_is_an_error(tmp_path):
    failures = failures_of(DP2, "monitor of rank 0", tmp_path)
    for failure in failures.values():
        assert "only rank 0 has it" in text_of(failure)


def test_sigterm_on_one_rank_stops_all_at_the_same_step_with_a_checkpoint(tmp_path):
    command = ["-m", "tests.failures.trial", json.dumps(PP2_DP2), "sigterm", str(tmp_path)]
    result = run_script(command, timeout_s=80, env={"PYTHONPATH": "."}, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "finished" not in result.stdout
    (saved,) = tmp_path.iterdir()
    assert 1 < int(saved.stem.partition("=")[2]) < 50


def test_the_launcher_ends_with_its_ranks(tmp_path):
    command = ["-m", "tests.failures.trial", json.dumps(PP2_TP2), "kill", str(tmp_path)]
    result = run_script(command, timeout_s=180, env={"PYTHONPATH": "."}, check=False, leave_s=ENDS_WITHIN_S)
    assert result.returncode not in (0, None)
    assert "rank 2 (pp=1 tp=0)" in result.stderr
    assert result.killed == 0, f"{result.killed} ranks were still there after {ENDS_WITHIN_S} s"
