# SPDX-License-Identifier: Apache-2.0
"""What every test starts from and leaves behind: one thread, seeds, its own environment, no process group."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: see [Note: one thread] in harness.py
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import fsspec
import numpy
import pytest
import torch
import torch.distributed as dist

from lightning_3d import mesh
from tests.object_store import use_store
from tests.processes import PATIENCE

torch.set_num_threads(1)

DEFAULT_TIMEOUT_S = 150


@pytest.fixture(autouse=True)
def _restored_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _no_process_group_left() -> Iterator[None]:
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    mesh._KNOWN.clear()  # see [Note: what the parent had] in harness.py


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    """Address of an empty place in a store of objects that forked ranks share."""
    return use_store(tmp_path / "store")


@pytest.fixture
def memory() -> Iterator[str]:
    """Address of an empty place in the memory of one process."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield "memory://run"
    fs.store.clear()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that runs past its limit, `@pytest.mark.timeout(seconds)` or the default, times `PATIENCE`."""
    marker = item.get_closest_marker("timeout")
    limit_s = PATIENCE * (float(marker.args[0]) if marker else DEFAULT_TIMEOUT_S)

    def on_alarm(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{item.nodeid} ran longer than {limit_s:g} s. See pytest.mark.timeout.")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
