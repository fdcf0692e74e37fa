# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of one number, saved and loaded at addresses."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_3d.checkpoint import load_checkpoint, save_checkpoint
from lightning_3d.errors import CheckpointError


def model_of(value: float, size: int = 64) -> nn.Module:
    model = nn.Linear(size, size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def save(path: Any, step: int, size: int = 64) -> None:
    save_checkpoint(path, model=model_of(step, size), metadata={"step": step})


def loaded(path: Any, size: int = 64) -> int:
    """The step of a checkpoint, once its weights and its metadata agree."""
    model = model_of(-1, size)
    step = load_checkpoint(path, model=model)["step"]
    assert all(bool((parameter == step).all()) for parameter in model.parameters())
    return int(step)


def error_of(action: Callable[[], Any]) -> str:
    started = time.monotonic()
    with pytest.raises(CheckpointError) as error:
        action()
    assert time.monotonic() - started < 20
    return str(error.value)
