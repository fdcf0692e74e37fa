# SPDX-License-Identifier: Apache-2.0
"""The runner against one process: gradients and parameters after steps; reductions; evaluations in between."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.harness import run_ranks
from tests.pipeline.runtime_replica import NUM_ROWS, Model, Replica, batch_of, optimizer_of, reference, whole


def train(kind: str, accumulate: int, num_steps: int, replica: Replica) -> list[dict[str, Tensor]]:
    """Gradients of the last step, and parameters after it."""
    replica.reset(accumulate)
    optimizer = optimizer_of(kind, replica.model)
    for step in range(num_steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            replica.run(10 * step + part, reduce_gradients=part == accumulate - 1)
        optimizer.step()
    gradients = {n: whole(p.grad).clone() for n, p in replica.model.named_parameters() if p.grad is not None}
    return [gradients, {n: whole(p.detach()).clone() for n, p in replica.model.named_parameters()}]


RUNS = [("sgd", 1), ("adamw", 2)]
"""Optimizer, and runs per step of it."""
NUM_STEPS = 2


def train_all(options: dict[str, Any]) -> list[Any]:
    replica = Replica(**options)
    return [train(kind, accumulate, NUM_STEPS, replica) for kind, accumulate in RUNS]


def compare(results: list[Any], expected: list[dict[str, Tensor]]) -> None:
    for got, want in ((0, expected[0]), (1, expected[1])):
        assert {name for result in results for name in result[got]} == want.keys()
        for name, value in want.items():
            for result in results:
                if name in result[got]:
                    torch.testing.assert_close(
                        result[got][name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
                    )


CASES = [
    ("gpipe", None, 4),
    ("1f1b", None, 4),
    ("interleaved", 2, 4),
    ("zero_bubble", None, 4),
    ("zbv", None, 4),
]


@pytest.mark.parametrize(("name", "v", "m"), [*CASES, ("1f1b", None, 1), ("interleaved", 2, 1)])
@pytest.mark.parametrize("frozen", [False, True], ids=["all", "frozen"])
def test_two_stages_equal_one_process(name: str, v: int | None, m: int, frozen: bool) -> None:
    options = {"name": name, "v": v, "num_microbatches": m, "frozen": frozen}
    results = run_ranks(2, train_all, options)
    for i, (kind, accumulate) in enumerate(RUNS):
        compare([result[i] for result in results], reference(kind, accumulate, frozen, NUM_STEPS))


SHARDED = [
    *[(*case, {}) for case in CASES],
    ("interleaved", 2, 3, {"num_rows": 6}),  # not a multiple of the ranks
    ("interleaved", 2, 4, {"exclusive": False}),
    ("interleaved", 2, 4, {"frozen": True}),
    ("1f1b", None, 4, {"reshard_after_forward": False}),
    ("1f1b", None, 4, {"reshard_after_backward": True}),
    ("interleaved", 2, 4, {"reshard_after_backward": True}),
    ("1f1b", None, 4, {"own_root": True}),
    ("1f1b", None, 4, {"reduce_dtype": torch.float64}),  # gradients are accumulated in another dtype
    ("interleaved", 2, 2, {"replicate": 2, "pp": 1}),  # hybrid, and stages that follow each other on one rank
]


@pytest.mark.parametrize(("name", "v", "m", "more"), SHARDED, ids=lambda value: str(value))
def test_sharded_stages_equal_one_process(name: str, v: int | None, m: int, more: dict[str, Any]) -> None:
    options = {"name": name, "v": v, "num_microbatches": m, "dp": 2, **more}
    results = run_ranks(4, train_all, options)
    for i, (kind, accumulate) in enumerate(RUNS):
        rows = more.get("num_rows", NUM_ROWS)
        expected = reference(kind, accumulate, more.get("frozen", False), NUM_STEPS, rows)
        compare([result[i] for result in results], expected)


@pytest.mark.parametrize("m", [8, 2])
def test_four_stages_equal_one_process_with_more_or_fewer_microbatches(m: int) -> None:
    results = run_ranks(4, train_all, {"name": "1f1b", "v": None, "num_microbatches": m, "pp": 4})
    compare([result[1] for result in results], reference("adamw", 2, False, NUM_STEPS))


def count_reductions(options: dict[str, Any]) -> tuple[list[int], int]:
    replica = Replica(**options)
    counts = [0]
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    original = getattr(dist, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[0] += 1
        return original(*args, **kwargs)

    setattr(dist, name, counted)
    seen = []
    for part in range(6):
        replica.run(part, reduce_gradients=part % 3 == 2)
        seen.append(counts[0])
    assert all(
        isinstance(parameter, DTensor) for parameter in replica.model.parameters()
    )  # sharded between runs
    has_more = any(not name.startswith("blocks.") for name, _ in replica.model.named_parameters())
    groups = len(replica.model.blocks) + has_more
    return seen, groups


@pytest.mark.parametrize(
    ("name", "v", "exclusive"), [("1f1b", None, True), ("interleaved", 2, True), ("zbv", None, False)]
)
def test_each_group_is_reduced_once_per_optimizer_step(name: str, v: int | None, exclusive: bool) -> None:
    options = {"name": name, "v": v, "num_microbatches": 4, "dp": 2, "exclusive": exclusive}
    for seen, groups in run_ranks(4, count_reductions, options):
        assert seen == [0, 0, groups, groups, groups, 2 * groups]


def evaluate_between(options: dict[str, Any]) -> list[Any]:
    """Trains with evaluations in all places where they could do harm, and collects what these saw."""
    replica = Replica(**options)
    replica.reset(2)
    optimizer = optimizer_of("sgd", replica.model)
    seen = []
    for step in range(2):
        optimizer.zero_grad()
        for part in range(2):
            with torch.no_grad():
                replica.run(99, backward=False)
            seen.append([loss.item() for loss in replica.evaluated])
            replica.run(10 * step + part, reduce_gradients=part == 1)
        optimizer.step()
    return [{}, {n: whole(p.detach()).clone() for n, p in replica.model.named_parameters()}, seen]


@pytest.mark.parametrize(("name", "v"), [("1f1b", None), ("interleaved", 2)])
def test_evaluation_reads_fresh_weights_and_disturbs_nothing(name: str, v: int | None) -> None:
    options = {"name": name, "v": v, "num_microbatches": 4, "dp": 2, "reshard_after_forward": False}
    results = run_ranks(4, evaluate_between, options)
    _, parameters = reference("sgd", 2, False, 2)
    compare(results, [{}, parameters])
    model = Model()
    losses = [sum(r[2][i][j] for r in results if r[2][i]) / 2 for i in (0, 2) for j in range(4)]
    for i, num_steps in enumerate((0, 1)):
        if num_steps:
            model.load_state_dict(reference("sgd", 2, False, num_steps)[1])
        with torch.no_grad():
            expected = model(*batch_of(99)) / 2  # the loss is scaled for accumulation
        assert sum(losses[4 * i : 4 * i + 4]) == pytest.approx(expected.item(), rel=1e-5)
