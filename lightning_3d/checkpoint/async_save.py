# SPDX-License-Identifier: Apache-2.0
"""Saving while training goes on: a copy in memory, then a thread that writes it.

[Note: when the copy is taken] Parameters and optimizer state change in an optimizer step only, so their copy may be
made by the thread while the next forward and backward run, if the optimizer waits for it (`wait_staged`). Buffers
change in a forward pass and are copied before `save` returns.

[Note: one group, one save] Two saves at once on one process group wait for each other for ever, and so does a save
beside training's own collectives. The writer has a gloo group of its own, and a save waits for the one before it;
a second name for the same state (`same_state`) is written from the same copy, after it, and waits for nothing.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_3d.checkpoint.agreement import Ranks
from lightning_3d.checkpoint.metadata import Document, encode_metadata
from lightning_3d.checkpoint.places import PathLike, Place, place_of
from lightning_3d.checkpoint.save import Snapshot, take_snapshot, write_snapshot
from lightning_3d.checkpoint.shards import ShardedTensor
from lightning_3d.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How `Trainer.save_checkpoint(path, storage_options=SaveOptions(...))` saves under a `lightning_3d` strategy."""

    background: bool = True
    """Write while training goes on."""


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What a finished save took."""

    path: Place
    num_bytes: int
    """Of this rank's tensors."""
    seconds: float
    """From the call to the whole checkpoint."""


