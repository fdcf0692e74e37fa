# SPDX-License-Identifier: Apache-2.0
"""Tests of compiled operators run when they are asked for: the first build takes minutes."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips them unless `-m deepspeed_ops` asks for them."""
    if "deepspeed_ops" in config.getoption("markexpr"):
        return
    skip = pytest.mark.skip(reason="compiles DeepSpeed's operators: run with -m deepspeed_ops")
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("deepspeed_ops"):
            item.add_marker(skip)
