# SPDX-License-Identifier: Apache-2.0
"""Data loaders that give data-parallel replicas different numbers of batches, without anybody waiting for ever.

[Note: uneven loaders]
All replicas take part in gathering and reducing shards, so they must run the same number of steps. In training the
shortest loader ends the epoch. In evaluation every batch counts: a replica that has run out runs its last batch again
beside the others and forgets what came out (its logs, its metrics, its predictions); it takes part in what is reduced
in a step, since Lightning logs to a page of its own that is thrown away. `Trainer.test` and `Trainer.validate` read
every sample once, where DistributedSampler would repeat some. Loaders of one certain length, which is what Lightning's
own sampler makes, are left alone. Elsewhere replicas ask each other every batch: a length is
certain for a DataLoader over a map-style data set with samplers of torch or Lightning, and only said by all others (an
IterableDataset whose shards have fewer samples, a batch sampler that fills batches by length). In evaluation one batch is
read ahead, by Lightning where a loader has no length and here elsewhere, so that what runs beside others comes before
the last step of one's own. Twice would be too often: replicas must run a step between two questions.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchmetrics import Metric

from lightning_3d.compat_lightning import (
    arguments_beside,
    metric_state,
    reads_ahead,
    restore_metric_state,
    scratch_results,
)
from lightning_3d.errors import BatchError
from lightning_3d.mesh import ParallelMesh

if TYPE_CHECKING:
    import lightning.pytorch as pl

_NOTHING = object()
_UNKNOWN = -1
_KNOWN = {"torch", "lightning", "pytorch_lightning", "lightning_3d", "builtins", "typing", "collections"}
"""Packages whose samplers keep their length, and those of their bases."""
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

    def adopt(self, loader: Any) -> Any:
        """Gives a loader that is even where this one is not, if possible in place; collective over replicas."""
        evaluates = self.trainer.state.fn in (TrainerFn.VALIDATING, TrainerFn.TESTING)
        if evaluates:
            _count_every_sample_once(loader)
        lengths, certain = self._lengths(loader)
        differ = len(set(lengths)) > 1
        if certain and not differ:
            return loader
        if differ and not evaluates:
            rank_zero_warn(
                f"Data-parallel replicas have {_say(lengths)} batches. Training ends an epoch with the shortest."
            )
        if not hasattr(loader, "__dict__") or not hasattr(type(loader), "__iter__"):
            loader = _Readable(loader)
        if _KEY not in loader.__dict__:
            loader.__class__ = _even_class(type(loader))
        loader.__dict__[_KEY] = _Evened(self, lengths, certain, self._mesh.dp_rank)
        return loader

    def _lengths(self, loader: Any) -> tuple[list[int], bool]:
        """The length of each replica's loader, and whether all of them are certain."""
        try:
            length = _plain_length(loader)
        except (TypeError, NotImplementedError):
            length = _UNKNOWN
        mine = torch.tensor([length, int(_is_certain(loader))], device=self._device)
        each = [torch.empty_like(mine) for _ in range(self._mesh.dp_size)]
        dist.all_gather(each, mine, group=self._mesh.dp_group)
        lengths = [int(length) for length, _ in each]
        return lengths, _UNKNOWN not in lengths and all(bool(certain) for _, certain in each)

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
        limits = {
            "sanity_check": trainer.limit_val_batches,
            "validate": trainer.limit_val_batches,
            "test": trainer.limit_test_batches,
        }
        limit = limits.get(getattr(trainer.state.stage, "value", ""), trainer.limit_predict_batches)
        taken = min(length, limit) if isinstance(limit, int) else int(length * limit)
        return int(min(taken, trainer.num_sanity_val_steps)) if trainer.sanity_checking else taken


class _Evened(NamedTuple):
    """What an evened loader keeps."""

    even: EvenBatches
    lengths: list[int]
    """Of each replica's loader, when it was adopted; `_UNKNOWN` where it has none."""
    certain: bool
    """Whether the loaders have as many batches as they say."""
    replica: int

    def length(self) -> int | None:
        """The one length that Lightning's loops on all replicas go by; None where each has its own."""
        if self.even.trainer.training:
            return min(self.lengths)
        return None if self.certain else max(self.lengths)


class _Readable:
    """Stands for a loader whose class cannot be changed: a generator, say."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)


def _even_class(cls: type) -> type:
    """A loader's class, with batches that are even: the loader stays what it is. See [Note: uneven loaders]."""

    def length(self: Any) -> int:
        evened = self.__dict__[_KEY]
        if _UNKNOWN in evened.lengths:
            raise TypeError("A data-parallel replica does not know how many batches it has.")
        agreed = evened.length()
        return cls.__len__(self) if agreed is None else agreed  # type: ignore[attr-defined]

    def iterate(self: Any) -> Iterator[Any]:
        return _even(self.__dict__[_KEY], cls.__iter__(self))  # type: ignore[attr-defined]

    members = {"__iter__": iterate, "__module__": cls.__module__, "__slots__": ()}
    return type(cls.__name__, (cls,), members | ({"__len__": length} if hasattr(cls, "__len__") else {}))


