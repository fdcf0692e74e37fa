# SPDX-License-Identifier: Apache-2.0
"""The part of a strategy that saves and loads: what Lightning would gather is written and read shard by shard."""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_3d.checkpoint import (
    AsyncCheckpointer,
    SaveOptions,
    link_checkpoint,
    load_checkpoint,
    remove_checkpoint,
    save_checkpoint,
)
from lightning_3d.compat_lightning import link_with, on_launch, plain_optimizer
from lightning_3d.errors import CheckpointError
from lightning_3d.plan import ParallelPlan
from lightning_3d.strategies import checkpoint_choice, weight_averaging
from lightning_3d.strategies.checkpoint_content import Content, load_weights_file, take_over_entries
from lightning_3d.strategies.data_position import Progress, record_order
from lightning_3d.strategies.process_groups import MeshedStrategy
from lightning_3d.strategies.resume import ResumePoint

if TYPE_CHECKING:
    from torch.nn import Module

OnSaveError = Literal["stop", "continue"]

_BETWEEN_SAVE_AND_STEP = (
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_before_zero_grad",
)
"""Hooks of a module that may change weights before the optimizer does."""


class CheckpointedStrategy(MeshedStrategy):
    """Writes checkpoint folders shard by shard, which load in any layout, in the background if asked."""

    _seed: int
    _num_steps_run: int

    def __init__(
        self,
        plan: ParallelPlan,
        *,
        save_async: bool = False,
        on_save_error: OnSaveError = "stop",
        **options: Any,
    ) -> None:
        super().__init__(plan, **options)
        self._save_async = save_async
        self._on_save_error = on_save_error
        self._checkpointer: AsyncCheckpointer | None = None
        self._same_state = False
        self._save_failed = False
        self._to_remove: list[Any] = []
        self._closure_waits = False
        self._offered: dict[str, Any] = {}
        self._resume: ResumePoint | None = None
        self._since: Progress | None = None
        self._since_epoch = -1
        self._met: Any = None

    # --- choosing ---------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._launcher = on_launch(self._launcher, self._meet)

    def _meet(self, trainer: "pl.Trainer") -> None:
        """Takes part in what the Trainer makes of `ckpt_path`, before it looks for checkpoints."""
        if self._met is trainer:
            return
        self._met = trainer
        checkpoint_choice.check_folders(trainer)
        checkpoint_choice.take_part(trainer, self.finish_saving)

    # --- what Lightning asks for ------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Checkpoints are loaded into the sharded model."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Optimizer state is loaded by `load_checkpoint`, shard by shard."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part of the model, as it is, so that `on_save_checkpoint` may drop, replace or add entries."""
        assert self.lightning_module is not None
        self._offered = self.lightning_module.state_dict()
        return dict(self._offered)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state is written shard by shard in `save_checkpoint`."""
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """The model's state was loaded in `load_checkpoint`; takes over what `on_load_checkpoint` put in its place."""
        assert self.lightning_module is not None
        with self.restored_state(with_optimizers=False) as (model, _):
            take_over_entries(model, checkpoint["state_dict"], self._offered, strict=strict)
        self._offered = {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """The optimizer's state was loaded in `load_checkpoint`."""

    @contextmanager
    def stored_state(self) -> Iterator[tuple["Module", list[Optimizer]]]:
        """What a save reads: a module and optimizers whose tensors are this rank's shards; valid inside the context."""
        assert self.lightning_module is not None
        yield self.lightning_module, [plain_optimizer(optimizer) for optimizer in self.optimizers]

    @contextmanager
    def restored_state(self, *, with_optimizers: bool) -> Iterator[tuple["Module", list[Optimizer]]]:
        """What a load fills; takes effect when the context ends. Collective.

        Args:
            with_optimizers: whether optimizer state is filled too.
        """
        assert self.lightning_module is not None
        optimizers = [plain_optimizer(optimizer) for optimizer in self.optimizers]
        yield self.lightning_module, optimizers if with_optimizers else []

    # --- saving -----------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint folder that loads in any layout; collective.

        Args:
            checkpoint: Lightning's dict.
            filepath: the folder, a path or an address that fsspec knows.
            storage_options: `SaveOptions`, to write in the background where `save_async` does not say so.

        Raises:
            CheckpointError: this save failed, or the one in the background before it; with
                `on_save_error="continue"` a warning says so instead.
        """
        failing = self._failing()
        if not self.all_ranks_call("trainer.save_checkpoint", failing) and failing is not None:
            warnings.warn(f"{filepath} is not saved: this rank fails alone.", stacklevel=4)
            self.end_alone(failing)
        path = self.broadcast(filepath)
        in_background = self._save_async
        if isinstance(storage_options, SaveOptions):
            in_background = storage_options.background
        if not (in_background and self._same_state):
            self.finish_saving()
        with self.stored_state() as (model, optimizers):
            content = Content.of(self, checkpoint, self._offered, self._epoch_progress(), model, optimizers)
            self._offered = {}
            self._write(path, content, in_background=in_background)

    def _write(self, path: Any, content: Content, *, in_background: bool) -> None:
        try:
            if in_background:
                overlap = self._may_overlap()
                self._writer().save(path, overlap=overlap, same_state=self._same_state, **content.arguments())
                self._same_state = overlap
            else:
                save_checkpoint(path, **content.arguments())
            self._save_failed = False
        except CheckpointError as error:
            self._report(error)

    def _failing(self) -> BaseException | None:
        """The exception that ends the run: callbacks may save a checkpoint because of it."""
        module = self.lightning_module
        assert module is not None
        interrupted = module.trainer.state.status == TrainerStatus.INTERRUPTED
        return sys.exc_info()[1] if interrupted else None

    def _report(self, error: CheckpointError) -> None:
        self._save_failed = True
        if self._on_save_error == "stop":
            raise error
        rank_zero_warn(f"{error} Training goes on; the checkpoints before it are untouched.", stacklevel=8)

    def _writer(self) -> AsyncCheckpointer:
        if self._checkpointer is None:
            self._checkpointer = AsyncCheckpointer()
        return self._checkpointer

    def _may_overlap(self) -> bool:
        """Whether nothing but the optimizer can change weights before the next optimizer step."""
        module = self.lightning_module
        assert module is not None
        return module.trainer.training and not any(
            is_overridden(hook, module, pl.LightningModule) for hook in _BETWEEN_SAVE_AND_STEP
        )

    def _epoch_progress(self) -> Progress:
        """How far the epoch of the training loop has come; nowhere between two epochs."""
        module = self.lightning_module
        assert module is not None
        loop = module.trainer.fit_loop
        batches: Any = loop.epoch_loop.batch_progress
        epochs: Any = loop.epoch_progress
        since = self._since if self._since_epoch == epochs.total.started else None
        return Progress(
            num_batches=0 if batches.is_last_batch else batches.current.processed,
            since=since.since if since else None,
        )

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint once the one in the background, if any, is whole; never if that failed."""
        if self.local_rank == 0 and not self._save_failed:
            self._to_remove.append(filepath)
        module = self.lightning_module
        if module is None or not module.trainer.training:
            self._remove_old()

    def _remove_old(self) -> None:
        """Removes after everything that a callback does at one moment: `last` is linked anew before its target goes."""
        while self._to_remove:
            self._after_save(partial(remove_checkpoint, self._to_remove.pop(0)))

    def _after_save(self, action: Callable[[], None]) -> None:
        if self._checkpointer is None:
            action()
        else:
            self._checkpointer.after_commit(action)

    def _link(self, target: str, name: str) -> None:
        if not self._save_failed:
            self._after_save(lambda: link_checkpoint(target, name))

    @property
    def checkpoint_writer(self) -> AsyncCheckpointer | None:
        """What writes in the background; None before the first such save."""
        return self._checkpointer

    def finish_saving(self) -> None:
        """Returns when the last checkpoint is whole.

        Raises:
            CheckpointError: it failed, and `on_save_error` is `stop`.
        """
        self._same_state = False
        self._remove_old()
        if self._checkpointer is not None:
            try:
                self._checkpointer.wait()
            except CheckpointError as error:
                self._report(error)

    def state_may_change(self) -> None:
        """Waits until a save that goes on beside training has its copy."""
        self._same_state = False
        if self._checkpointer is not None:
            self._checkpointer.wait_staged()

    # --- moments of training ----------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Lets loaders with a random order remember where it came from."""
        record_order(dataloader)
        return super().process_dataloader(dataloader)

    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        """Guards optimizers that are stepped without this strategy, and links checkpoints that are whole only."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            plain_optimizer(optimizer).register_step_pre_hook(self._before_step)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                link_with(callback, self._link)

    def _before_step(self, *_: Any) -> None:
        if not self._closure_waits:
            self.state_may_change()

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: "pl.LightningModule | Module | None" = None,
        **options: Any,
    ) -> Any:
        """Steps; a save's copy may go on during the closure's forward and backward, not longer."""

        def run() -> Any:
            self._closure_waits = False
            result = closure()
            self.state_may_change()
            return result

        self._closure_waits = True
        return super().optimizer_step(optimizer, run, model, **options)

    def on_train_start(self) -> None:
        """Puts a resumed run where the checkpoint left off."""
        super().on_train_start()
        resume, module = self._resume, self.lightning_module
        if resume is None:
            return
        assert module is not None
        self._seed, self._num_steps_run = resume.seed, resume.steps_run
        self._since = resume.apply(module.trainer, self.mesh, self.root_device)
        epochs: Any = module.trainer.fit_loop.epoch_progress
        self._since_epoch = epochs.total.started

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Buffers may change from here on; a resumed loader has begun."""
        super().on_train_batch_start(batch, batch_idx)
        self._same_state = False
        self._remove_old()
        if self._resume is not None:
            self._resume.end()
            self._resume = None

    def on_validation_start(self) -> None:
        """Callbacks may swap weights for an evaluation."""
        super().on_validation_start()
        self.state_may_change()

    def on_test_start(self) -> None:
        """As for validation."""
        super().on_test_start()
        self.state_may_change()

    def on_predict_start(self) -> None:
        """As for validation."""
        super().on_predict_start()
        self.state_may_change()

    def on_train_end(self) -> None:
        """The last checkpoint is whole when `fit` returns."""
        super().on_train_end()
        self.finish_saving()

    def on_exception(self, exception: BaseException) -> None:
        """Finishes the checkpoint in the background: after an error, Ctrl-C or SIGTERM it is the newest there is."""
        try:
            self.finish_saving()  # first: the other ranks end when they hear of the exception
        except CheckpointError as error:
            warnings.warn(f"{error}", stacklevel=8)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Frees the writer's copies once its checkpoint is whole."""
        self.finish_saving()
        super().teardown()

    # --- loading ----------------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads model and optimizer state from a checkpoint of any layout, or weights from a plain file; collective.

        Args:
            checkpoint_path: a checkpoint folder; or a Hugging Face folder, a safetensors file, a torch file of a state
                dict or a plain Lightning checkpoint, of which the weights are taken.
            weights_only: as for any Trainer; nothing is ever unpickled here.

        Raises:
            CheckpointError: on every rank, when it is partial, damaged, unsafe or of another model.
        """
        self.finish_saving()
        module = self.lightning_module
        assert module is not None
        path = self.broadcast(checkpoint_path)
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        loaded = load_weights_file(self, path, fitting=fitting)
        if loaded is not None:
            return loaded
        with_state = fitting and Content.has_optimizers(self, path)
        beside, strict = weight_averaging.beside(module.trainer, module), module.strict_loading
        with self.restored_state(with_optimizers=with_state) as (model, optimizers):
            metadata = load_checkpoint(
                path, model=model, optimizers=optimizers, strict=strict, beside=beside
            )
        self._resume, checkpoint = Content.restored(self, path, metadata, fitting=fitting)
        self._offered = {**module.state_dict(), **checkpoint["state_dict"]}
        checkpoint["state_dict"] = dict(self._offered)
        return checkpoint
