# SPDX-License-Identifier: Apache-2.0
"""`PipelineRunner`: executes our schedules on torch's pipeline executor."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from lightning_3d.compat import (
    TorchAction,
    TorchActionKind,
    TorchScheduleRuntime,
    lower_table,
    run_microbatches,
    use_lowered_table,
)
from lightning_3d.errors import ScheduleError
from lightning_3d.pipeline.runtime_meter import StepMeter
from lightning_3d.pipeline.runtime_stage import Stage, StageCall, Wire
from lightning_3d.pipeline.runtime_sync import GradientSync
from lightning_3d.schedules import Action, ActionKind, Schedule

_KINDS = {
    ActionKind.FORWARD: TorchActionKind.FORWARD,
    ActionKind.BACKWARD: TorchActionKind.FULL_BACKWARD,
    ActionKind.BACKWARD_INPUT: TorchActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT: TorchActionKind.BACKWARD_WEIGHT,
}
_FORWARD_KINDS = (TorchActionKind.FORWARD, TorchActionKind.SEND_F, TorchActionKind.RECV_F)
_SHARDING_KINDS = (TorchActionKind.UNSHARD, TorchActionKind.RESHARD, TorchActionKind.REDUCE_GRAD)
_MAX_EXECUTORS = 16
_WRAPPED = ("failed to run forward", "Failed to run stage backward")

Table = dict[int, list[TorchAction]]


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What one run of a schedule gave."""

    losses: tuple[Tensor, ...]
    """Detached output of each microbatch on the rank of the last stage; empty elsewhere and without backward."""
    meter: StepMeter
    """Times of the run; not read until asked for."""

    @property
    def idle_fraction(self) -> float:
        """Share of the run in which this rank computed nothing: its measured bubble. Synchronizes on CUDA."""
        compute_s, total_s = self.meter.read()
        return 1 - compute_s / total_s if total_s else 0.0

    @property
    def idle_s(self) -> float:
        """Seconds of the run in which this rank computed nothing. Synchronizes on CUDA."""
        compute_s, total_s = self.meter.read()
        return max(0.0, total_s - compute_s)


