# SPDX-License-Identifier: Apache-2.0
"""The house rules that a tool can check and no linter does."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "lightning_3d").rglob("*.py"))
SOURCES = [
    *PACKAGE,
    *(
        path
        for folder in ("tests", "examples", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ),
]
WITHOUT_TORCH = (
    "advisor cli errors estimator hardware levers models plan planner schedules serving shape tp_styles trace units"
).split()
PRIVATE = re.compile(r"(torch|lightning|pytorch_lightning|dist)\.(\w+\.)*_[a-z]\w*(\.\w+)*$")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50


def test_files_are_licensed_described_and_short() -> None:
    faults = []
    for path in SOURCES:
        name, text = path.relative_to(ROOT), path.read_text()
        if not text and path.name == "__init__.py":
            continue
        docstring = ast.get_docstring(ast.parse(text))
        if not text.startswith("# SPDX-License-Identifier: Apache-2.0\n"):
            faults.append(f"{name}: the first line is not the SPDX line")
        if not docstring and path.name != "__init__.py":
            faults.append(f"{name}: no module docstring")
        num_lines = text.count("\n")
        if num_lines >= MAX_FILE_LINES and "longer than 400 lines" not in (docstring or ""):
            faults.append(
                f"{name}: {num_lines} lines; split it, or say why it is longer than 400 lines at its top"
            )
    assert not faults, "\n".join(faults)


def test_functions_are_short() -> None:
    faults = []
    for path in PACKAGE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
                num_lines = (body[-1].end_lineno or 0) - body[0].lineno + 1
                if num_lines >= MAX_FUNCTION_LINES:
                    faults.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {num_lines} lines")
    assert not faults, "\n".join(faults)


def private_names(tree: ast.Module) -> list[tuple[int, str]]:
    """Line and dotted name of each private name of torch or Lightning that is imported or reached."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        found.extend((node.lineno, name) for name in names if PRIVATE.match(name))
    return found


def test_private_names_of_torch_and_lightning_are_in_compat() -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in PACKAGE
        if not path.name.startswith("compat")
        for line, name in private_names(ast.parse(path.read_text()))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from torch.utils._pytree import tree_map", 2),
        ("from lightning.fabric.utilities.distributed import _init_dist_connection", 1),
        ("import torch\ntorch._foreach_copy_(a, b)", 1),
        ("from torch import nn\nnn.Module.__init__(x)\nself._x = torch.tensor(1)", 0),
    ],
)
def test_private_names_are_found(code: str, found: int) -> None:
    assert len(private_names(ast.parse(code))) == found


def test_what_plans_does_not_import_torch() -> None:
    modules = [
        f"lightning_3d.{name}"
        for name in WITHOUT_TORCH
        if (ROOT / "lightning_3d" / name).is_dir() or (ROOT / "lightning_3d" / f"{name}.py").exists()
    ]
    code = f"""
import importlib, sys
sys.modules.update(torch=None, lightning=None)  # importing either now raises
for name in {modules!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_is_light_and_registers() -> None:
    code = """
import sys
import lightning_3d
assert "torch" not in sys.modules and "lightning" not in sys.modules
from lightning.pytorch.strategies import StrategyRegistry
wanted = {"3d", "hybrid_shard", "tensor_parallel", "pipeline", "zero_offload", "zero_infinity"}
missing = wanted - set(StrategyRegistry.available_strategies())
assert not missing, missing
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr


def test_links_at_the_top_lead_into_the_package() -> None:
    for name in ("strategies", "callbacks"):
        assert (ROOT / name).is_symlink()
        assert (ROOT / name).resolve() == ROOT / "lightning_3d" / name


def test_readme_and_contributing_name_targets_and_files_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M))
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text()
        assert set(re.findall(r"\bmake ([a-z-]+)", text.replace("`make` and", ""))) <= targets
        for path in re.findall(
            r"\b(?:examples|tests|benchmarks|lightning_3d)/[\w./]+\.(?:py|yaml|md)\b", text
        ):
            assert (ROOT / path).exists(), f"{document} names {path}"


def test_constraints_pin_every_direct_dependency() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    pinned = {
        line.split("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    extras = re.search(r"EXTRAS \?= (\S+)", (ROOT / "Makefile").read_text())
    assert extras is not None
    blocks = [re.search(rf"^{name} = \[(.*?)\]$", pyproject, re.M | re.S) for name in extras[1].split(",")]
    blocks.append(re.search(r"^dependencies = \[(.*?)^\]$", pyproject, re.M | re.S))
    wanted = {name for block in blocks if block for name in re.findall(r'"([A-Za-z0-9_-]+)', block[1])}
    assert "torch" in wanted
    assert not wanted - pinned
