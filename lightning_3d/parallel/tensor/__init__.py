# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallelism: parameters as DTensors, activations as plain tensors with explicit collectives."""

from lightning_3d.parallel.tensor.apply import TensorParallel, apply_tp, resolve_tp
from lightning_3d.parallel.tensor.logits import VocabParallelLogits

__all__ = ["TensorParallel", "VocabParallelLogits", "apply_tp", "resolve_tp"]
