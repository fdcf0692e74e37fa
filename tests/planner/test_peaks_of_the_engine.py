# SPDX-License-Identifier: Apache-2.0
"""Estimated peaks against measured ones, for every kind of recomputation under every axis."""

import pytest

from lightning_3d.callbacks import MemoryTrace
from lightning_3d.selfcheck.model import LanguageModel
from tests.callbacks.memory_runs import SHAPE, fit, strategy_of, world_of
from tests.harness import run_ranks

MESHES = ({"dp_shard": 2}, {"tp": 2}, {"pp": 2, "num_microbatches": 4})
RECOMPUTE = ("none", "selective", "full")


def peaks(mesh):
    """Measured and estimated peak of this rank's second step, by kind of recomputation."""
    found = {}
    for kind in RECOMPUTE:
        trace = MemoryTrace(steps=(1,), evaluation=False)
        fit(
            [trace],
            strategy_of({**mesh, "recompute": kind}),
            world_of(mesh),
            mesh.get("dp_shard", 1),
            module=LanguageModel(SHAPE, "adamw"),
        )
        expected = trace.estimate["allocated"] - trace.estimate["framework"]
        found[kind] = trace.spans[0].peak.total, expected
    return found


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_peaks_and_their_order(mesh, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for by_kind in run_ranks(world_of(mesh), peaks, mesh, init=False, timeout_s=100):
        for measured, expected in by_kind.values():
            assert measured == pytest.approx(expected, rel=0.15)
        for position in (0, 1):
            none, selective, full = (by_kind[kind][position] for kind in RECOMPUTE)
            assert none > selective > full
