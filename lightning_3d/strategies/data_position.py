# SPDX-License-Identifier: Apache-2.0
"""Where the training data stand, in samples of the whole world, so that any number of replicas goes on from there.

A replica's batches depend on how many replicas there are; the order of the epoch does not. So a checkpoint says how
many samples of that order all replicas together have trained on, and a resumed loader leaves them out.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

Position = dict[str, Any]
"""`{"samples": of all replicas, "batches": of one, "replicas": ..., "rng", "generator": where its order came from}`."""


class RecordingSampler:
    """A sampler that remembers the random state from which an epoch's order was drawn."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.random: dict[str, torch.Tensor] = {}

    def __iter__(self) -> Iterator[Any]:
        self.random = {"rng": torch.get_rng_state()}
        if getattr(self.sampler, "generator", None) is not None:
            self.random["generator"] = self.sampler.generator.get_state()
        yield from self.sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.sampler, name)


class _Rest:
    """The samples of a replica, or the batches, that a resumed epoch has left; as long as the whole epoch."""

    def __init__(self, sampler: Any, position: Position, count: int) -> None:
        self._sampler, self._position, self._count = sampler, position, count

    def __iter__(self) -> Iterator[Any]:
        inner = self._sampler
        if isinstance(inner, DistributedSampler):
            return iter(_share(inner, self._position["samples"]))
        return self._others(inner)

    def _others(self, inner: Any) -> Iterator[Any]:
        random, now = self._position.get("random") or {}, torch.get_rng_state()
        generator = getattr(inner, "generator", None)
        if "rng" in random:
            torch.set_rng_state(random["rng"])
        if generator is not None and "generator" in random:
            generator.set_state(random["generator"])
        items = iter(inner)
        skipped = [item for _, item in zip(range(self._count), items, strict=False)]
        if "rng" in random and skipped:
            torch.set_rng_state(now)
        yield from items

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)


def _share(sampler: Any, consumed: int) -> list[Any]:
    """This replica's part of what is left of a DistributedSampler's epoch: every n-th sample, ends even."""
    whole = copy.copy(sampler)
    whole.num_replicas, whole.rank = 1, 0
    whole.num_samples = whole.total_size = len(sampler.dataset)
    order = list(whole)
    rest = order[consumed:]
    surplus = len(rest) % sampler.num_replicas
    if surplus and sampler.drop_last:
        rest = rest[:-surplus]
    elif surplus:
        missing = sampler.num_replicas - surplus
        rest += (order * (missing // len(order) + 1))[:missing]
    return rest[sampler.rank :: sampler.num_replicas]


def record_order(loader: Any) -> None:
    """Makes a loader whose order comes from a random state remember it; in place, once."""
    sampler = _sampler_of(loader)
    plain = (DistributedSampler, SequentialSampler, RecordingSampler)
    if sampler is None or isinstance(sampler, plain) or is_stateful(loader) or loader.batch_size is None:
        return
    _replace_sampler(loader, RecordingSampler(sampler))


def is_stateful(loader: Any) -> bool:
    """Whether a loader resumes by a state of its own."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


@dataclass(kw_only=True)
class Progress:
    """How far an epoch has come."""

    num_batches: int
    """Batches of each replica in this epoch."""
    since: Position | None = None
    """Where this epoch was resumed, if it was."""

    def position(self, loader: Any, replicas: int) -> Position:
        """Where a loader stands.

        Args:
            loader: a train loader.
            replicas: data-parallel replicas.
        """
        sampler = _sampler_of(loader)
        if self.num_batches == 0 or sampler is None or is_stateful(loader):
            return {}
        since = self.since or {}
        batches = self.num_batches - since.get("batches", 0)
        samples = batches * (loader.batch_size or 1) * replicas
        position = {
            "samples": since.get("samples", 0) + samples,
            "batches": self.num_batches,
            "replicas": replicas,
        }
        if isinstance(sampler, RecordingSampler):
            position["random"] = sampler.random
        return position


class ResumedLoader:
    """A loader whose current epoch leaves out what was trained on before."""

    def __init__(self, loader: Any, position: Position, replicas: int) -> None:
        self.loader = loader
        self.position = position
        self._sampler = _sampler_of(loader)
        self._added: list[str] = []
        if not position or self._sampler is None:
            return
        if loader.batch_size is None:  # the user's batches, of a size that is not ours to know
            self._put(_Rest(self._sampler, position, position["batches"]))
        else:
            per_replica = position["samples"] // replicas
            distributed = isinstance(self._sampler, DistributedSampler)
            if not distributed and position["replicas"] != replicas:
                rank_zero_warn(
                    f"{type(self._sampler).__name__} was read by {position['replicas']} replicas and is read by "
                    f"{replicas} now: how it divides samples is its own, so some may be seen twice or not at all in "
                    "this epoch. Use a DistributedSampler, or Trainer(use_distributed_sampler=True).",
                    stacklevel=8,
                )
            self._put(_Rest(self._sampler, position, per_replica))
        self._say_resumable()

    def num_batches_done(self, replicas: int) -> int:
        """Batches of the present size that the samples before the position would have made."""
        if not self.position or self.loader.batch_size is None:
            return int(self.position.get("batches", 0))
        step = (self.loader.batch_size or 1) * replicas
        return -(-self.position["samples"] // step)

    def end(self) -> None:
        """Gives the loader back as it was; the iterator in use keeps what it has."""
        if self.position and self._sampler is not None:
            self._put(self._sampler)
        for name in self._added:
            self.loader.__dict__.pop(name, None)

    def _put(self, sampler: Any) -> None:
        _replace_sampler(self.loader, sampler)

    def _say_resumable(self) -> None:
        """Lightning warns of loaders in the middle of an epoch that have no state of their own."""
        if not is_stateful(self.loader):
            self._added = ["state_dict", "load_state_dict"]
            self.loader.__dict__.update(state_dict=dict, load_state_dict=lambda state: None)


def _batches_are_the_users(loader: Any) -> bool:
    return loader.batch_size is None and loader.batch_sampler is not None


def _sampler_of(loader: Any) -> Any:
    """What decides the order of a loader with an index: its sampler, or the user's batch sampler."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if _batches_are_the_users(loader):
        return loader.batch_sampler
    batch_sampler: Any = loader.batch_sampler
    return loader.sampler if batch_sampler is None else batch_sampler.sampler


def _replace_sampler(loader: Any, sampler: Any) -> None:
    """A DataLoader refuses to be given a sampler; its batch sampler does not."""
    if _batches_are_the_users(loader):
        loader.__dict__["batch_sampler"] = sampler
    elif loader.batch_sampler is not None:
        loader.batch_sampler.sampler = sampler
    else:
        loader.__dict__["sampler"] = sampler