class PipelineRunner:
    """Runs schedules over the stages of one model replica, forward and backward or forward only.

    Shapes may change from run to run, alike on all ranks; a few executors are kept, the longest unused one goes.
    Metadata is always given, so there are no trial forwards: a stage module is called once per microbatch.

    An exception of a stage is raised as it is on its own rank. Other ranks wait for what it did not send until their
    process group times out or is torn down: whoever runs the ranks ends them.
    """

    def __init__(
        self,
        *,
        stages: Mapping[int, nn.Module],
        num_stages: int,
        group: ProcessGroup,
        stage_to_group_rank: Mapping[int, int],
        device: torch.device,
        fsdp_root: nn.Module | None = None,
        fsdp_modules: Mapping[int, Sequence[nn.Module]] | None = None,
        reshard_after_backward: bool = False,
    ) -> None:
        """Runs nothing yet.

        Args:
            stages: this rank's stages. Called `module(hidden, microbatch)`; the first stage gets an empty tensor for
                `hidden`. Returns the hidden state, on the last stage the scalar loss (without backward any scalar).
            num_stages: stages on all ranks.
            group: the pipeline group.
            stage_to_group_rank: rank in `group` of every stage.
            device: where the stages compute.
            fsdp_root: holds the sharded modules that the stages use, when these are not inside the stage modules.
            fsdp_modules: for each local stage, the sharded blocks that it alone uses. Others found under `fsdp_root` or
                in the stage modules count as shared, see [Note: who owns a sharded module].
            reshard_after_backward: free gathered blocks after each microbatch's backward.
        """
        self._stages, self._num_stages, self._group = dict(stages), num_stages, group
        self._owners = dict(stage_to_group_rank)
        self._device = device
        self._root = fsdp_root
        self._blocks = {stage: tuple(modules) for stage, modules in (fsdp_modules or {}).items()}
        self._reshard_after_backward = reshard_after_backward
        self._executors: OrderedDict[Any, _Executor] = OrderedDict()
        self._tables: OrderedDict[Any, Table] = OrderedDict()
        self._is_cold = True
        self.last_report: RunReport | None = None

    def run(
        self,
        schedule: Schedule,
        *,
        hidden: tuple[Sequence[int], torch.dtype],
        loss_dtype: torch.dtype = torch.float32,
        backward: bool = True,
        reduce_gradients: bool = True,
    ) -> RunReport:
        """Run all microbatches of one batch; every rank of the group calls this with the same arguments.

        Args:
            schedule: table with backward; its forward part is run when `backward` is False.
            hidden: shape [b, S, D] and dtype of the hidden state between stages.
            loss_dtype: dtype of the last stage's output.
            backward: whether gradients are computed.
            reduce_gradients: whether the gradients of sharded modules are reduced at the end of this run; False leaves
                them accumulated for a later run.

        Raises:
            ScheduleError: the table does not fit this runner's stages.
        """
        self._check(schedule)
        wire = (torch.Size(hidden[0]), hidden[1])
        key = (schedule, wire, loss_dtype, backward)
        executor = self._executors.pop(key, None) or self._build(schedule, wire, loss_dtype, backward)
        with self._sync.run(
            schedule, self._row_of(schedule), backward=backward, reduce=backward and reduce_gradients
        ):
            report = executor.run()
        self._executors[key] = executor  # only now: an executor that failed is not used again
        if len(self._executors) > _MAX_EXECUTORS:
            self._executors.popitem(last=False)
        self.last_report = report
        return report

    @cached_property
    def _sync(self) -> GradientSync:
        # Not before the first run: modules may be sharded after the runner is made.
        return GradientSync(self._sharded_by_stage(), reshard_after_backward=self._reshard_after_backward)

    def _check(self, schedule: Schedule) -> None:
        same_size = schedule.num_stages == self._num_stages and schedule.num_ranks == self._group.size()
        ranks = (
            {(schedule.stage_to_rank[stage], owner) for stage, owner in self._owners.items()}
            if same_size
            else ()
        )
        if not same_size or len(ranks) != schedule.num_ranks:
            raise ScheduleError(
                f"Schedule {schedule.name!r} places {schedule.num_stages} stages on {schedule.num_ranks} ranks as "
                f"{schedule.stage_to_rank}, but the stages are on ranks {self._owners} of {self._group.size()}. "
                "Build it for the same plan."
            )
        if not schedule.has_backward:
            raise ScheduleError(
                f"Schedule {schedule.name!r} has no backward actions. Pass the whole table, with backward=False."
            )

    def _row_of(self, schedule: Schedule) -> int:
        """This rank's row of the table: the pipeline axis may run over the group's ranks in any order."""
        return schedule.stage_to_rank[next(iter(self._stages))]

    def _build(self, schedule: Schedule, wire: Wire, loss_dtype: torch.dtype, backward: bool) -> "_Executor":
        stages = []
        for index, module in sorted(self._stages.items()):
            call = StageCall(
                module,
                stage=index,
                is_last=index == self._num_stages - 1,
                wire=wire,
                parameters=self._parameters_of(index),
            )
            stage = Stage(
                call,
                index,
                self._num_stages,
                device=self._device,
                group=self._group,
                wire=wire,
                loss_dtype=loss_dtype,
                sync=self._sync,
                warm_up=self._is_cold,
            )
            stages.append(stage)
        self._is_cold = False
        executor = _Executor(stages, schedule.num_microbatches, backward=backward, device=self._device)
        use_lowered_table(executor.runtime, self._lowered(schedule, backward, executor.runtime), self._owners)
        return executor

    def _lowered(self, schedule: Schedule, backward: bool, runtime: TorchScheduleRuntime) -> Table:
        """The table with its communication; kept, since shapes change more often than tables."""
        key = (schedule, backward)
        if key not in self._tables:
            rows = {
                self._owners[schedule.stages_of(rank)[0]]: row for rank, row in enumerate(schedule.actions)
            }
            table = lower_table(
                runtime, {rank: [_torch_action(a) for a in rows[rank] if a] for rank in sorted(rows)}
            )
            self._tables[key] = {r: [a for a in row if _is_run(a, backward)] for r, row in table.items()}
        self._tables.move_to_end(key)
        if len(self._tables) > _MAX_EXECUTORS:
            self._tables.popitem(last=False)
        return self._tables[key]

    def _sharded_by_stage(self) -> dict[int, list[nn.Module]]:
        """For each local stage, the sharded modules that its forward may use."""
        exclusive = {id(module) for modules in self._blocks.values() for module in modules}
        under_root = list(self._root.modules()) if self._root is not None else []
        owned: dict[int, list[nn.Module]] = {}
        for stage, module in self._stages.items():
            shared = [m for m in (*under_root, *module.modules()) if id(m) not in exclusive]
            unique = {id(m): m for m in (*shared, *self._blocks.get(stage, ()))}
            owned[stage] = [m for m in unique.values() if isinstance(m, FSDPModule)]
        return owned

    def _parameters_of(self, stage: int) -> Callable[[], Iterator[nn.Parameter]]:
        """Parameters that the stage's backward may reach, asked for while they are gathered."""
        roots = [
            *self._blocks.get(stage, ()),
            self._stages[stage],
            *([self._root] if self._root is not None else []),
        ]
        return nn.ModuleList(roots).parameters


