# SPDX-License-Identifier: Apache-2.0
"""`self.log` and torchmetrics where only one pipeline stage sees the values."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from types import MethodType
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_3d.compat_lightning import mark_metric_updated, metric_state, restore_metric_state
from lightning_3d.mesh import ParallelMesh
from lightning_3d.pipeline.logs import LogCall, Publisher, merge_microbatches
from lightning_3d.strategies.monitored import replaced_log

_MISSING = object()


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
    """Makes torchmetrics gather over data-parallel replicas only, and from the last stage, where they are updated.

    Under a pipeline a metric is computed anew each time: a stage that never updates it cannot know that what it computed
    before is out of date, and would leave the others waiting. A value of a step (`dist_sync_on_step`) exists on the last
    stage only, in the middle of a schedule; it stays that of the replica, and what `compute` gives is of all.
    """
    gather = _Gather(mesh, device)
    for name, metric in module.named_modules():
        if not isinstance(metric, Metric):
            continue
        metric.dist_sync_fn = gather
        metric._sync_dist = MethodType(_sync_with_whole_lists, metric)  # type: ignore[method-assign]
        if mesh.pp_size == 1:
            continue
        metric.compute_with_cache = False
        if metric.dist_sync_on_step:
            rank_zero_warn(
                f"{name or type(metric).__name__}: dist_sync_on_step=True is ignored under pp={mesh.pp_size}. Values of a"
                " step are of one replica; those of compute(), at the end of an epoch, are of all."
            )
            metric.dist_sync_on_step = False


class _Gather:
    """Gathers from all replicas, as their last stages have it, to every rank; collective over dp and pp."""

    def __init__(self, mesh: ParallelMesh, device: torch.device) -> None:
        self._mesh, self._device = mesh, device

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """A tensor of each replica; of one number of dims, where sizes may differ."""
        mesh = self._mesh
        states = gather_all_tensors(state, group=mesh.dp_group) if mesh.holds_loss else []
        return self._from_last_stage(states)

    def elements(self, elements: list[Any]) -> list[list[Any]]:
        """A list of each replica, as long as it is there."""
        lists: list[Any] = [None] * self._mesh.dp_size
        if self._mesh.holds_loss:
            dist.all_gather_object(lists, _moved(elements, "cpu"), group=self._mesh.dp_group)
        return cast("list[list[Any]]", _moved(self._from_last_stage(lists), self._device))

    def _from_last_stage(self, states: list[Any]) -> list[Any]:
        if self._mesh.pp_size == 1:
            return states
        payload = [_moved(states, "cpu")]
        group, source = self._mesh.group("pp"), self._mesh.loss_rank
        dist.broadcast_object_list(payload, src=source, group=group, device=self._device)
        return cast("list[Any]", _moved(payload[0], self._device))

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Gather":
        return self  # a copied metric lives on the same ranks


def _moved(states: Any, device: Any) -> Any:
    return apply_to_collection(states, Tensor, lambda tensor: tensor.to(device))


def _sync_with_whole_lists(metric: Any, dist_sync_fn: _Gather, process_group: Any = None) -> None:
    """`Metric._sync_dist`, which gathers a list element by element: that ends where ranks have different numbers of them.

    Elements keep the order that torchmetrics gives them: the first of every replica, then the second.
    """
    lists = {
        name: getattr(metric, name)
        for name, reduction in metric._reductions.items()
        if isinstance(getattr(metric, name), list) and reduction is not dim_zero_cat
    }
    for name in lists:
        setattr(metric, name, [])
    type(metric)._sync_dist(metric, dist_sync_fn, process_group)
    for name, elements in lists.items():
        rows = zip_longest(*dist_sync_fn.elements(elements), fillvalue=_MISSING)
        gathered = [element for row in rows for element in row if element is not _MISSING]
        reduction = metric._reductions[name]
        setattr(metric, name, reduction(gathered) if reduction is not None and gathered else gathered)
