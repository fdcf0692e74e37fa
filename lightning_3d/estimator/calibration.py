# SPDX-License-Identifier: Apache-2.0
"""One scale for time and one for memory of a cluster, from one measured run on it."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from lightning_3d.errors import PlanError
from lightning_3d.estimator.layout import STATE_BYTES, Layout, Workload
from lightning_3d.estimator.memory import MemoryModel
from lightning_3d.estimator.step_time import StepTimeModel
from lightning_3d.hardware import Cluster
from lightning_3d.shape import ModelShape


def calibrate(
    shape: ModelShape,
    cluster: Cluster,
    workload: Workload,
    layout: Layout,
    *,
    step_s: float | None = None,
    allocated_bytes: float | None = None,
) -> Cluster:
    """The cluster with the scales that make the estimate of one run equal to what was measured.

    Args:
        shape: model of the run.
        cluster: where it ran; its scales are replaced.
        workload: work of the run.
        layout: layout of the run.
        step_s: measured seconds of a step, after warm-up.
        allocated_bytes: measured peak of torch's `max_memory_allocated` of the fullest rank.

    Raises:
        PlanError: a measurement is not positive.
    """
    for name, value in (("step_s", step_s), ("allocated_bytes", allocated_bytes)):
        if value is not None and value <= 0:
            raise PlanError(f"{name}={value} is not a measurement. Give a positive number, or leave it out.")
    plain = replace(cluster, time_scale=1.0, memory_scale=1.0)
    time_scale = step_s / StepTimeModel(shape, workload, plain).estimate(layout).step_s if step_s else 1.0
    memory_scale = 1.0
    if allocated_bytes:
        memory_scale = allocated_bytes / MemoryModel(shape, workload).peak(layout).allocated_bytes
    return replace(cluster, time_scale=time_scale, memory_scale=memory_scale)


def calibrate_from_file(shape: ModelShape, cluster: Cluster, path: Path) -> Cluster:
    """`calibrate` with a run written as JSON.

    The file has `seq_len`, `global_batch` (or `batch_per_replica`), `layout` (fields of `Layout`), `step_s` and/or
    `allocated_bytes`, and optionally `matmul` and `states` (a name of `STATE_BYTES`).

    Raises:
        PlanError: the file does not read, or has unknown fields.
    """
    try:
        content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        layout = Layout(**content["layout"])
        names = {field.name for field in fields(Workload)} - {"states"}
        states = STATE_BYTES[content.get("states", "fsdp2-mixed")]
        workload = Workload(states=states, **{key: content[key] for key in names if key in content})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"measured run {path} does not read ({error!r}). Give JSON with seq_len, global_batch, layout, step_s"
            " and allocated_bytes."
        ) from error
    return calibrate(
        shape,
        cluster,
        workload,
        layout,
        step_s=content.get("step_s"),
        allocated_bytes=content.get("allocated_bytes"),
    )
