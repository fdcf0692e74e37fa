# SPDX-License-Identifier: Apache-2.0
"""Data loaders that give data-parallel replicas different numbers of batches, without anybody waiting for ever.

[Note: uneven loaders]
All replicas take part in gathering and reducing shards, so they must run the same number of steps. In training the
shortest loader ends the epoch. In evaluation every batch counts: a replica that has run out runs its last batch again
beside the others and forgets what came out (its logs, its metrics, its predictions). `Trainer.test` and
`Trainer.validate` read every sample once, where DistributedSampler would repeat some. Loaders of one known length, which
is what Lightning's own sampler makes, are left alone; where a length is unknown, replicas ask each other every batch.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import Metric

from lightning_3d.compat_lightning import metric_state, restore_metric_state
from lightning_3d.errors import BatchError
from lightning_3d.mesh import ParallelMesh
from lightning_3d.strategies.monitored import replaced_log

if TYPE_CHECKING:
    import lightning.pytorch as pl

_NOTHING = object()
_UNKNOWN = -1
_KEY = "_even_batches"
"""Where an evened loader keeps what it needs."""


class EvenBatches:
    """What the loaders of one Trainer share: who may be asked, and how a batch is run beside others."""

    def __init__(
        self,
        trainer: "pl.Trainer",
        mesh: ParallelMesh,
        device: torch.device,
        run_beside: Callable[[Any], None],
    ) -> None:
        """Changes nothing yet.

        Args:
            trainer: whose loaders these are.
            mesh: the mesh.
            device: where collectives run.
            run_beside: runs an evaluation step on a batch from the loader and forgets the result.
        """
        self.trainer, self.run_beside = trainer, run_beside
        self._mesh, self._device = mesh, device

    def adopt(self, loader: Any) -> None:
        """Makes a loader even where it is not, in place; collective over replicas."""
        evaluates = self.trainer.state.fn in (TrainerFn.VALIDATING, TrainerFn.TESTING)
        if evaluates:
            _count_every_sample_once(loader)
        lengths = self._lengths(loader)
        if len(set(lengths)) == 1 and lengths[0] != _UNKNOWN:
            return
        if not isinstance(loader, DataLoader):
            if len(set(lengths)) > 1:
                raise BatchError(
                    f"Data-parallel replicas have {_say(lengths)} batches. Make their numbers equal, or return a"
                    " DataLoader, which is then evened out."
                )
            return
        if len(set(lengths)) > 1 and not evaluates:
            rank_zero_warn(
                f"Data-parallel replicas have {_say(lengths)} batches. Training ends an epoch with the shortest."
            )
        if _KEY not in loader.__dict__:
            loader.__class__ = _even_class(type(loader))
        loader.__dict__[_KEY] = (self, lengths, self._mesh.dp_rank)

    def _lengths(self, loader: Any) -> list[int]:
        try:
            length = _plain_length(loader)
        except (TypeError, NotImplementedError):
            length = _UNKNOWN
        mine = torch.tensor(length, device=self._device)
        each = [torch.empty_like(mine) for _ in range(self._mesh.dp_size)]
        dist.all_gather(each, mine, group=self._mesh.dp_group)
        return [int(value) for value in each]

    def count(self, has_batch: bool) -> int:
        """How many replicas have another batch; collective over replicas."""
        votes = torch.tensor(int(has_batch), device=self._device)
        dist.all_reduce(votes, group=self._mesh.dp_group)
        return int(votes)

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas."""
        return self._mesh.dp_size

    def limit(self, length: int) -> int:
        """Batches that an evaluation loop takes of a loader of this length."""
        trainer = self.trainer
        if trainer.sanity_checking:
            return min(length, int(trainer.num_sanity_val_steps))
        limits = {"validate": trainer.limit_val_batches, "test": trainer.limit_test_batches}
        stage = trainer.state.stage
        limit = limits.get(getattr(stage, "value", ""), trainer.limit_predict_batches)
        return min(length, limit) if isinstance(limit, int) else int(length * limit)


