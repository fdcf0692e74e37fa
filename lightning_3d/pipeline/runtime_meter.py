# SPDX-License-Identifier: Apache-2.0
"""Measures how much of a pipeline step a rank computes and how much it waits: the bubble as it is."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepMeter:
    """Times the actions of one run: on CUDA by events on the compute stream, elsewhere by the clock.

    On CUDA the stream waits for what it receives between actions, so events around actions leave waiting out; reading
    the times synchronizes, taking them does not.
    """

    def __init__(self, device: torch.device) -> None:
        """Args: device: where the stages compute."""
        self._is_cuda = device.type == "cuda"
        self._compute_s = self._total_s = self._start_s = 0.0
        self._actions: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._run: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    @contextmanager
    def action(self) -> Iterator[None]:
        """Around one computation."""
        if self._is_cuda:
            events = _events()
            events[0].record()
            yield
            events[1].record()
            self._actions.append(events)
            return
        start_s = time.perf_counter()
        yield
        self._compute_s += time.perf_counter() - start_s

    @contextmanager
    def run(self) -> Iterator[None]:
        """Around one run of a schedule."""
        if self._is_cuda:
            self._run = _events()
            self._run[0].record()
            yield
            self._run[1].record()
            return
        start_s = time.perf_counter()
        yield
        self._total_s = time.perf_counter() - start_s

    def read(self) -> tuple[float, float]:
        """Seconds in actions, and seconds of the whole run."""
        if self._run is not None:
            self._run[1].synchronize()
            self._compute_s = sum(start.elapsed_time(end) for start, end in self._actions) / 1000
            self._total_s = self._run[0].elapsed_time(self._run[1]) / 1000
            self._actions, self._run = [], None
        return self._compute_s, self._total_s


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return start, end
