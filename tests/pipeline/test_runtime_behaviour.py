# SPDX-License-Identifier: Apache-2.0
"""What the runner holds in memory, how it takes new shapes, mistakes and failures, and what it measures."""

import gc
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.errors import ModelError, ScheduleError, StepError
from lightning_3d.pipeline.runtime import PipelineRunner
from lightning_3d.pipeline.runtime_stage import StageCall
from lightning_3d.schedules import build_schedule, in_flight_bound
from tests.harness import RanksError, run_ranks
from tests.pipeline.runtime_replica import SEQ, WIDTH, Model, Replica, batch_of


class Held:
    """Stands for the activations of one microbatch on one stage."""


def count_in_flight(options: dict[str, Any]) -> tuple[int, int, int, int]:
    """Most (stage, microbatch) pairs whose graph is alive, the schedule's bound, and what is left after a run."""
    replica = Replica(**options)
    alive: dict[tuple[int, int], weakref.WeakSet[Held]] = {}
    peak = 0

    def hold(stage: int, microbatch: int, hidden: Tensor) -> Tensor:
        nonlocal peak
        held = Held()
        alive.setdefault((stage, microbatch), weakref.WeakSet()).add(held)
        peak = max(peak, sum(bool(tokens) for tokens in alive.values()))
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (held, tensor), lambda pair: pair[1]):
            return hidden * hidden.detach().sigmoid()

    replica.hold = hold
    gc.disable()  # nothing may wait for the garbage collector
    replica.run(0)
    replica.run(1)
    rank = replica.schedule().stage_to_rank[replica.stages[0]]
    buffers = sum(
        slot.buffer is not None
        for executor in replica.runner._executors.values()
        for stage in executor._stages
        for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
        for slot in infos
    )
    left = sum(len(tokens) for tokens in alive.values())
    return peak, in_flight_bound(replica.schedule())[rank], left, buffers


@pytest.mark.parametrize(
    ("name", "v"), [("gpipe", None), ("1f1b", None), ("interleaved", 2), ("zero_bubble", None)]
)
def test_activations_live_as_long_as_the_schedule_says(name: str, v: int | None) -> None:
    for peak, bound, left, buffers in run_ranks(
        2, count_in_flight, {"name": name, "v": v, "num_microbatches": 8}
    ):
        assert peak == bound
        assert (left, buffers) == (0, 0)


def change_shapes(num_shapes: int) -> tuple[int, int]:
    replica = Replica("1f1b", None, 4)
    for step in range(num_shapes):
        replica.run(step, num_microbatches=(1, 2, 4)[step % 3], seq=1 + step % 200)
    return len(replica.runner._executors), len(replica.runner._tables)


def test_shapes_change_without_a_leak() -> None:
    for executors, tables in run_ranks(2, change_shapes, 60):
        assert executors <= 16
        assert tables == 3


def short_batches() -> list[Any]:
    """A short last batch, of another shape, whose microbatches the interleaved schedule does not take."""
    replica = Replica("interleaved", 2, 4)
    losses = []
    for num_microbatches, seq in ((4, SEQ), (5, 3), (4, SEQ)):
        replica.model.zero_grad()
        replica.num_rows = num_microbatches
        report = replica.run(7, num_microbatches=num_microbatches, seq=seq)
        losses.append(sum(loss.item() for loss in report.losses))
    return losses


def test_short_batch_falls_back() -> None:
    losses = run_ranks(2, short_batches)[0]  # the last stage is on rank 0
    for loss, (rows, seq) in zip(losses, ((4, SEQ), (5, 3), (4, SEQ)), strict=True):
        assert loss == pytest.approx(Model()(*batch_of(7, seq, rows)).item(), rel=1e-5)


class UserError(Exception):
    pass


