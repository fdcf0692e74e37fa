# SPDX-License-Identifier: Apache-2.0
"""How the ranks that share a checkpoint do a step together: what fails on one fails on all, with one message."""

import hashlib
import logging
import pickle
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from lightning_3d.errors import CheckpointError

T = TypeVar("T")
_log = logging.getLogger(__name__)
_own_groups: list[tuple[dist.ProcessGroup, dist.ProcessGroup]] = []
"""The default group without a CPU backend that was met last, and the gloo group beside it."""


class Ranks:
    """The ranks of a process group that works on CPU tensors, or this process alone.

    Every method with a group behind it is collective: all ranks call it, in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None) -> "Ranks":
        """The given group, else the default group, else (where that has no CPU backend) a gloo group of our own."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(None)
        group = process_group if process_group is not None else dist.group.WORLD
        if group is None or "cpu:" in dist.get_backend_config(group):
            return cls(group)
        if process_group is not None:
            raise CheckpointError(
                f"The process group of a checkpoint needs a CPU backend, not {dist.get_backend(group)}. "
                "Make it with backend='gloo' or 'cpu:gloo,cuda:nccl', or give none."
            )
        if not _own_groups or _own_groups[0][0] is not group:
            _own_groups[:] = [(group, dist.new_group(backend="gloo"))]
        return cls(_own_groups[0][1])

    @property
    def is_first(self) -> bool:
        """Whether this rank decides where one has to."""
        return self.rank == 0

    def all_gather(self, value: T) -> list[T]:
        """One value of each rank, on every rank.

        Raises:
            CheckpointError: a rank is gone.
        """
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            raise CheckpointError(f"Lost a rank in the middle of a checkpoint: {error}") from error
        return cast(list[T], values)

    def broadcast(self, value: T) -> T:
        """The first rank's value, on every rank."""
        return self.all_gather(value if self.is_first else cast(T, None))[0]

    def gather_distinct(self, value: T | None) -> list[T]:
        """The different values among the ranks, on every rank; each travels once, however many ranks hold it.

        None is no value.
        """
        digest = hashlib.sha256(pickle.dumps(value)).digest()
        digests = self.all_gather(digest)
        return [
            item
            for item in self.all_gather(value if digests.index(digest) == self.rank else None)
            if item is not None
        ]

    def together(self, doing: str, step: Callable[[], T]) -> T:
        """Runs `step` on every rank and returns this rank's result, if it went well on all.

        Args:
            doing: the step's name for the message, as in "writing tensors".
            step: local work, no collectives.

        Raises:
            CheckpointError: on every rank with the same text, when `step` raised on any.
        """
        result: T | None = None
        error: BaseException | None = None
        try:
            result = step()
        except BaseException as caught:  # an interrupt too must not leave the others waiting
            error = caught
        failures = self.all_gather(None if error is None else describe(error))
        if error is not None and not isinstance(error, Exception):
            raise error
        if any(failures):
            if error is not None:
                _log.debug("rank %d failed while %s", self.rank, doing, exc_info=error)
            raise CheckpointError(summary(doing, failures)) from error
        return cast(T, result)


def describe(error: BaseException) -> str:
    """An error as text; our own messages stand for themselves."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def summary(doing: str, failures: Iterable[str | None]) -> str:
    """One message of what went wrong where; the same text of several ranks once."""
    ranks_of: dict[str, list[int]] = {}
    everywhere = True
    for rank, failure in enumerate(failures):
        if failure is None:
            everywhere = False
        else:
            ranks_of.setdefault(failure, []).append(rank)
    if everywhere and len(ranks_of) == 1:
        return f"While {doing}: {next(iter(ranks_of))}"
    parts = (f"[rank {', '.join(map(str, ranks))}] {text}" for text, ranks in ranks_of.items())
    return f"While {doing}: " + "; ".join(parts)


def listed(names: Iterable[str], limit: int = 8) -> str:
    """Names for a message, sorted; a long list is cut."""
    names = sorted(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