class _Executor:
    """Torch's executor for one table, one shape and one mode."""

    def __init__(
        self, stages: list[Stage], num_microbatches: int, *, backward: bool, device: torch.device
    ) -> None:
        self._stages = stages
        # scale_grads would divide gradients of earlier runs again; the loss carries the scale.
        self.runtime = TorchScheduleRuntime(  # type: ignore[no-untyped-call]
            stages, num_microbatches, loss_fn=_loss_itself if backward else None, scale_grads=False
        )
        nothing = torch.empty(0, device=device)
        self._arguments = [(nothing,)] * num_microbatches
        self._backward, self._device = backward, device

    def run(self) -> RunReport:
        """Run once; an exception of a stage is raised without torch's wrapping."""
        gives_loss = self._backward and any(stage.is_last for stage in self._stages)
        losses: list[Tensor] | None = [] if gives_loss else None
        meter = StepMeter(self._device)
        for stage in self._stages:
            stage.meter = meter
        failure: Exception | None = None
        try:
            with meter.run(), _without_printed_tables():
                run_microbatches(self.runtime, self._arguments, losses)
        except Exception as error:
            failure = self._unwrapped(error)
        if failure is not None:  # raised here, so that torch's wrapper is not its context
            raise failure
        for stage in self._stages:
            stage.clear_runtime_states()
        return RunReport(losses=tuple(loss.detach() for loss in losses or ()), meter=meter)

    def _unwrapped(self, error: Exception) -> Exception:
        for stage in self._stages:
            if stage.failure is not None:
                return stage.failure
        cause = error.__cause__
        is_wrapper = type(error) is RuntimeError and any(text in str(error) for text in _WRAPPED)
        return cause if is_wrapper and isinstance(cause, Exception) else error


@contextmanager
def _without_printed_tables() -> Iterator[None]:
    """Keep torch from logging the whole table beside an exception that we raise anyway."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    logger.addFilter(_below_error)
    try:
        yield
    finally:
        logger.removeFilter(_below_error)


def _below_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


def _loss_itself(output: Tensor, target: None) -> Tensor:
    return output


def _is_run(action: TorchAction, backward: bool) -> bool:
    """Whether an action has anything to do: see [Note: hidden modules] for those on shards."""
    kind = action.computation_type
    return kind not in _SHARDING_KINDS if backward else kind in _FORWARD_KINDS


def _torch_action(action: Action) -> TorchAction:
    return TorchAction(action.stage, _KINDS[action.kind], action.microbatch)
