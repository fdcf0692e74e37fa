# SPDX-License-Identifier: Apache-2.0
"""Callbacks: Lightning's hooks, translated into calls on the rest of the package."""

from lightning_3d.callbacks.async_checkpoint import AsyncCheckpoint
from lightning_3d.callbacks.comm_trace import CommTrace
from lightning_3d.callbacks.link_check import LinkCheck
from lightning_3d.callbacks.memory_trace import MemoryTrace
from lightning_3d.callbacks.oom_advisor import OOMAdvisor
from lightning_3d.callbacks.straggler import StragglerMonitor
from lightning_3d.callbacks.throughput import ThroughputMonitor

__all__ = [
    "AsyncCheckpoint",
    "CommTrace",
    "LinkCheck",
    "MemoryTrace",
    "OOMAdvisor",
    "StragglerMonitor",
    "ThroughputMonitor",
]
