# SPDX-License-Identifier: Apache-2.0
"""Blocks compiled one by one: the same numbers, one graph for all of them, the same names in checkpoints."""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from lightning_3d.checkpoint import load_full_state_dict
from lightning_3d.errors import ModelError, PlanError, SupportError
from lightning_3d.levers import check_levers
from lightning_3d.parallel import compiled
from lightning_3d.plan import ParallelPlan
from tests.engine.runs import (
    DP2,
    PP2,
    PP2_INTERLEAVED,
    TP2,
    Batches,
    Regression,
    Run,
    alone,
    be_quiet,
    errors,
    fit,
    lm,
    make_trainer,
    name_of,
    strategy_of,
    token_batches,
    vector_batches,
    world_of,
)
from tests.harness import run_ranks

AOT = {"compile": True, "compile_backend": "aot_eager"}
EAGER = {"compile": True, "compile_backend": "eager"}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("layout", "recompute"),
    [(DP2, "selective"), (TP2, "full"), (PP2_INTERLEAVED, "full"), (PP2, "0.5")],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_same_as_one_process_in_whole_graphs(layout, recompute):
    run = Run(
        module=lambda: lm("adamw"),
        batches=token_batches(2),
        strategy={**AOT, "recompute": recompute},
    )
    expected = alone(run)

    def body():
        record = fit(run, layout)
        return (
            errors(record, expected, run.compare),
            counters["stats"]["unique_graphs"],
            dict(counters["graph_break"]),
        )

    torch._dynamo.reset()
    for found, num_graphs, breaks in run_ranks(world_of(layout), body, init=False, timeout_s=220):
        assert max(found.values()) < 1e-5
        assert not breaks
        assert num_graphs <= 4  # one a block at most


def saved(layout, path, levers, resume=None, steps=1):
    be_quiet()
    trainer = make_trainer(strategy_of({**layout, **levers}), world_of(layout), max_steps=steps)
    module = lm("adamw", n_layers=2)
    trainer.fit(module, Batches(token_batches(2)), ckpt_path=resume)
    trainer.save_checkpoint(path)
    dist.barrier()
    return sorted(module.state_dict()), trainer.global_step


@pytest.mark.parametrize("layout", [DP2, PP2], ids=name_of)
def test_checkpoints_have_the_same_names_with_and_without(layout, tmp_path):
    """Saved with compilation and recomputation on and loaded with both off, and the other way round."""
    levers = {**EAGER, "recompute": "full"}

    def body():
        names = [
            saved(layout, tmp_path / "with", levers),
            saved(layout, tmp_path / "without", {}),
            saved(layout, tmp_path / "then without", {}, resume=tmp_path / "with", steps=2),
            saved(layout, tmp_path / "then with", levers, resume=tmp_path / "without", steps=2),
        ]
        return [step for _, step in names], [held == names[0][0] for held, _ in names]

    for steps, same in run_ranks(2, body, init=False, timeout_s=120):
        assert steps == [1, 1, 2, 2]
        assert all(same)
    expected = load_full_state_dict(tmp_path / "then without")
    for name in ("with", "without", "then with"):
        assert load_full_state_dict(tmp_path / name).keys() == expected.keys()
    for name, value in load_full_state_dict(tmp_path / "then with").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_what_cannot_compile_is_refused_before_any_process_starts(monkeypatch):
    device = torch.device("cpu")
    with pytest.raises(PlanError, match=r"compile_backend='fast' is unknown.*'inductor'"):
        compiled.check_backend("fast", device)
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with pytest.raises(SupportError, match=r"C\+\+ compiler.*aot_eager"):
        compiled.check_backend("inductor", device)
    plan = ParallelPlan(pp=1, dp_replicate=1, dp_shard=1, tp=2, compile=True, recompute="selective")
    with pytest.raises(PlanError, match=r"recompute='selective' and tp=2.*recompute='full'"):
        check_levers(plan)
    with pytest.raises(PlanError, match=r"compile='inductor' is neither.*compile_backend"):
        ParallelPlan(compile="inductor")
    with pytest.raises(PlanError, match=r"compile_backend='aot_eager' has no effect without compile=True"):
        ParallelPlan(compile_backend="aot_eager")


def test_a_model_without_blocks_is_refused():
    def body():
        be_quiet()
        module = Regression(torch.nn.Linear(16, 16))
        with pytest.raises(ModelError, match=r"no ModuleList.*compile=True"):
            make_trainer(strategy_of({**DP2, **EAGER}), 2).fit(module, Batches(vector_batches(1)))

    run_ranks(2, body, init=False, timeout_s=60)
