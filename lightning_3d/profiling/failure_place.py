# SPDX-License-Identifier: Apache-2.0
"""Where a step failed, read from the traceback: costs nothing until then, and works with every strategy."""

import traceback
from types import TracebackType

import torch
from torch import nn

_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: of a device, of the host, or of a limit."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        text.lower() in str(error).lower() for text in _OUT_OF_MEMORY
    )


def place_of(error: BaseException, module: nn.Module) -> tuple[str, str]:
    """Phase and innermost named module in which an error was raised.

    Returns:
        The phase (of `trace.PHASES`), and the module's name or an empty text.
    """
    names = {id(part): name for name, part in module.named_modules() if name}
    phase, inside = "forward", ""
    for frame, _ in traceback.walk_tb(_innermost(error)):
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if "torch/autograd/" in file and function in ("backward", "_engine_run_backward"):
            phase = "backward"
        elif function in ("validation_step", "test_step", "predict_step"):
            phase = "evaluation"
        elif function == "save_checkpoint":
            phase = "checkpoint"
        elif "torch/optim/" in file and function == "step":
            phase = "optimizer"
        elif function == "training_step":
            phase = "forward"  # the closure of an optimizer's step runs the whole step
        inside = names.get(id(frame.f_locals.get("self")), inside)
    return phase, inside


def _innermost(error: BaseException) -> TracebackType | None:
    """The traceback of the first cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error.__traceback__
