# SPDX-License-Identifier: Apache-2.0
"""The part of `ZeroOffloadStrategy` that saves and loads: our folders from ZeRO's partitions, or DeepSpeed's own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from lightning_3d.checkpoint.agreement import Ranks
from lightning_3d.checkpoint.places import RemotePath, place_of
from lightning_3d.errors import CheckpointError
from lightning_3d.plan import ParallelPlan
from lightning_3d.strategies.checkpoint_content import Content
from lightning_3d.strategies.checkpointing import CheckpointedStrategy
from lightning_3d.zero.internals import loss_scale_state, set_loss_scale_state
from lightning_3d.zero.state import ZeroState

CheckpointFormat = Literal["sharded", "deepspeed"]

_LOSS_SCALE, _RANKS = "deepspeed_loss_scale", "lightning_3d_ranks"


class ZeroCheckpoints(CheckpointedStrategy, DeepSpeedStrategy):  # type: ignore[misc]  # both are strategies
    """DeepSpeed's strategy with the checkpoints of this package."""

    def __init__(self, plan: ParallelPlan, *, checkpoint_format: CheckpointFormat, **options: Any) -> None:
        super().__init__(plan, **options)
        self._format = checkpoint_format
        self._state: ZeroState | None = None
        self._folder: str | None = None
        """Of this run, on a disk."""

    @property
    def _zero(self) -> Any:
        """DeepSpeed's optimizer, or what stands in its place."""
        return self.deepspeed_engine.optimizer

    @contextmanager
    def stored_state(self) -> Iterator[tuple[nn.Module, list[Optimizer]]]:
        """The masters and their optimizer state, where they are."""
        if self._state is None:
            with super().stored_state() as (model, _):
                yield model, []
            return
        with self._state.saved() as stand_ins:
            yield stand_ins.model, stand_ins.optimizers

    @contextmanager
    def restored_state(self, *, with_optimizers: bool) -> Iterator[tuple[nn.Module, list[Optimizer]]]:
        """As `stored_state`; the model's parameters follow the masters."""
        if self._state is None:
            with super().restored_state(with_optimizers=False) as (model, _):
                yield model, []
            return
        with self._state.loaded(with_state=with_optimizers, ranks=Ranks.of(None)) as stand_ins:
            yield stand_ins.model, stand_ins.optimizers if with_optimizers else []

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint folder that any layout loads, or DeepSpeed's own; collective."""
        if self._format == "deepspeed":
            self._save_deepspeed(checkpoint, filepath)
            return
        scale = loss_scale_state(self._zero)
        if scale and "optimizer_states" in checkpoint:
            checkpoint[_LOSS_SCALE] = scale
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a checkpoint of any layout, DeepSpeed's own (of as many ranks), or a plain file's weights."""
        module = self.lightning_module
        assert module is not None
        path = self.broadcast(checkpoint_path)
        if self.broadcast(is_deepspeed_checkpoint(path)):
            return self._load_deepspeed(path, fitting=module.trainer.state.fn == TrainerFn.FITTING)
        checkpoint = super().load_checkpoint(path, weights_only)
        scale = checkpoint.pop(_LOSS_SCALE, {})
        if module.trainer.state.fn == TrainerFn.FITTING and loss_scale_state(self._zero):
            set_loss_scale_state(self._zero, scale)
        return checkpoint

    def _save_deepspeed(self, checkpoint: dict[str, Any], path: Any) -> None:
        self.all_ranks_call("trainer.save_checkpoint")
        if isinstance(place_of(path), RemotePath):
            raise CheckpointError(
                f"{path} is remote, and DeepSpeed writes to mounted paths only. Leave checkpoint_format at 'sharded'."
            )
        assert self.lightning_module is not None
        content = Content.of(self, checkpoint, {}, self._epoch_progress(), self.lightning_module, [])
        self._offered = {}
        parts = Ranks.of(None).all_gather(content.rank_metadata)
        ranks = {name: value for part in parts for name, value in part.items()}
        DeepSpeedStrategy.save_checkpoint(self, {**content.metadata, _RANKS: ranks}, path)

    def _load_deepspeed(self, path: Any, *, fitting: bool) -> dict[str, Any]:
        try:
            stored = DeepSpeedStrategy.load_checkpoint(self, path)
        except Exception as error:
            raise CheckpointError(
                f"DeepSpeed does not load its checkpoint {path}: {error} Load it on as many ranks, in the same stage."
            ) from error
        ranks = stored.pop(_RANKS, {})
        self._resume, checkpoint = Content.restored(self, path, stored, fitting=fitting, ranks=ranks)
        self._offered = {}
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Takes over what `on_load_checkpoint` changed; most often nothing, which costs nothing."""
        assert self.lightning_module is not None
        state, known = checkpoint["state_dict"], self.lightning_module.state_dict()
        changed = any(key not in known or self._offered.get(key) is not value for key, value in state.items())
        if self.reduce_boolean_decision(changed, all=False):
            super().load_model_state_dict(checkpoint, strict)
        self._offered = {}


def is_deepspeed_checkpoint(path: Any) -> bool:
    """Whether a folder is one that DeepSpeed wrote."""
    folder = Path(path)
    return (folder / "latest").is_file() and (folder / "checkpoint").is_dir()