@dataclass(kw_only=True)
class _Job:
    """One checkpoint to write."""

    final: Place
    snapshot: Snapshot
    metadata: Callable[[], Document | None]
    """Gives the encoded metadata, or raises what encoding it raised."""
    late: frozenset[str] = frozenset()
    """Tensors that the thread copies."""
    ready: Any = None
    """Event on the GPU's stream after which the late tensors may be read."""
    after: list[Callable[[], None]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    written_bytes: int = 0

    def add_bytes(self, count: int) -> None:
        """Something was written."""
        self.written_bytes += count

    @property
    def num_bytes(self) -> int:
        pieces = (piece for tensor in self.snapshot.tensors.values() for piece in tensor.pieces)
        return sum(piece.local.numel() * piece.local.element_size() for piece in pieces)


class AsyncCheckpointer:
    """Writes checkpoints in the background, one at a time.

    `save`, `wait` and `close` are collective: all ranks call them in the same order. The writer is no daemon: a
    process that ends normally, or by an exception, ends when its last checkpoint is whole.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Makes the writer's process group; collective.

        Args:
            process_group: the ranks that save; the default group if None.
        """
        ranks = Ranks.of(process_group)
        if ranks.group is not None:
            members = dist.get_process_group_ranks(ranks.group)
            ranks = Ranks(dist.new_group(members, backend="gloo", use_local_synchronization=True))
        self._ranks = ranks
        self._copies: dict[str, ShardedTensor] = {}
        self._copied = False
        self._thread: threading.Thread | None = None
        self._staged = threading.Event()
        self._staged.set()
        self._lock = threading.Lock()
        self._jobs: list[_Job] = []
        self._last: tuple[Snapshot, tuple[Any, ...]] | None = None
        self._error: BaseException | None = None
        self.reports: list[SaveReport] = []
        """Of finished saves, the latest last; whoever shows them takes them out."""

    @property
    def in_flight(self) -> Place | None:
        """The checkpoint that is being written, if any."""
        with self._lock:
            return self._jobs[0].final if self._jobs else None

    def progress(self) -> float:
        """Share of this rank's data of the checkpoint in flight that is written; 1 if there is none."""
        with self._lock:
            job = self._jobs[0] if self._jobs else None
        return 1.0 if job is None else min(1.0, job.written_bytes / max(1, job.num_bytes))

    def save(
        self,
        path: PathLike,
        *,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        metadata: Mapping[str, Any],
        overlap: bool = False,
        same_state: bool = False,
        **options: Any,
    ) -> None:
        """Copies the state and returns; the checkpoint is whole after `wait`. Waits for the save before it.

        Args:
            path: see `save_checkpoint`, as for the rest.
            model: as there.
            optimizers: as there.
            metadata: as there.
            overlap: copy parameters and optimizer state in the background too. The caller must call `wait_staged`
                before anything changes them.
            same_state: model and optimizers are as at the save before, on every rank: if the options are too, its copy
                is written a second time, with this metadata. Does not wait, and errors come with `wait`.
            options: `rank_metadata`, `aliases`, `model_keys`, `entries`, `beside`, as there.

        Raises:
            CheckpointError: on every rank, when this state has no safe form or the save before it failed.
        """
        final = place_of(path)
        kind = (
            len(optimizers),
            options.get("model_keys"),
            frozenset(options.get("entries") or ()),
            frozenset(options.get("beside") or ()),
        )
        if same_state and self._last is not None and self._last[1] == kind:
            document = _attempt(lambda: encode_metadata(metadata) if self._ranks.is_first else None)
            self._enqueue(_Job(final=final, snapshot=self._last[0], metadata=document))
            return
        self.wait()
        snapshot = self._ranks.together(
            f"collecting the state for {final}",
            lambda: take_snapshot(model, optimizers, metadata if self._ranks.is_first else None, **options),
        )
        late = frozenset(snapshot.tensors.keys() - snapshot.volatile if overlap else ())
        self._copies = {name: copy for name, copy in self._copies.items() if name in snapshot.tensors}
        self._copied = False
        self._copy(snapshot, snapshot.tensors.keys() - late, _gpu_events(snapshot))
        job = _Job(
            final=final,
            snapshot=snapshot,
            metadata=lambda: snapshot.metadata,
            late=late,
            ready=_gpu_events(snapshot),
        )
        self._last = (snapshot, kind)
        self._staged.clear()
        self._enqueue(job)
        if not overlap:
            self._staged.wait()

    def _enqueue(self, job: _Job) -> None:
        with self._lock:
            self._jobs.append(job)
            if len(self._jobs) == 1:
                self._thread = threading.Thread(target=self._write_all, name="checkpoint-writer")
                self._thread.start()

    def wait_staged(self) -> None:
        """Returns when the state is copied and may change; local, immediate when nothing is being copied."""
        self._staged.wait()

    def wait(self) -> None:
        """Returns when the last save is whole.

        Raises:
            CheckpointError: on every rank, when it failed; the checkpoint before it is untouched.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def after_commit(self, action: Callable[[], None]) -> None:
        """Runs `action` when the last save is whole, or now if it is; not at all if that save failed.

        For deleting an older checkpoint, which is the only whole one until then.
        """
        with self._lock:
            if self._jobs:
                self._jobs[-1].after.append(action)
                return
        if self._error is None:
            action()

    def close(self) -> None:
        """Waits for the last save, then frees the copies and the process group.

        Raises:
            CheckpointError: see `wait`.
        """
        try:
            self.wait()
        finally:
            self._copies, self._last = {}, None
            if self._ranks.group is not None:
                dist.destroy_process_group(self._ranks.group)
                self._ranks = Ranks(None)

    def _copy(self, snapshot: Snapshot, names: Any, ready: Mapping[torch.device, Any]) -> None:
        """Copies tensors to the host; from a GPU on a stream of its own, beside what training computes."""
        streams: dict[torch.device, Any] = {device: torch.Stream(device) for device in ready}
        for device, stream in streams.items():
            stream.wait_event(ready[device])
        for name in names:
            tensor = snapshot.tensors[name]
            stream = next((streams.get(piece.local.device) for piece in tensor.pieces), None)
            with stream if stream is not None else nullcontext():
                self._copies[name] = tensor.copied(self._copies.get(name))
        for stream in streams.values():
            stream.synchronize()

    def _write_all(self) -> None:
        """The writer thread: one job after the other, until none is left."""
        while True:
            job = self._jobs[0]
            failed = False
            try:
                self._write(job)
            except BaseException as error:
                self._error, failed = self._error or error, True
            while True:
                with self._lock:
                    actions, job.after = job.after, []
                    if failed or not actions:
                        self._jobs.pop(0)
                        if not self._jobs:
                            return
                        break
                for action in actions:
                    try:
                        action()
                    except Exception as error:  # told by `wait`; the thread has other saves to write
                        self._error = self._error or error

    def _write(self, job: _Job) -> None:
        snapshot = job.snapshot

        try:
            if job.ready is not None:
                self._ranks.together(
                    f"copying the state for {job.final}", lambda: self._copy(snapshot, job.late, job.ready)
                )
                self._copied = True
        finally:
            self._staged.set()
        if not self._copied:
            raise CheckpointError(
                f"{job.final} has nothing to write: the copy of the state before it failed."
            )
        metadata = self._ranks.together(f"collecting the state for {job.final}", job.metadata)
        snapshot = replace(snapshot, tensors=self._copies, metadata=metadata)
        write_snapshot(job.final, snapshot, self._ranks, job.add_bytes)
        self.reports.append(
            SaveReport(path=job.final, num_bytes=job.num_bytes, seconds=time.monotonic() - job.started)
        )


def _gpu_events(snapshot: Snapshot) -> dict[torch.device, Any]:
    """For each GPU that holds state, an event after everything that was queued there until now."""
    pieces = (piece for tensor in snapshot.tensors.values() for piece in tensor.pieces)
    devices = {piece.local.device for piece in pieces if piece.local.is_cuda}
    return {device: torch.cuda.current_stream(device).record_event() for device in devices}


def _attempt(make: Callable[[], Document | None]) -> Callable[[], Document | None]:
    """Runs `make` now; its error comes where the result is asked for."""
    try:
        document = make()
    except Exception as caught:
        error = caught

        def fail() -> Document | None:
            raise error

        return fail
    return lambda: document
