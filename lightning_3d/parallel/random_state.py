# SPDX-License-Identifier: Apache-2.0
"""Random numbers that do not depend on who computes what: one stream for each batch, replica and microbatch."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

_STEP_STRIDE = 1_000_003  # primes: streams of neighbouring steps and replicas do not meet
_REPLICA_STRIDE = 10_007
_STAGE_STRIDE = 100_003


def seed_for(base_seed: int, step: int, replica: int) -> int:
    """Seed of a replica's batch; add the number of the microbatch to it."""
    return (base_seed + step * _STEP_STRIDE + replica * _REPLICA_STRIDE) % 2**63


def enter_stage(seed: int, stage: int, device: torch.device) -> None:
    """Seeds anew where a stage's own blocks begin, inside `step_random_state`.

    What runs before the blocks draws the same numbers on all stages; the blocks of two stages must not, or their
    dropout masks would be the same.

    Args:
        seed: of this microbatch.
        stage: number of the stage.
        device: where the stage computes.
    """
    if stage > 0:
        _seed((seed + stage * _STAGE_STRIDE) % 2**63, device)


@contextmanager
def step_random_state(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds torch, Python and NumPy inside the context and restores their states behind it.

    The ranks of a replica run different parts of a step, some of them several times. What it draws is the same on all
    of them, and what is drawn between steps (augmentation, the order of a custom sampler) stays the same too.
    """
    devices = [device] if device.type == "cuda" else []
    states = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            _seed(seed, device)
            yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])


def _seed(seed: int, device: torch.device) -> None:
    """Seeds the generators of Python, NumPy, the host and the device.

    `torch.manual_seed` seeds every backend, and where CUDA has not begun it writes the whole stack down for later:
    milliseconds for each microbatch.
    """
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
