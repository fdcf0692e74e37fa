# SPDX-License-Identifier: Apache-2.0
"""`self.log` and torchmetrics where only one pipeline stage sees the values."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_3d.compat_lightning import mark_metric_updated, metric_state, restore_metric_state
from lightning_3d.mesh import ParallelMesh
from lightning_3d.pipeline.logs import LogCall, Publisher, merge_microbatches
from lightning_3d.strategies.monitored import replaced_log


class LoggedSteps:
    """Holds back `self.log` while stages run, then repeats it on every rank with the last stage's values."""

    def __init__(self, module: pl.LightningModule, mesh: ParallelMesh, device: torch.device) -> None:
        self._module, self._mesh, self._device = module, mesh, device
        self._publisher = Publisher(mesh, device)
        self._signature = inspect.signature(type(module).log)
        self._calls: list[LogCall] = []
        self._metrics: list[Metric] = []
        """Those that count, while steps run."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the calls of `self.log` inside the context instead of making them."""
        self._calls = []
        if self._mesh.holds_loss:
            self._metrics = [module for module in self._module.modules() if isinstance(module, Metric)]
        with replaced_log(self._module, self._record):
            yield

    @contextmanager
    def aside(self, buffers: bool) -> Iterator[None]:
        """Around a run of the step that does not count: forgets what it logs and puts metrics back.

        Args:
            buffers: whether to put the module's buffers back too.
        """
        count = len(self._calls)
        metrics = [(metric, metric_state(metric)) for metric in self._metrics]
        kept = list(_copies_of_buffers(self._module)) if buffers else []
        try:
            yield
        finally:
            del self._calls[count:]
            for metric, state in metrics:
                restore_metric_state(metric, state)
            for owner, name, buffer, values in kept:
                owner[name] = buffer
                buffer.data.copy_(values)  # behind the back of autograd, which may have saved it

    def _record(self, *args: Any, **kwargs: Any) -> None:
        arguments = dict(self._signature.bind(self._module, *args, **kwargs).arguments)
        arguments.pop("self")
        name, value = arguments.pop("name"), arguments.pop("value")
        self._calls.append(LogCall(name, value.detach() if isinstance(value, Tensor) else value, arguments))

    def publish(self, numbers: list[float | Tensor], *, split: bool) -> list[float]:
        """Makes the recorded calls on every rank of the replica; collective over pp.

        Args:
            numbers: further numbers to send along; only read on the last stage, but as many everywhere.
            split: whether the calls are of microbatches, to be merged.

        Returns:
            The further numbers of the last stage.
        """
        calls = merge_microbatches(self._calls) if split and self._mesh.holds_loss else self._calls
        names = {
            id(metric): name for name, metric in self._module.named_modules() if isinstance(metric, Metric)
        }
        layout = [(call.name, names.get(id(call.value)), call.options) for call in calls]
        values = [_number(call.value) for call in calls]
        layout, received = self._publisher.publish(layout, [*numbers, *values])
        for (name, metric_name, options), value in zip(layout, received[len(numbers) :], strict=True):
            self._log(name, metric_name, options, value)
        self._calls = []
        return received[: len(numbers)]

    def _log(self, name: str, metric_name: str | None, options: dict[str, Any], value: float) -> None:
        if metric_name is None:
            self._module.log(name, torch.tensor(value, dtype=torch.float32, device=self._device), **options)
            return
        metric = self._module.get_submodule(metric_name)
        assert isinstance(metric, Metric)
        if not self._mesh.holds_loss:
            mark_metric_updated(metric, torch.tensor(value, device=self._device))
        self._module.log(name, metric, **options)


def _copies_of_buffers(module: nn.Module) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor, Tensor]]:
    """Where each buffer is kept, its name there, the buffer, and a copy of its values."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield part._buffers, name, buffer, buffer.detach().clone()


def _number(value: Any) -> float | Tensor:
    if isinstance(value, Metric):
        forward_value: Any = value._forward_cache  # None after an update without a forward
        return forward_value.detach() if isinstance(forward_value, Tensor) else float("nan")
    return value


def sync_metrics_over_replicas(module: pl.LightningModule, mesh: ParallelMesh, device: torch.device) -> None:
    """Makes torchmetrics gather over data-parallel replicas only, and from the last stage, where they are updated."""

    def gather(state: Tensor, group: Any = None) -> list[Tensor]:
        states = gather_all_tensors(state, group=mesh.dp_group) if mesh.holds_loss else []
        if mesh.pp_size == 1:
            return states
        payload = [[each.cpu() for each in states]]
        dist.broadcast_object_list(payload, src=mesh.loss_rank, group=mesh.group("pp"), device=device)
        return [each.to(device) for each in payload[0]]

    for metric in module.modules():
        if isinstance(metric, Metric):
            metric.dist_sync_fn = gather
