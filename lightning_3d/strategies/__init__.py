# SPDX-License-Identifier: Apache-2.0
"""Lightning strategies: one engine under several names."""

from lightning_3d.strategies.presets import HybridShardStrategy, PipelineStrategy, TensorParallelStrategy
from lightning_3d.strategies.three_d import ThreeDStrategy
from lightning_3d.strategies.zero_offload import ZeroInfinityStrategy, ZeroOffloadStrategy

__all__ = [
    "HybridShardStrategy",
    "PipelineStrategy",
    "TensorParallelStrategy",
    "ThreeDStrategy",
    "ZeroInfinityStrategy",
    "ZeroOffloadStrategy",
]
