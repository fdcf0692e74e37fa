# SPDX-License-Identifier: Apache-2.0
"""`StepTimer`: how long a rank's steps take, and how much of that it only waits for other ranks.

[Note: waiting]
Ranks that communicate in every step end their steps together, so the time of a step does not tell who was slow; the
time without waiting does. A rank waits where Python code waits for a collective (FSDP2, tensor parallelism, pipelines)
and, under DDP, between the last gradient of a backward and its end, where the reducer waits in C++. On the CPU waiting
blocks the thread and the clock tells; on CUDA the stream waits, and events around the waiting tell. Events are read
when a window ends, so a step costs no synchronization.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_3d.compat import replace_waits

Mark = float | torch.cuda.Event
Span = tuple[Mark, Mark]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one batch of the training loop, on one rank."""

    step_s: float
    """From its start to its end."""
    wait_s: float
    """Part of it that this rank waited for others."""
    loading_s: float
    """From the end of the batch before to its start, without waiting: loading data, other callbacks."""

    @property
    def busy_s(self) -> float:
        """What this rank took for itself."""
        return max(0.0, self.step_s - self.wait_s) + self.loading_s

    @property
    def wait_share(self) -> float:
        """Share of the step in which this rank waited for others."""
        return min(1.0, self.wait_s / self.step_s) if self.step_s else 0.0


@dataclass
class _Step:
    """Marks of one batch, not read yet."""

    began: Mark
    before: Span | None
    waits_before: list[Span]
    ended: Mark | None = None
    waits: list[Span] = field(default_factory=list)


class StepTimer:
    """Times the batches of a training loop on this rank. See [Note: waiting]."""

    def __init__(self, device: torch.device) -> None:
        """Times nothing yet.

        Args:
            device: where steps compute.
        """
        self._is_cuda = device.type == "cuda"
        self._steps: list[_Step] = []
        self._current: _Step | None = None
        self._ended: Mark | None = None
        self._waits_between: list[Span] = []
        self._last_gradient: Mark | None = None
        self._hooks: list[Any] = []

    def start(self, module: nn.Module | None) -> None:
        """Begins to see waiting.

        Args:
            module: what the strategy trains; if it is DDP's, waiting in its reducer is seen too.
        """
        _WATCH.add(self)
        if isinstance(module, DistributedDataParallel):
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
                for parameter in module.parameters()
                if parameter.requires_grad
            ]

    def stop(self) -> None:
        """Undoes `start`."""
        _WATCH.discard(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def begin_step(self) -> None:
        """A batch begins."""
        now = self._mark()
        before = None if self._ended is None else (self._ended, now)
        self._current = _Step(now, before, self._waits_between)
        self._waits_between = []

    def end_step(self) -> None:
        """A batch ends."""
        self._ended = self._mark()
        if self._current is not None:
            self._current.ended = self._ended
            self._steps.append(self._current)
        self._current = None

    def end_backward(self) -> None:
        """A backward ends: under DDP, what lies behind its last gradient was waiting."""
        if self._last_gradient is not None and self._current is not None:
            self._current.waits.append((self._last_gradient, self._mark()))
        self._last_gradient = None

    def leave_out(self) -> None:
        """What lies between the last batch and the next one is no part of training: a validation, a checkpoint."""
        self._ended = None
        self._waits_between = []

    def take(self) -> list[StepTime]:
        """The steps since the last call; on CUDA this waits for the device."""
        steps, self._steps = self._steps, []
        return [_read(step) for step in steps]

    def around_wait(self, wait: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls something that waits for other ranks."""
        if (self._current is None and self._ended is None) or not _is_computing_thread():
            return wait(*args, **kwargs)
        start = self._mark()
        try:
            return wait(*args, **kwargs)
        finally:
            waits = self._waits_between if self._current is None else self._current.waits
            waits.append((start, self._mark()))

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._last_gradient = self._mark()

    def _mark(self) -> Mark:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _read(step: _Step) -> StepTime:
    assert step.ended is not None
    between = 0.0 if step.before is None else _seconds(step.before) - sum(map(_seconds, step.waits_before))
    return StepTime(
        step_s=_seconds((step.began, step.ended)),
        wait_s=sum(map(_seconds, step.waits)),
        loading_s=max(0.0, between),
    )


def _seconds(span: Span) -> float:
    start, end = span
    if isinstance(start, float) or isinstance(end, float):
        return float(end) - float(start)  # type: ignore[arg-type]  # marks of one timer are of one kind
    end.synchronize()
    return start.elapsed_time(end) / 1000


def _is_computing_thread() -> bool:
    """Whether this is the thread that trains, or one of autograd's; not one that saves a checkpoint."""
    thread = threading.current_thread()
    return thread is threading.main_thread() or thread.name.startswith("Dummy")


class _Watch:
    """The one replacement of torch's waiting in this process, for all timers."""

    def __init__(self) -> None:
        self._timers: list[StepTimer] = []
        self._restore: Callable[[], None] | None = None
        self._thread = threading.local()

    def add(self, timer: StepTimer) -> None:
        self._timers.append(timer)
        if self._restore is None:
            self._restore = replace_waits(self._around)

    def discard(self, timer: StepTimer) -> None:
        self._timers = [each for each in self._timers if each is not timer]
        if not self._timers and self._restore is not None:
            self._restore()
            self._restore = None

    def _around(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            # Functional collectives wait for a `Work` inside; it counts once.
            if getattr(self._thread, "is_waiting", False) or not self._timers:
                return wait(*args, **kwargs)
            self._thread.is_waiting = True
            call = wait
            for timer in self._timers:
                call = _bound(timer, call)
            try:
                return call(*args, **kwargs)
            finally:
                self._thread.is_waiting = False

        return timed


def _bound(timer: StepTimer, call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: timer.around_wait(call, *args, **kwargs)


_WATCH = _Watch()
