# SPDX-License-Identifier: Apache-2.0
"""`CommTrace`: what a run sends along each mesh axis, beside what the planner says."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from rich.console import Console
from typing_extensions import override

from lightning_3d.callbacks.context import (
    find_callback,
    local_blocks,
    log_scalars,
    output_folder,
    topology_of,
)
from lightning_3d.callbacks.link_check import LinkCheck
from lightning_3d.callbacks.run_facts import facts_of
from lightning_3d.compat import leave_mode
from lightning_3d.estimator.rank_traffic import rank_traffic
from lightning_3d.profiling.comm_recorder import CommRecorder
from lightning_3d.profiling.comm_report import CommReport, RankComm, comm_table
from lightning_3d.profiling.topology import DATA, Topology, gather_objects


class CommTrace(Callback):
    """Counts bytes and calls of every collective, by mesh axis, in a few optimizer steps.

    Bytes are what a rank sends in a ring: 2 (n-1)/n of an all-reduce, (n-1)/n of a gather or scatter, all of a
    message between stages. Beside them stand the planner's prediction and the operations that the rank computed
    meanwhile; after a `LinkCheck` also the time on the wire over the time of computing. Traced steps are slower,
    since every operator passes through Python; all others cost nothing.

    Rank 0 writes `comm_trace.json` as soon as the traced steps are over, sends `comm/<axis>_bytes` to the loggers and
    prints a table when training ends. Works with every strategy; predictions need one of this package, DDP or FSDP.

    Args:
        num_steps: Optimizer steps to trace.
        skip_steps: Steps to let pass before: the first ones set things up.
        dirpath: Where the JSON goes; beside the logs if None.
        print_table: Whether rank 0 prints the table.

    Attributes:
        report: What was traced, the same on every rank; None before.
    """

    def __init__(
        self, num_steps: int = 2, skip_steps: int = 3, dirpath: str | Path | None = None, print_table: bool = True
    ) -> None:
        self.num_steps, self.skip_steps = num_steps, skip_steps
        self.dirpath, self.print_table = dirpath, print_table
        self.report: CommReport | None = None
        self._topology: Topology | None = None
        self._recorder: CommRecorder | None = None
        self._is_entered = False
        self._predicted: dict[str, float] = {}
        self._steps: list[int] = []
        self._first_step = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._topology = topology_of(trainer)
        self._recorder = CommRecorder(self._topology)
        self.report, self._steps, self._predicted = None, [], {}
        self._first_step = trainer.global_step + self.skip_steps

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self._recorder is None or self.report is not None or step < self._first_step:
            return
        if step + 1 not in self._steps:
            self._steps.append(step + 1)
            self._predict(trainer, pl_module, batch)
        self._recorder.__enter__()  # type: ignore[no-untyped-call]
        self._is_entered = True

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._is_entered:
            return
        self._leave()
        if trainer.global_step >= self._first_step + self.num_steps:
            self._finish(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._steps and self.report is None:
            self._finish(trainer)
        if self.report is None or not self.print_table or not trainer.is_global_zero:
            return
        if self.report.totals():
            Console().print(comm_table(self.report))

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._is_entered:
            self._leave()

    def _leave(self) -> None:
        assert self._recorder is not None
        leave_mode(self._recorder)
        self._is_entered = False

    def _predict(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        facts = facts_of(trainer, pl_module, batch)
        # How a model for ModelParallelStrategy is sharded is in the user's code.
        if facts is None or self._topology is None or isinstance(trainer.strategy, ModelParallelStrategy):
            return
        predicted = rank_traffic(
            facts.shape,
            facts.workload,
            facts.layout,
            facts.stage,
            num_blocks=local_blocks(pl_module),
            accumulated=facts.accumulate if facts.layout.pp > 1 else 1,
        )
        if DATA in self._topology.axes:  # the one axis of DDP and FSDP
            predicted = {DATA: predicted["dp_shard"] + predicted["dp_replicate"]}
        self._predicted = {axis: value for axis, value in predicted.items() if value}

    def _finish(self, trainer: Trainer) -> None:
        """Brings the ranks' numbers together; collective over the world."""
        assert self._topology is not None
        assert self._recorder is not None
        mine = RankComm(
            rank=self._topology.rank,
            name=self._topology.names[self._topology.rank],
            stage=self._topology.stage,
            transfers=tuple(self._recorder.transfers),
            flops=self._recorder.flops,
            num_steps=len(self._steps),
            predicted_bytes=self._predicted,
        )
        checked = find_callback(trainer, LinkCheck)
        rates = checked.report.medians() if checked is not None and checked.report is not None else {}
        self.report = CommReport(steps=tuple(self._steps), ranks=tuple(gather_objects(mine)), rates=rates)
        totals = self.report.totals()
        log_scalars(trainer, {f"comm/{axis}_bytes": total.bytes for axis, total in totals.items()})
        folder = output_folder(trainer, self.dirpath)
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "comm_trace.json").write_text(json.dumps(self.report.to_dict(), indent=2))
