# SPDX-License-Identifier: Apache-2.0
"""Blocks compiled one by one: what is repeated is compiled once, and what communicates around it stays as it is.

[Note: what is compiled]
A block's `forward` is, not its call: FSDP2's hooks, which gather and free, run outside, as do the gate and a
checkpoint around the whole block. Selective recomputation decides operator by operator, which compiled code does not
show from outside: its checkpoint goes inside. So from the outside in: gate, full recomputation, FSDP2's hooks,
compiled code, selective recomputation, tensor parallelism, the user's forward. Names of parameters stay.
"""

import shutil
from collections.abc import Iterable

import torch
from torch import nn

from lightning_3d.compat import allow_compiled_variants
from lightning_3d.errors import PlanError, SupportError
from lightning_3d.parallel.recompute import checkpointed

_COMPILERS = ("c++", "g++", "clang++")


def check_backend(backend: str, device: torch.device) -> None:
    """Checks that blocks can be compiled here.

    Raises:
        PlanError: torch does not know the backend.
        SupportError: the backend needs a compiler that is not there.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise PlanError(f"compile_backend={backend!r} is unknown. Use one of {', '.join(map(repr, known))}.")
    if backend == "inductor" and device.type == "cpu" and not any(map(shutil.which, _COMPILERS)):
        raise SupportError(
            "compile=True on a CPU needs a C++ compiler, and there is none on the path. Install g++, or use"
            " compile_backend='aot_eager'."
        )


def compile_blocks(blocks: Iterable[nn.Module], backend: str, *, selective: bool) -> None:
    """Compiles the forward of each block when it first runs, in place; after tensor parallelism, before FSDP2.

    Args:
        blocks: of this rank.
        backend: of `torch.compile`.
        selective: recompute inside, keeping attention and half of the matrix products.
    """
    blocks = list(blocks)
    allow_compiled_variants(len(blocks))  # blocks may differ in a number that their code reads
    for block in blocks:
        forward = checkpointed(block.forward) if selective else block.forward
        block.forward = torch.compile(forward, backend=backend)
