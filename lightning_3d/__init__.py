# SPDX-License-Identifier: Apache-2.0
"""Every parallel dimension for PyTorch Lightning, behind one word: `Trainer(strategy="3d")`.

Importing this package registers its strategies and imports neither torch nor Lightning.
"""

from importlib import import_module
from typing import Any

from lightning_3d.registration import register_strategies

__version__ = "0.1.0"

_PUBLIC = {
    "ParallelPlan": "lightning_3d.plan",
    "ThreeDStrategy": "lightning_3d.strategies",
    "HybridShardStrategy": "lightning_3d.strategies",
    "TensorParallelStrategy": "lightning_3d.strategies",
    "PipelineStrategy": "lightning_3d.strategies",
    "ZeroInfinityStrategy": "lightning_3d.strategies",
    "ZeroOffloadStrategy": "lightning_3d.strategies",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register_strategies()
