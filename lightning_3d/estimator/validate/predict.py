# SPDX-License-Identifier: Apache-2.0
"""Predictions for the rows of published runs, in the terms that each row prints."""

import re

from lightning_3d.estimator.memory import MEMORY_MARGIN, MemoryEstimate, MemoryModel
from lightning_3d.estimator.states import VOCAB_MULTIPLE
from lightning_3d.estimator.step_time import StepTimeModel
from lightning_3d.estimator.validate.runs import Run
from lightning_3d.estimator.validate.work import TimedWork
from lightning_3d.models.parameters import total_parameters
from lightning_3d.units import GIB

TRILLION_B = 1000.0
"""Billions from which tables print two digits."""


def parameter_error(run: Run) -> float | None:
    """Relative error of the count, beyond the rounding of what the row prints.

    A printed 70.55 stands for anything from 70.545 to 70.555, and 1000 for one with two digits (a trillion).
    """
    text = run.printed_parameters_b
    if not re.fullmatch(r"\d+(\.\d+)?", text or ""):
        return None
    printed = float(text)
    digits = len(text.split(".")[1]) if "." in text and not text.endswith(".0") else 0
    digits = -2 if printed >= TRILLION_B else digits
    off = abs(total_parameters(run.shape) / 1e9 - printed)
    return max(0.0, off - 0.5 * 10.0**-digits) / printed


def estimate_of(run: Run) -> MemoryEstimate:
    """The estimate of the rank that the row's memory is of."""
    model = MemoryModel(run.shape, run.workload, vocab_multiple=VOCAB_MULTIPLE)
    return model.stage(run.layout, run.layout.pp - 1) if run.memory_kind == "last" else model.peak(run.layout)


def predicted_memory_bytes(run: Run) -> float:
    """The memory in the terms of the row: allocated, reserved, or what nvidia-smi shows."""
    estimate = estimate_of(run)
    if run.memory_kind == "device":
        if run.device_calibration is not None:
            scale, gib = run.device_calibration
            return scale * estimate.allocated_bytes + gib * GIB
        return estimate.device_bytes
    return estimate.reserved_bytes if run.memory_kind == "reserved" else estimate.allocated_bytes


def predicted_step_s(work: Run | TimedWork) -> float:
    """Seconds of a step."""
    return StepTimeModel(work.shape, work.workload, work.cluster).estimate(work.layout).step_s


def fits_device(run: Run, margin: float = MEMORY_MARGIN) -> bool:
    """Whether the fullest rank fits into a share of its device: the planner's, if none is given."""
    model = MemoryModel(run.shape, run.workload, vocab_multiple=VOCAB_MULTIPLE)
    return model.peak(run.layout).device_bytes <= run.cluster.gpu.memory_bytes * margin
