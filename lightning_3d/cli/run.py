# SPDX-License-Identifier: Apache-2.0
"""`lightning-3d fit|validate|test|predict --config x.yaml`: LightningCLI for the model and data that a YAML names."""

import os
import sys
from collections.abc import Sequence

RUNS = ("fit", "validate", "test", "predict")
"""Subcommands of LightningCLI."""


def run(argv: Sequence[str] | None) -> int:
    """Runs LightningCLI; `model` and `data` are `class_path` and `init_args`, found from the current folder too.

    Args:
        argv: arguments from the subcommand on; those of the process if None.

    Returns:
        The exit status: 0.
    """
    from lightning.pytorch.cli import LightningCLI

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    LightningCLI(args=None if argv is None else list(argv))
    return 0