def fail(where: str) -> tuple[str, str, bool]:
    """Fails in the step of the first stage, then goes on: the runner must not be broken."""
    replica = Replica("1f1b", None, 4, pp=1)
    replica.run(0)

    def hold(stage: int, microbatch: int, hidden: Tensor) -> Tensor:
        if where == "forward":
            raise UserError(f"microbatch {microbatch}")
        hidden.register_hook(lambda grad: (_ for _ in ()).throw(UserError("in backward")))
        return hidden * 1

    replica.hold = hold
    try:
        replica.run(1)
    except UserError as error:
        caught = (str(error), str(error.__context__))
    replica.hold = None
    replica.run(2)
    return (*caught, len(replica.runner.last_report.losses) == 4)


@pytest.mark.parametrize(("where", "message"), [("forward", "microbatch 0"), ("backward", "in backward")])
def test_exception_of_a_stage_is_raised_as_it_is(where: str, message: str) -> None:
    assert run_ranks(1, fail, where) == [(message, "None", True)]


def wrong(what: str) -> None:
    replica = Replica("1f1b", None, 4, pp=1)
    if what == "schedule":
        other = build_schedule("gpipe", num_ranks=2, num_microbatches=4)
        replica.runner.run(other, hidden=((4, SEQ, WIDTH), torch.float32))
    replica.scale = torch.ones(3) if what == "loss" else 1.0
    replica.run(0)


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [("schedule", ScheduleError, "Build it for the same plan"), ("loss", StepError, "Return a scalar")],
)
def test_mistakes_are_named(what: str, error: type[Exception], message: str) -> None:
    with pytest.raises(RanksError, match=f"{error.__name__}: .*{message}"):
        run_ranks(1, wrong, what)


def test_hidden_state_of_another_shape_is_refused() -> None:
    wire = (torch.Size((4, SEQ, WIDTH)), torch.float32)
    call = StageCall(
        lambda hidden, microbatch: hidden[:, :-1],
        stage=1,
        is_last=False,
        wire=wire,
        parameters=lambda: iter(()),
    )
    with pytest.raises(
        ModelError, match=r"\(4, 4, 8\) of torch.float32, but the next stage waits for \(4, 5, 8\)"
    ):
        call(torch.zeros(4, SEQ, WIDTH))


def measure_idle() -> float:
    replica = Replica("1f1b", None, 2)
    replica.run(0)

    def hold(stage: int, microbatch: int, hidden: Tensor) -> Tensor:
        time.sleep(0.1)
        return hidden

    replica.hold = hold
    return replica.run(1).idle_fraction


def test_report_tells_the_bubble() -> None:
    for idle in run_ranks(2, measure_idle):
        assert idle == pytest.approx(1 / 3, abs=0.1)  # the forwards alone: 3 slots of which 2 are used


class Scaled(nn.Module):
    """A stage in one line."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.is_last = is_last

    def forward(self, hidden: Tensor, microbatch: int) -> Tensor:
        hidden = (hidden if len(hidden) else torch.ones(1, 1, 2)) * self.weight
        return hidden.sum() if self.is_last else hidden


def many_steps(name: str, num_ranks: int, num_steps: int) -> float:
    schedule = build_schedule(name, num_ranks=num_ranks, num_microbatches=2 * num_ranks)
    rank = dist.get_rank()
    stages = {s: Scaled(s == schedule.num_stages - 1) for s in schedule.stages_of(rank)}
    runner = PipelineRunner(
        stages=stages,
        num_stages=schedule.num_stages,
        group=dist.group.WORLD,
        stage_to_group_rank=dict(enumerate(schedule.stage_to_rank)),
        device=torch.device("cpu"),
    )
    for _ in range(num_steps):
        runner.run(schedule, hidden=((1, 1, 2), torch.float32))
    return next(iter(stages.values())).weight.grad.sum().item()


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero_bubble", "zbv"])
def test_many_steps_do_not_hang(name: str, num_ranks: int) -> None:
    """Gloo once dropped messages of pipelines; every rank must finish, with every microbatch's gradient."""
    num_steps = 100 if (name, num_ranks) == ("1f1b", 2) else 20
    assert (
        run_ranks(num_ranks, many_steps, name, num_ranks, num_steps)
        == [4.0 * num_ranks * num_steps] * num_ranks
    )
