# SPDX-License-Identifier: Apache-2.0
"""Prediction writers write every prediction once: on the rank of the last stage, not on each tensor-parallel rank."""

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import BasePredictionWriter

from lightning_3d.mesh import ParallelMesh

if TYPE_CHECKING:
    import lightning.pytorch as pl

_WRITES = ("write_on_batch_end", "write_on_epoch_end")


def write_once(trainer: "pl.Trainer", mesh: ParallelMesh) -> None:
    """Silences prediction writers on ranks that have no predictions, or the same as another rank."""
    writes = mesh.holds_loss and all(mesh.rank(axis) == 0 for axis in ("tp", "cp"))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BasePredictionWriter):
            for name in _WRITES:
                callback.__dict__.pop(name, None)
                if not writes:
                    setattr(callback, name, _nothing)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