def _even(evened: _Evened, batches: Iterator[Any]) -> Iterator[Any]:
    even, lengths, certain, replica = evened
    if not certain:
        if even.trainer.training:
            return _until_one_ends(even, batches, min(lengths))
        most = sys.maxsize if _UNKNOWN in lengths else max(lengths)
        return _until_all_end(even, batches, even.limit(most))
    if even.trainer.training:
        return (batch for _, batch in zip(range(min(lengths)), batches, strict=False))
    takes = [even.limit(length) for length in lengths]
    if 0 in takes and any(takes):
        raise BatchError(
            f"Data-parallel replicas have {_say(takes)} batches to evaluate, but one without any cannot take part."
            " Give every replica a batch, or use fewer replicas."
        )
    return _filled_up(even, batches, takes[replica], max(takes))


def _until_one_ends(even: EvenBatches, batches: Iterator[Any], said: int) -> Iterator[Any]:
    """The batches of a training loader of uncertain length: as long as all replicas have one."""
    for index in itertools.count():
        batch = next(batches, _NOTHING)
        if even.count(batch is not _NOTHING) < even.num_replicas:
            if index < said:
                rank_zero_warn(
                    f"A loader has {said} batches by its length, but a data-parallel replica had {index}. The epoch"
                    " ends there, and Lightning does not validate at such an end. Correct or remove __len__."
                )
            return
        yield batch


def _until_all_end(even: EvenBatches, batches: Iterator[Any], limit: int) -> Iterator[Any]:
    """The batches of an evaluation loader of uncertain length, as long as any replica has one.

    Lightning stops asking at its own limit: no replica may ask the others once more than that.
    """
    holds_back, last = not reads_ahead(even.trainer), _NOTHING
    for _ in range(limit):
        batch = next(batches, _NOTHING)
        if even.count(batch is not _NOTHING) == 0:
            break
        if batch is _NOTHING and last is _NOTHING:
            raise BatchError("A data-parallel replica has nothing to evaluate. Give every replica a batch.")
        if batch is _NOTHING:
            even.run_beside(last)
            continue
        if not holds_back:
            yield batch
        elif last is not _NOTHING:
            yield last
        last = batch
    if holds_back and last is not _NOTHING:
        yield last


def _filled_up(even: EvenBatches, batches: Iterator[Any], own: int, most: int) -> Iterator[Any]:
    """The batches of a loader, the last one run again for every batch that the longest loader has more."""
    for index, batch in enumerate(batches, 1):
        if index == own:
            for _ in range(most - own):
                even.run_beside(batch)
        yield batch


def _is_certain(loader: Any) -> bool:
    """Whether a loader gives as many batches as it says, epoch after epoch. See [Note: uneven loaders]."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    cls = _plain_class(loader)
    reads_as_torch = cls.__iter__ is DataLoader.__iter__ and cls.__len__ is DataLoader.__len__
    return reads_as_torch and _is_known(loader.sampler) and _is_known(loader.batch_sampler)


def _is_known(sampler: Any) -> bool:
    """Whether a sampler, and what it takes samples from, is of torch or Lightning and no class of a user's."""
    while sampler is not None:
        if not {cls.__module__.partition(".")[0] for cls in type(sampler).__mro__} <= _KNOWN:
            return False
        sampler = getattr(sampler, "sampler", None)
    return True


def _count_every_sample_once(loader: Any) -> None:
    """Takes back the samples that a sampler repeats to give every replica as many: they would count twice in a mean."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return
    num_samples = len(sampler.dataset)  # type: ignore[arg-type]
    if num_samples >= sampler.num_replicas:  # a replica without any sample could not take part
        sampler.total_size = num_samples
        sampler.num_samples = len(range(sampler.rank, num_samples, sampler.num_replicas))


def _plain_class(loader: Any) -> Any:
    """The class of a loader before it was evened."""
    is_even = _KEY in getattr(loader, "__dict__", {})
    return type(loader).__mro__[1] if is_even else type(loader)


def _plain_length(loader: Any) -> int:
    cls = _plain_class(loader)
    return int(cls.__len__(loader)) if hasattr(cls, "__len__") else _UNKNOWN


def _say(lengths: list[int]) -> str:
    return " and ".join("an unknown number of" if n == _UNKNOWN else str(n) for n in lengths)


def run_beside(strategy: Any, batch: Any) -> None:
    """Runs an evaluation step so that other replicas can, and forgets it. See [Note: uneven loaders].

    Args:
        strategy: whose `validation_step`, `test_step` or `predict_step` it is.
        batch: as the loader gave it.
    """
    module = strategy.lightning_module
    stage = getattr(module.trainer.state.stage, "value", "")
    name = f"{stage}_step" if stage in ("test", "predict") else "validation_step"
    arguments = arguments_beside(module.trainer, name, batch)
    with strategy.monitored.beside(), scratch_results(module.trainer, name, arguments[0]), forgotten(module):
        getattr(strategy, name)(*arguments)


@contextmanager
def forgotten(module: "pl.LightningModule") -> Iterator[None]:
    """Forgets what metrics gather inside the context."""
    states = [(metric, metric_state(metric)) for metric in module.modules() if isinstance(metric, Metric)]
    try:
        yield
    finally:
        for metric, state in states:
            restore_metric_state(metric, state)