def _even_class(cls: type) -> type:
    """A DataLoader's class, with batches that are even: the loader stays what it is. See [Note: uneven loaders]."""

    def length(self: Any) -> int:
        even, lengths, _ = self.__dict__[_KEY]
        return min(lengths) if even.trainer.training and _UNKNOWN not in lengths else cls.__len__(self)  # type: ignore[attr-defined]

    def iterate(self: Any) -> Iterator[Any]:
        even, lengths, replica = self.__dict__[_KEY]
        batches: Iterator[Any] = cls.__iter__(self)  # type: ignore[attr-defined]
        if _UNKNOWN in lengths:
            return _agreed(even, batches)
        if even.trainer.training:
            return (batch for _, batch in zip(range(min(lengths)), batches, strict=False))
        takes = [even.limit(length) for length in lengths]
        if 0 in takes and any(takes):
            raise BatchError(
                f"Data-parallel replicas have {_say(takes)} batches to evaluate, but one without any cannot take part."
                " Give every replica a batch, or use fewer replicas."
            )
        return _filled_up(even, batches, takes[replica], max(takes))

    members = {"__len__": length, "__iter__": iterate, "__module__": cls.__module__, "__slots__": ()}
    return type(cls.__name__, (cls,), members)


def _agreed(even: EvenBatches, batches: Iterator[Any]) -> Iterator[Any]:
    """The batches of a loader of unknown length: as long as all replicas have one, in evaluation as long as any has."""
    last: Any = _NOTHING
    while True:
        batch = next(batches, _NOTHING)
        count = even.count(batch is not _NOTHING)
        if count == 0 or (even.trainer.training and count < even.num_replicas):
            return
        if batch is not _NOTHING:
            last = batch
            yield batch
        elif last is _NOTHING:
            raise BatchError("A data-parallel replica has nothing to evaluate. Give every replica a batch.")
        else:
            even.run_beside(last)


def _filled_up(even: EvenBatches, batches: Iterator[Any], own: int, most: int) -> Iterator[Any]:
    """The batches of a loader, the last one run again for every batch that the longest loader has more."""
    for index, batch in enumerate(batches, 1):
        if index == own:
            for _ in range(most - own):
                even.run_beside(batch)
        yield batch


def _count_every_sample_once(loader: Any) -> None:
    """Takes back the samples that a sampler repeats to give every replica as many: they would count twice in a mean."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return
    num_samples = len(sampler.dataset)  # type: ignore[arg-type]
    if num_samples >= sampler.num_replicas:  # a replica without any sample could not take part
        sampler.total_size = num_samples
        sampler.num_samples = len(range(sampler.rank, num_samples, sampler.num_replicas))


def _plain_length(loader: Any) -> int:
    is_even = _KEY in getattr(loader, "__dict__", {})
    return int(type(loader).__mro__[1].__len__(loader)) if is_even else len(loader)  # type: ignore[attr-defined]


def _say(lengths: list[int]) -> str:
    return " and ".join("an unknown number of" if n == _UNKNOWN else str(n) for n in lengths)


def arguments_of(step: Callable[..., Any], batch: Any) -> dict[str, Any]:
    """Arguments for a step on a batch that has no number of its own."""
    names = list(inspect.signature(step).parameters)
    first, *rest = names
    return {first: batch, **{name: 0 for name in rest if name in ("batch_idx", "dataloader_idx")}}


def run_beside(strategy: Any, batch: Any) -> None:
    """Runs an evaluation step so that other replicas can, and forgets it. See [Note: uneven loaders].

    Args:
        strategy: whose `validation_step`, `test_step` or `predict_step` it is.
        batch: as the loader gave it.
    """
    module = strategy.lightning_module
    stage = getattr(module.trainer.state.stage, "value", "")
    name = f"{stage}_step" if stage in ("test", "predict") else "validation_step"
    batch = strategy.batch_to_device(strategy.precision_plugin.convert_input(batch), dataloader_idx=0)
    with forgotten(module, strategy.reduce):
        getattr(strategy, name)(*arguments_of(getattr(module, name), batch).values())


@contextmanager
def forgotten(module: "pl.LightningModule", reduce: Callable[[Any], Any]) -> Iterator[None]:
    """Forgets what is logged and what metrics gather inside the context.

    Args:
        module: the LightningModule.
        reduce: over replicas; other replicas wait for it where they log a step's value with `sync_dist`.
    """
    signature = inspect.signature(type(module).log)

    def drop(*args: Any, **kwargs: Any) -> None:
        options = signature.bind(module, *args, **kwargs).arguments
        if options.get("on_step") and options.get("sync_dist"):
            reduce(torch.as_tensor(options["value"], dtype=torch.float32, device=module.device))

    states = [(metric, metric_state(metric)) for metric in module.modules() if isinstance(metric, Metric)]
    with replaced_log(module, drop):
        try:
            yield
        finally:
            for metric, state in states:
                restore_metric_state(metric, state)
