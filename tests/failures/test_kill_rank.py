# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of one rank at random moments: twice here, twenty times with eight ranks in `benchmarks/kill_rank.py`."""

from pathlib import Path

import pytest
from torch.distributed import DistNetworkError

from lightning_3d.strategies import failure
from tests.harness import run_script

PATH = Path(__file__).parents[2] / "benchmarks" / "kill_rank.py"
FEW = (2, {"pp": 1, "dp_shard": 2, "tp": 1})
MANY = (20, {"pp": 2, "dp_shard": 2, "tp": 2})


@pytest.mark.parametrize(
    ("kills", "degrees"),
    [FEW, pytest.param(*MANY, marks=[pytest.mark.long, pytest.mark.timeout(1200)])],
    ids=["2 ranks", "8 ranks"],
)
def test_all_others_end_and_name_the_rank(kills, degrees):
    options = [text for axis, size in degrees.items() for text in (f"--{axis.replace('_', '-')}", str(size))]
    result = run_script([PATH, "--kills", str(kills), "--seed", "1", *options], timeout_s=1100)
    assert result.stdout.count(",") + 1 >= kills, result.stdout  # every kill is listed


def test_a_store_that_is_gone_is_no_cause_of_its_own():
    """Rank 0, which serves it, was killed while the others made a group."""
    error = DistNetworkError(
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server crash?"
    )
    assert failure._is_echo(error)
    assert not failure._is_echo(RuntimeError("shapes do not match"))
