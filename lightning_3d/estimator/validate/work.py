# SPDX-License-Identifier: Apache-2.0
"""A measured step: what was run, where, and how long it took."""

from dataclasses import dataclass

from lightning_3d.estimator.layout import Layout, Workload
from lightning_3d.hardware import Cluster
from lightning_3d.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class TimedWork:
    """One measured step."""

    source: str
    shape: ModelShape
    workload: Workload
    layout: Layout
    cluster: Cluster
    measured_s: float
