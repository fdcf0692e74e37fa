# SPDX-License-Identifier: Apache-2.0
"""Values that decisions depend on are the same on all ranks, whether or not the user asked for `sync_dist`.

Each data-parallel replica logs its own value. A learning rate that follows such a value would differ between the shards
of one parameter, and nobody would notice; checkpoints would be ranked differently, and ranks would stop apart.

[Note: monitored values] What a step logs under a monitored name is held back until the step ends. Then all replicas
exchange what they have, and each logs the same value: reduced as `reduce_fx` says over the replicas that logged one,
weighted by their batch sizes. So a replica may log it under a condition on its data, and nobody waits for it. A replica
that runs beside others (see [Note: uneven loaders]) adds nothing, and logs what they had in its next step. What hooks
log outside of steps is reduced with `sync_dist`, so all replicas must log it.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from lightning_3d.errors import SupportError
from lightning_3d.pipeline.logs import LogCall, merge_microbatches

if TYPE_CHECKING:
    import lightning.pytorch as pl

_STEPS = ("training_step", "validation_step", "test_step")


class MonitoredLog:
    """Stands in for `self.log` of a strategy's module: replicas log the same monitored values."""

    def __init__(self, module: "pl.LightningModule") -> None:
        self._module = module
        self._signature = inspect.signature(type(module).log)
        self._held: list[LogCall] | None = None
        """Calls of the step that runs; None outside of steps."""
        self._late: list[LogCall] = []
        """What others had while this replica ran beside them."""
        self._runs_beside = False

    @classmethod
    def begin(cls, module: "pl.LightningModule", strategy: Any) -> "MonitoredLog":
        """Puts one in the place of the module's `log`, and around the strategy's steps."""
        log = cls(module)
        module.__dict__["log"] = log
        for name in _STEPS:
            setattr(strategy, name, log._together(getattr(type(strategy), name).__get__(strategy)))
        return log

    def end(self, strategy: Any) -> None:
        """Gives the module its own `log` back, and the strategy its steps."""
        self._module.__dict__.pop("log", None)
        for name in _STEPS:
            strategy.__dict__.pop(name, None)

    @property
    def _strategy(self) -> Any:
        return self._module.trainer.strategy  # not kept, since a copied module must not copy it

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """As `LightningModule.log`.

        Raises:
            SupportError: a monitored value is logged with `rank_zero_only`.
        """
        arguments = dict(self._signature.bind(self._module, *args, **kwargs).arguments)
        name, value = arguments["name"], arguments["value"]
        if not isinstance(value, Metric) and name in self._names():
            if arguments.get("rank_zero_only"):
                raise SupportError(
                    f"self.log({name!r}, rank_zero_only=True) is monitored, but only rank 0 has it: ranks would decide"
                    " differently and wait for each other. Log it on all ranks, with sync_dist=True."
                )
            if self._held is not None:
                self._held.append(_call(arguments))
                return
            arguments["sync_dist"] = True
        type(self._module).log(**arguments)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Steps in this context only accompany those of other replicas."""
        self._runs_beside = True
        try:
            yield
        finally:
            self._runs_beside = False

    def _together(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A step of the strategy, with what it logs under monitored names exchanged at its end."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._held = []
            try:
                output = step(*args, **kwargs)
                held = self._held
            finally:
                self._held = None
            names = self._names()
            if names:
                self._log(self._exchange(names, held, batch=(*args, *kwargs.values())[0]))
            return output

        return run

    def _log(self, calls: list[LogCall]) -> None:
        calls = [*self._late, *calls]
        if self._runs_beside:
            self._late = calls
            return
        self._late = []
        for name, value, options in calls:
            type(self._module).log(self._module, name, value, **options)

    def _exchange(self, names: list[str], held: list[LogCall], batch: Any) -> list[LogCall]:
        """One call for each name that any replica logged, the same on all; collective over replicas."""
        mine = {} if self._runs_beside else {call.name: call for call in merge_microbatches(held)}
        rows = [self._row(mine[name], batch) if name in mine else [0.0] * 4 for name in names]
        row = torch.tensor(rows, dtype=torch.float64, device=self._strategy.root_device)
        table = [torch.empty_like(row) for _ in range(self._strategy.mesh.dp_size)]
        dist.all_gather(table, row, group=self._strategy.mesh.dp_group)
        logged = torch.stack(table, 1).cpu()  # [names, replicas, 4]
        is_logged = logged[:, :, 0] > 0
        options = {name: call.options for name, call in mine.items()}
        if (is_logged.any(1) & ~is_logged.all(1)).any():
            options = self._options_of_all(options)
        calls = []
        for name, column in zip(names, logged, strict=True):
            for _, size, value, is_double in column[column[:, 0] > 0]:
                dtype = torch.float64 if is_double else torch.float32
                value_options = {**options[name], "batch_size": int(size)}
                calls.append(LogCall(name, value.to(self._strategy.root_device, dtype), value_options))
        return merge_microbatches(calls)

    def _row(self, call: LogCall, batch: Any) -> list[float]:
        """What replicas tell each other of a call: that there is one, its weight, its value, its precision."""
        size = call.options.get("batch_size")
        is_mean = call.options.get("reduce_fx", "mean") in ("mean", "avg", torch.mean)
        if size is None and is_mean and call.options.get("on_epoch", not self._module.trainer.training):
            size = extract_batch_size(batch)
        is_double = isinstance(call.value, Tensor) and call.value.dtype == torch.float64
        return [1.0, float(1 if size is None else size), float(call.value), float(is_double)]

    def _options_of_all(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options of every name, of the first replica that logged it; only where some replicas did not."""
        each: list[Any] = [None] * self._strategy.mesh.dp_size
        dist.all_gather_object(each, options, group=self._strategy.mesh.dp_group)
        return {name: found for theirs in reversed(each) for name, found in theirs.items()}

    def _names(self) -> list[str]:
        """Names under which a monitored value may be logged, in an order that is the same on all ranks."""
        trainer = self._module.trainer
        holders = (*trainer.callbacks, *trainer.lr_scheduler_configs)  # type: ignore[attr-defined]
        monitors = [getattr(holder, "monitor", None) for holder in holders]
        return sorted({name for each in monitors if isinstance(each, str) for name in _logged_as(each)})


def _call(arguments: dict[str, Any]) -> LogCall:
    """A call that replicas make with the same value, so that nothing is left to reduce."""
    left_out = ("self", "name", "value", "sync_dist", "sync_dist_group", "enable_graph")
    options = {key: value for key, value in arguments.items() if key not in left_out}
    value = arguments["value"]
    return LogCall(arguments["name"], value.detach() if isinstance(value, Tensor) else value, options)


def _logged_as(monitor: str) -> set[str]:
    """The names that `self.log` may have been given for what is monitored: Lightning adds suffixes."""
    name = monitor.partition("/dataloader_idx_")[0]
    return {monitor, name, name.removesuffix("_epoch"), name.removesuffix("_step")}


@contextmanager
def replaced_log(module: "pl.LightningModule", log: Any) -> Iterator[None]:
    """Puts something in place of a module's `log` inside the context."""
    before = module.__dict__.get("log")
    module.__dict__["log"] = log
    try:
        yield
    finally:
        if before is None:
            module.__dict__.pop("log", None)
        else:
            module.__dict__["log"] = before
