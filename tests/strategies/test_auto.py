# SPDX-License-Identifier: Apache-2.0
"""`auto` degrees: the planner chooses for a named cluster, given degrees stay, and a plan that cannot be ends early."""

import os

import pytest
import torch.distributed as dist

from lightning_3d.errors import PlanError
from lightning_3d.plan import ParallelPlan
from lightning_3d.strategies import ThreeDStrategy, three_d
from tests.engine.runs import Batches, be_quiet, lm, make_trainer, mlp, token_batches
from tests.harness import run_ranks


def chosen(**options):
    def body():
        be_quiet()
        strategy = ThreeDStrategy(**options)
        trainer = make_trainer(strategy, 4, max_steps=1)
        trainer.fit(lm(), Batches(token_batches(1)))
        return strategy.plan.to_dict()

    return list(run_ranks(4, body, init=False, timeout_s=120))


def test_planner_chooses_for_a_named_cluster_alike_on_all_ranks():
    plans = chosen(cluster="1x4xH100", dp_replicate=1)
    assert all(plan == plans[0] for plan in plans)
    assert plans[0]["dp_replicate"] == 1
    assert plans[0]["pp"] * plans[0]["dp_shard"] * plans[0]["tp"] == 4


def test_given_degrees_stay():
    plan = chosen(cluster="1x4xH100", tp=2)[0]
    assert plan["tp"] == 2
    assert plan["pp"] * plan["dp_replicate"] * plan["dp_shard"] == 2


def test_without_a_cluster_on_cpu_state_is_sharded_in_the_node():
    plan = chosen()[0]
    assert (plan["pp"], plan["dp_replicate"], plan["dp_shard"], plan["tp"]) == (1, 1, 4, 1)


def refusal(options, module, devices):
    def body():
        be_quiet()
        trainer = make_trainer(ThreeDStrategy(**options), devices, max_steps=1)
        try:
            trainer.fit(module(), Batches(token_batches(1)))
        except PlanError as error:
            return str(error), dist.is_initialized()
        return None

    return list(run_ranks(devices, body, init=False, timeout_s=60))


@pytest.mark.parametrize(
    ("options", "module", "devices", "words"),
    [
        ({"tp": 4}, lambda: lm(n_heads=2, n_kv_heads=1, dim=32), 4, "num_attention_heads=2"),
        ({"tp": 4}, lambda: lm(n_heads=12, n_kv_heads=3, dim=48), 4, "num_key_value_heads=3"),
        ({"pp": 4}, lambda: lm(n_layers=2), 4, "num_layers=2"),
        ({"cluster": "2x8xH100"}, lm, 2, "16 devices"),
        ({"pp": 2, "schedule": "interleaved", "virtual_stages": 3}, lm, 2, "num_layers=4"),
        ({"pp": 4}, lambda: mlp(depth=3), 4, "num_layers=3"),
    ],
)
def test_refused_on_every_rank_before_they_meet(options, module, devices, words):
    for outcome in refusal(options, module, devices):
        assert outcome is not None
        message, had_met = outcome
        assert words in message
        assert not had_met


DIFFERENT = {
    "planned for another device": (
        lambda rank: {},
        lambda rank: ParallelPlan(tp=2, dp_shard=1, dp_replicate=1, pp=1) if rank == 0 else None,
        "dp_shard=1 tp=2 on rank 0; dp_shard=2 tp=1 on rank 1",
    ),
    "given another number": (
        lambda rank: {"pp": 2, "num_microbatches": 2 + rank},
        lambda rank: None,
        "num_microbatches=2 on rank 0; num_microbatches=3 on rank 1",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_plans_that_differ_between_ranks_are_refused_on_all(case, monkeypatch):
    options, planned, words = DIFFERENT[case]

    def body():
        be_quiet()
        rank = int(os.environ["RANK"])
        monkeypatch.setattr(three_d, "choose_degrees", lambda *_: planned(rank))
        with pytest.raises(PlanError, match=f"different plans: {words}"):
            make_trainer(ThreeDStrategy(**options(rank)), 2).fit(lm(), Batches(token_batches(1)))

    run_ranks(2, body, init=False, timeout_s=30)
