# SPDX-License-Identifier: Apache-2.0
"""A module that an earlier Trainer of this process has cut and sharded: a new Trainer goes on with it as it is."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_3d.engine import ParallelModel
from lightning_3d.errors import ModelError
from lightning_3d.mesh import ParallelMesh
from lightning_3d.plan import AXES

if TYPE_CHECKING:
    import lightning.pytorch as pl

_OF_THE_MODULE = ("recompute", "offload", "compile", "compile_backend", "float8_all_gather")
"""Options that are built into a module."""
_KEY = "_parallel_3d"
"""Where a LightningModule keeps it: both refer to each other, and end together."""


@dataclass(frozen=True, kw_only=True)
class Parallelized:
    """What was made of a module."""

    parallel: ParallelModel
    mesh: ParallelMesh
    precision: str


def remember(module: "pl.LightningModule", made: Parallelized) -> None:
    """Keeps what was made of a module for later Trainers."""
    module.__dict__[_KEY] = made


def parallelized_before(
    module: "pl.LightningModule", mesh: ParallelMesh, precision: str
) -> Parallelized | None:
    """What an earlier Trainer made of a module, if one did.

    Raises:
        ModelError: it was another layout or precision.
    """
    made = module.__dict__.get(_KEY)
    if not isinstance(made, Parallelized):
        return None
    before, now = made.mesh.plan, mesh.plan
    same = all(getattr(before, axis) == getattr(now, axis) for axis in (*AXES, "virtual_stages"))
    if not same or made.precision != precision:
        raise ModelError(
            f"{type(module).__name__} is already laid out as {before.describe()} in {made.precision} by an earlier"
            f" Trainer, not as {now.describe()} in {precision}. Make a new module and load a checkpoint into it."
        )
    for option in _OF_THE_MODULE:
        if getattr(before, option) != getattr(now, option):
            raise ModelError(
                f"{type(module).__name__} was laid out with {option}={getattr(before, option)!r} by an earlier Trainer,"
                f" not with {getattr(now, option)!r}. Make a new module and load a checkpoint into it."
            )
    return made
