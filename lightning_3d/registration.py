# SPDX-License-Identifier: Apache-2.0
"""Makes `Trainer(strategy="3d")` work after `import lightning_3d`, in whatever order the two are imported.

This package imports neither torch nor Lightning when it is imported, so that planning starts in milliseconds. The names
are registered at once if Lightning is there already, and otherwise right after Lightning itself is imported, be it as
`lightning` or as `pytorch_lightning`. An installed package is imported at the end of `import torch` (an entry point of
the group `torch.backends`), so that a YAML file may say `strategy: 3d` where no code imports this package.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_REGISTRIES = {
    "lightning.pytorch.strategies": "lightning_3d.strategies",
    "pytorch_lightning.strategies": "lightning_3d.pytorch_lightning",
}
"""Module with Lightning's registry -> ours with the classes for it."""

STRATEGIES = {
    "3d": ("ThreeDStrategy", "pipeline x data (replicate x shard) x tensor parallel on one mesh"),
    "hybrid_shard": ("HybridShardStrategy", "FSDP2: shard inside the node, replicate across nodes"),
    "tensor_parallel": ("TensorParallelStrategy", "Megatron tensor and sequence parallel inside the node"),
    "pipeline": ("PipelineStrategy", "1F1B, GPipe or interleaved pipeline over all ranks"),
    "zero_offload": ("ZeroOffloadStrategy", "DeepSpeed ZeRO 1, 2 or 3, optimizer state in host memory"),
    "zero_infinity": ("ZeroInfinityStrategy", "DeepSpeed ZeRO 3, optimizer state on a local disk"),
}
"""Name of a strategy -> class in `lightning_3d.strategies`, and what it does."""


def register_strategies() -> None:
    """Registers the strategies now, or as soon as Lightning is imported."""
    for name in _REGISTRIES:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "StrategyRegistry"):
            _register(module)
        elif not any(isinstance(finder, _AfterImport) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterImport(name))


def autoload() -> None:
    """What torch calls at the end of its import: importing this package has done it, and must never break torch."""
    with suppress(Exception):
        register_strategies()


def _register(module: ModuleType) -> None:
    for name, (class_name, description) in STRATEGIES.items():
        make = _factory(_REGISTRIES[module.__name__], class_name)
        module.StrategyRegistry.register(name, make, description=description, override=True)


def _factory(module_name: str, class_name: str) -> Any:
    """Imports the strategies only when one is made: Lightning is still being imported when names are registered."""

    def make(**options: Any) -> Any:
        return getattr(importlib.import_module(module_name), class_name)(**options)

    return make


class _AfterImport(MetaPathFinder):
    """Runs `_register` behind the import of one of Lightning's registries, then gets out of the way."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    """Delegates to the real loader and registers once the module has run."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See `importlib.abc.Loader`."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib.abc.Loader`."""
        self._loader.exec_module(module)
        _register(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # resource readers and tracebacks ask the loader for more
