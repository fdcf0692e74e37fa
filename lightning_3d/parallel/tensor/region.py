# SPDX-License-Identifier: Apache-2.0
"""Random numbers: the same on all tp ranks for replicated activations, different ones for sharded activations.

[Note: random state of a sharded region]
Entering a sharded region draws one integer from the default CPU generator, which is in the same state on all ranks of
a tp group. Mixed with the tp rank it seeds the generators; leaving restores the state behind that draw. Nothing else
is remembered, so recomputation under activation checkpointing, which restores the state that its forward began with,
draws the same integer and gets the same masks.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_GOLDEN = 0x9E3779B97F4A7C15
"""Spreads ranks over seeds (2^64 / golden ratio)."""
_SEEDS = 2**62


class ShardedRegion:
    """Whether the forward is in a sharded region, and the random state outside of it."""

    def __init__(self, *, rank: int, device_type: str, random: bool) -> None:
        """One for each model.

        Args:
            rank: of this process in the tp group.
            device_type: `cpu`, `cuda`...
            random: whether the model draws random numbers in its forward; without, nothing is ever seeded.
        """
        self.active = False
        self._rank = rank
        self._random = random
        self._device: Any = None if device_type == "cpu" else torch.get_device_module(device_type)
        self._outside: tuple[Tensor, Tensor | None] | None = None

    def begin(self, *, training: bool) -> None:
        """Enters the region, unless it is entered; the random state becomes this rank's own if numbers may be drawn."""
        if self.active:
            return
        self.active = True
        if not (self._random and training):
            return
        seed = (int(torch.randint(_SEEDS, ())) + _GOLDEN * (self._rank + 1)) % _SEEDS
        self._outside = (
            torch.get_rng_state(),
            None if self._device is None else self._device.get_rng_state(),
        )
        torch.default_generator.manual_seed(seed)
        if self._device is not None:
            self._device.manual_seed(seed)

    def end(self) -> None:
        """Leaves the region and restores the random state."""
        self.active = False
        if self._outside is None:
            return
        cpu, device = self._outside
        self._outside = None
        torch.set_rng_state(cpu)
        if device is not None:
            self._device.set_rng_state(device)

    @contextmanager
    def running(self, *, training: bool) -> Iterator[None]:
        """The region as a context."""
        self.begin(training=training)
        try:
            yield
        finally:
            self.end()


def draws_random_numbers(modules: Iterable[nn.Module]) -> bool:
    """Whether any module has dropout: a positive `p` of a dropout layer, or a positive float named like one."""
    return any(_has_dropout(module) for module in modules)


def _has_dropout(module: nn.Module) -> bool:
    if "dropout" in type(module).__name__.lower() and _is_rate(getattr(module, "p", None)):
        return True
    return any("drop" in name.lower() and _is_rate(value) for name, value in vars(module).items())


def _is_rate(value: Any) -> bool:
    return isinstance(value, float) and value > 0
