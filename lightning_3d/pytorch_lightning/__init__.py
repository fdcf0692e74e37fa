# SPDX-License-Identifier: Apache-2.0
"""The strategies and callbacks for `import pytorch_lightning`, whose classes are not those of `lightning.pytorch`.

```python
import pytorch_lightning as pl
from lightning_3d.pytorch_lightning import ThreeDStrategy

trainer = pl.Trainer(strategy=ThreeDStrategy(tp=2), devices=2)
```

[Note: one source, two namespaces]
Lightning is published under two names with separate classes and separate registries: a Trainer takes strategies, and
calls callbacks, of its own namespace only. What here imports Lightning is imported a second time for the other name:
`lightning_3d.pytorch_lightning.strategies.three_d` is the file of `lightning_3d.strategies.three_d`, in which imports
from `lightning.pytorch` are from `pytorch_lightning`. All that does not import Lightning is shared.
"""

import ast
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from types import CodeType, ModuleType
from typing import Any

_OWN, _HERE = "lightning_3d", __name__
_TWINS = ("strategies", "callbacks", "compat_lightning")
"""Modules and packages of ours that import Lightning."""
_NAMES = {
    "lightning.pytorch": "pytorch_lightning",
    "lightning.fabric": "lightning_fabric",
    "lightning": "pytorch_lightning",
    **{f"{_OWN}.{name}": f"{_HERE}.{name}" for name in _TWINS},
}


def renamed(name: str) -> str:
    """A module's name in the other namespace."""
    for prefix, other in _NAMES.items():
        if name == prefix or name.startswith(f"{prefix}."):
            return other + name.removeprefix(prefix)
    return name


class _OtherImports(ast.NodeTransformer):
    """Renames what is imported, and keeps the names by which it is known in the file."""

    def visit_Import(self, node: ast.Import) -> ast.Import:
        for alias in node.names:
            other = renamed(alias.name)
            if other != alias.name:
                alias.asname = alias.asname or alias.name
                alias.name = other
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        if node.module:
            node.module = renamed(node.module)
        return node


class _TwinLoader(SourceFileLoader):
    """Compiles a file with other imports; nothing is cached beside it."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = _OtherImports().visit(ast.parse(self.get_data(path)))
        code: CodeType = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
        return code


class _TwinFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        inner = fullname.removeprefix(f"{_HERE}.")
        if inner == fullname or inner.partition(".")[0] not in _TWINS:
            return None
        original = find_spec(f"{_OWN}.{inner}")
        if original is None or original.origin is None:
            return None
        return spec_from_file_location(
            fullname,
            original.origin,
            loader=_TwinLoader(fullname, original.origin),
            submodule_search_locations=original.submodule_search_locations,
        )


def __getattr__(name: str) -> Any:
    """Strategies and callbacks by name."""
    for module_name in ("strategies", "callbacks"):
        if not name.startswith("_") and name not in _TWINS:
            module = importlib.import_module(f"{_HERE}.{module_name}")
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not any(isinstance(finder, _TwinFinder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _TwinFinder())
