# SPDX-License-Identifier: Apache-2.0
"""Private names of Lightning and torchmetrics, and nothing else; see `compat` for those of torch."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer, _init_optimizers_and_lr_schedulers
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as shared_rank_zero_only
from torch.distributed.tensor import DTensor


def is_accumulating(trainer: Any) -> bool:
    """Whether the current batch ends without an optimizer step (no public name; Lightning's loop decides it)."""
    return bool(trainer.fit_loop._should_accumulate())


def let_strategy_run_backward(trainer: Any) -> None:
    """Tells Lightning's loop that `training_step` leaves gradients behind (a flag that its own SWA callback uses)."""
    trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward = True


def zero_gradients(trainer: Any, batch_idx: int, optimizer: Any) -> None:
    """Runs the hooks and counters of Lightning's `zero_grad` (private methods of its optimization loop)."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    loop._on_before_zero_grad(optimizer)
    loop._optimizer_zero_grad(batch_idx, optimizer)


def call_hook(trainer: Any, name: str, *args: Any) -> None:
    """Calls a hook of all callbacks and of the LightningModule (`trainer.call`, internal but stable since 2.0)."""
    call._call_callback_hooks(trainer, name, *args)
    call._call_lightning_module_hook(trainer, name, *args)


def mark_metric_updated(metric: Any, forward_value: Any) -> None:
    """Makes a metric that was updated on another rank loggable here (torchmetrics has no public way)."""
    metric._forward_cache = forward_value
    metric._update_count = max(1, metric._update_count)


def metric_state(metric: Any) -> dict[str, Any]:
    """What a metric has gathered so far, to be restored (`_copy_state_dict` and the counters beside it)."""
    counters = {name: getattr(metric, name) for name in ("_update_count", "_computed", "_forward_cache")}
    return {**counters, **metric._copy_state_dict()}


def restore_metric_state(metric: Any, state: dict[str, Any]) -> None:
    """Undoes what happened since `metric_state`."""
    for name, value in state.items():
        setattr(metric, name, value)


def freeze_summary(callback: Any, trainer: Any, module: Any) -> None:
    """Makes a `ModelSummary` show a module as it is now (its `_summary`, and that object's `_get_summary_data`)."""
    callback.__dict__.pop("_summary", None)
    summary = callback._summary(trainer, module)
    rows = summary._get_summary_data()
    names = ("total_parameters", "trainable_parameters", "model_size", "total_training_modes", "total_flops")
    values = {name: getattr(summary, name) for name in names}
    frozen = SimpleNamespace(_get_summary_data=lambda: rows, **values)
    callback._summary = lambda *_: frozen


def let_finetuning_tell_shards_apart() -> None:
    """Makes `BaseFinetuning` find sharded parameters in an optimizer by identity (its static `filter_on_optimizer`).

    It compares values, which DTensors of different shapes cannot; parameters that are no DTensors are left to it.
    """
    by_value = BaseFinetuning.filter_on_optimizer
    if by_value.__name__ != "filter_on_optimizer":
        return

    def filter_shards(optimizer: torch.optim.Optimizer, params: Iterable[Any]) -> list[Any]:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        params = list(params)
        if not any(isinstance(parameter, DTensor) for parameter in (*held, *params)):
            return by_value(optimizer, params)
        known = {id(parameter) for parameter in held}
        return [parameter for parameter in params if id(parameter) not in known]

    BaseFinetuning.filter_on_optimizer = staticmethod(filter_shards)  # type: ignore[method-assign]


def make_script_launcher(cluster_environment: Any, num_processes: int, num_nodes: int) -> Any:
    """Lightning's launcher that runs the user's script once a rank (`_SubprocessScriptLauncher`, used by its DDP)."""
    return _SubprocessScriptLauncher(cluster_environment, num_processes, num_nodes)


def is_interactive() -> bool:
    """Whether this is a notebook or an interactive interpreter (`_IS_INTERACTIVE`, which Lightning's Trainer asks)."""
    return bool(_IS_INTERACTIVE)


def init_process_group(cluster_environment: Any, backend: str, **options: Any) -> None:
    """Initialises `torch.distributed` as Lightning's strategies do (`_init_dist_connection`)."""
    _init_dist_connection(cluster_environment, backend, **options)


def optimizers_to_device(optimizers: Any, device: torch.device) -> None:
    """Moves optimizer state to a device (`_optimizers_to_device`, called by every Lightning strategy)."""
    _optimizers_to_device(optimizers, device)


def configured_optimizers(module: Any) -> tuple[list[Any], list[Any]]:
    """Optimizers and scheduler configs of `configure_optimizers` (`_init_optimizers_and_lr_schedulers`)."""
    return _init_optimizers_and_lr_schedulers(module)


def mark_scheduled_optimizer_stepped(optimizer: Any) -> None:
    """Keeps a scheduler from warning of an optimizer that another one steps for (torch's `_opt_called`)."""
    optimizer._opt_called = True


def set_logged_rank(rank: int) -> None:
    """Tells Lightning's rank-zero helpers which rank this is, before an environment variable does."""
    for helper in (rank_zero_only, shared_rank_zero_only):
        setattr(helper, "rank", rank)  # noqa: B010  (an attribute that the functions' types do not have)


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside a `LightningOptimizer` (its `optimizer` property returns it)."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def given_dataloader(trainer: Any) -> Any:
    """What the user passed to `fit` as data, before it is loaded (`_DataLoaderSource.instance`)."""
    return trainer.fit_loop._data_source.instance


def _evaluation_loop(trainer: Any) -> Any:
    return trainer.predict_loop if trainer.predicting else trainer._evaluation_loop


def reads_ahead(trainer: Any) -> bool:
    """Whether an evaluation loop asks for a batch before it runs the one before (`_PrefetchDataFetcher`)."""
    return sized_len(_evaluation_loop(trainer)._combined_loader) is None


def arguments_beside(trainer: Any, name: str, batch: Any) -> tuple[Any, ...]:
    """Moves a batch to the device and builds a step's arguments as evaluation loops do (their private methods).

    Args:
        trainer: in an evaluation loop that is asking a loader for its next batch.
        name: of the step.
        batch: as the loader gave it; its number is 0.
    """
    loop = _evaluation_loop(trainer)
    # None unless the loaders are read one after the other.
    position = getattr(loop._combined_loader._iterator, "_iterator_idx", None)
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=position or 0)
    batch = trainer.strategy.batch_to_device(batch, dataloader_idx=position or 0)
    arguments = loop._build_kwargs(batch, 0, position if loop.num_dataloaders > 1 else None)
    return tuple(loop._build_step_args_from_hook_kwargs(arguments, name))


@contextmanager
def scratch_results(trainer: Any, name: str, batch: Any) -> Iterator[None]:
    """Lets a step log as in its loop, into a collection that nobody reads (`_results`, `_current_fx_name`)."""
    loop = _evaluation_loop(trainer)
    module, connector = trainer.lightning_module, trainer._logger_connector
    results, fx, fx_name = loop._results, connector._current_fx, module._current_fx_name
    loop._results, module._current_fx_name = (
        None if results is None else _ResultCollection(training=False),
        name,
    )
    if loop._results is not None:
        loop._results.batch = batch
    try:
        yield
    finally:
        loop._results, connector._current_fx, module._current_fx_name = results, fx, fx_name


# --- checkpoints ------------------------------------------------------------------------------------------------------


class _InPlaceLauncher(_Launcher):
    """Launches nothing: the ranks are there already."""

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """There is nothing to kill."""


def on_launch(launcher: Any, action: Callable[[Any], None]) -> Any:
    """A launcher that first calls `action(trainer)`: the one moment at which a strategy meets its Trainer early."""
    launcher = launcher or _InPlaceLauncher()
    launch = launcher.launch

    def launch_after(function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        if trainer is not None:
            action(trainer)
        return launch(function, *args, trainer=trainer, **kwargs)

    launcher.launch = launch_after
    return launcher


def on_checkpoint_choice(
    trainer: Any, before: Callable[[Any], Any], after: Callable[[Any, Any], Any]
) -> None:
    """Lets `before(asked)`, or else `after(asked, chosen)`, say what `ckpt_path` means (`_parse_ckpt_path`)."""
    connector = trainer._checkpoint_connector
    parse = connector._parse_ckpt_path

    def parse_then(state_fn: Any, ckpt_path: Any, **options: Any) -> Any:
        found = before(ckpt_path)
        return found if found is not None else after(ckpt_path, parse(state_fn, ckpt_path, **options))

    connector._parse_ckpt_path = parse_then


def on_restore(trainer: Any, check: Callable[[Any], None]) -> None:
    """Calls `check(path)` before a Trainer loads the checkpoint that it chose, or None (`resume_start`)."""
    connector = trainer._checkpoint_connector
    resume = connector.resume_start

    def check_then_resume(checkpoint_path: Any = None, *args: Any, **options: Any) -> None:
        check(checkpoint_path)
        resume(checkpoint_path, *args, **options)

    connector.resume_start = check_then_resume


def checkpoint_folder(callback: ModelCheckpoint, trainer: Any) -> str:
    """Where a ModelCheckpoint saves, also before its `setup` (`__resolve_ckpt_dir`)."""
    return str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]


def link_with(callback: ModelCheckpoint, link: Callable[[str, str], None]) -> None:
    """Makes `save_last="link"` link through `link(target, name)`, on the first rank (`_link_checkpoint`)."""

    def link_checkpoint(trainer: Any, filepath: str, linkpath: str) -> None:
        if trainer.is_global_zero:
            link(filepath, linkpath)
        trainer.strategy.barrier()

    callback._link_checkpoint = link_checkpoint  # type: ignore[method-assign]


def let_link_anywhere(callback: ModelCheckpoint) -> None:
    """Lets `save_last="link"` have a remote folder: `ModelCheckpoint.setup` knows symbolic links only."""
    setup = type(callback).setup

    def setup_unasked(trainer: Any, pl_module: Any, stage: str) -> None:
        asked, callback.save_last = callback.save_last, None
        try:
            setup(callback, trainer, pl_module, stage)
        finally:
            callback.save_last = asked

    if callback.save_last == "link":
        callback.setup = setup_unasked  # type: ignore[method-assign]


def look_with(callback: ModelCheckpoint, is_taken: Callable[[str], bool]) -> None:
    """Makes a ModelCheckpoint ask `is_taken(name)` whether to go round an address (`file_exists`)."""
    exists = type(callback).file_exists

    def file_exists(filepath: Any, trainer: Any) -> bool:
        if "://" not in str(filepath):
            return exists(callback, filepath, trainer)
        taken = trainer.is_global_zero and is_taken(str(filepath))
        return bool(trainer.strategy.reduce_boolean_decision(taken, all=False))

    callback.file_exists = file_exists  # type: ignore[method-assign]


def train_loaders(trainer: Any) -> list[Any]:
    """The train loaders as the loop reads them (`_combined_loader`); none before they are set up."""
    loader = trainer.fit_loop._combined_loader
    return [] if loader is None else list(loader.flattened)


def restart_train_data(trainer: Any) -> None:
    """Makes the loop read its loaders from their start again, in its current epoch (`_data_fetcher`)."""
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is not None:
        iter(fetcher)


def set_sampler_epoch(loader: Any, epoch: int) -> None:
    """Tells a loader's samplers the epoch, as the loop does (`_set_sampler_epoch`)."""
    _set_sampler_epoch(loader, epoch)


def begin_with_new_epoch(trainer: Any) -> None:
    """Tells the restored loops that no epoch is half done (under `max_steps` they would run an empty one)."""
    trainer.fit_loop._restarting = False
    trainer.fit_loop.epoch_loop.restarting = False


def begin_progress_bar(trainer: Any) -> None:
    """Gives a bar that begins inside an epoch its total: there Lightning leaves out the hook in which bars read it."""
    bar = trainer.progress_bar_callback
    if bar is not None and trainer.fit_loop.restarted_mid_epoch:
        bar.on_train_epoch_start(trainer, trainer.lightning_module)


def batch_progress(trainer: Any) -> Any:
    """The loop's counters of batches (`epoch_loop.batch_progress` is public, its type is not)."""
    return trainer.fit_loop.epoch_loop.batch_progress


def on_stop_signals(trainer: Any, *, sigterm: Any, requeue: Any, before_batch: Any) -> None:
    """Puts handlers in place of those that Lightning registers next (`_SignalConnector`), and obeys before a batch."""
    connector = trainer._signal_connector
    connector._sigterm_notifier_fn = sigterm
    if "_requeue_3d" not in vars(connector):
        connector._requeue_3d = connector._slurm_sigusr_handler_fn
    connector._slurm_sigusr_handler_fn = requeue
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = before_batch


def call_requeue(trainer: Any) -> None:
    """What Lightning does when SLURM is about to end a job that it will start again (`_slurm_sigusr_handler_fn`)."""
    trainer._signal_connector._requeue_3d(signal.SIGUSR1, None)


def mark_sigterm_received(trainer: Any) -> None:
    """Makes `trainer.received_sigterm` true (`_SignalConnector.received_sigterm`)."""
    trainer._signal_connector.received_sigterm = True


def on_loop_decisions(trainer: Any, *, stops: Callable[[], None], validates: Callable[[bool], bool]) -> None:
    """Has a say where the training loops decide by what one rank alone may know.

    Their `_should_check_val_fx` and `on_advance_end` are wrapped, once a Trainer; `_can_stop_early` says whether
    `min_epochs` and `min_steps` let them stop.

    Args:
        trainer: before it trains.
        stops: called before a loop ends, or validates, because `trainer.should_stop` is set.
        validates: given whether this rank's clock says that a validation is due (`val_check_interval` as a time).
    """
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    if "_should_check_val_fx" in vars(epoch_loop):
        return
    is_val_due, end_batch, end_epoch = (
        epoch_loop._should_check_val_fx,
        epoch_loop.on_advance_end,
        fit_loop.on_advance_end,
    )

    def look_for_stop() -> None:
        if trainer.should_stop and fit_loop._can_stop_early:
            stops()

    def is_val_due_everywhere(fetcher: Any) -> bool:
        look_for_stop()
        due = bool(is_val_due(fetcher))
        return due if getattr(trainer, "_val_check_time_interval", None) is None else validates(due)

    def end_batch_then_look(fetcher: Any) -> None:
        end_batch(fetcher)
        look_for_stop()

    def end_epoch_then_look() -> None:
        end_epoch()
        if fit_loop.epoch_progress.current.processed != fit_loop.max_epochs:  # else the run ends anyway
            look_for_stop()

    epoch_loop._should_check_val_fx = is_val_due_everywhere
    epoch_loop.on_advance_end = end_batch_then_look
    fit_loop.on_advance_end = end_epoch_then_look
