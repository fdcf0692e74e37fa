# SPDX-License-Identifier: Apache-2.0
"""`ZeroOffloadStrategy`: DeepSpeed's ZeRO with its offload, under the checkpoints and the failures of this package."""

import argparse
import os
import shutil
import uuid
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.checkpoint.agreement import Ranks
from lightning_3d.compat_lightning import (
    configured_optimizers,
    is_accumulating,
    mark_scheduled_optimizer_stepped,
    train_loaders,
)
from lightning_3d.errors import PlanError, StepError, SupportError
from lightning_3d.plan import AXES, ParallelPlan
from lightning_3d.strategies.checkpointing import OnSaveError
from lightning_3d.strategies.even_batches import EvenBatches, run_beside
from lightning_3d.strategies.monitored import MonitoredLog
from lightning_3d.strategies.support import check_trainer
from lightning_3d.strategies.zero_checkpoints import CheckpointFormat, ZeroCheckpoints
from lightning_3d.zero import internals
from lightning_3d.zero.operators import before_import, check_nvme, choose_accelerator, cpu_adam_builds
from lightning_3d.zero.optimizer import as_cpu_adam, can_be_cpu_adam, check_optimizer
from lightning_3d.zero.options import Device, ZeroOptions, read_config, resolve_options
from lightning_3d.zero.state import ZeroState

CpuAdam = Literal["auto", "torch", "deepspeed"]

_ENGINES: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""The engine that trained a module last."""


class ZeroOffloadStrategy(ZeroCheckpoints):
    """Trains an unmodified LightningModule with ZeRO 1, 2 or 3, its state on the device, in host memory or on a disk.

    Example::

        import lightning_3d
        trainer = Trainer(strategy="zero_offload", devices=8, precision="bf16-mixed")
        trainer = Trainer(strategy=ZeroOffloadStrategy(stage=3, offload_optimizer="nvme", nvme_path="/local"), devices=8)
    """

    strategy_name = "zero_offload"
    default_options: Mapping[str, Any] = {
        "stage": 2,
        "offload_optimizer": "cpu",
        "offload_params": "none",
    }

    def __init__(
        self,
        stage: int | None = None,
        offload_optimizer: Device | None = None,
        offload_params: Device | bool | None = None,
        nvme_path: str | os.PathLike[str] | None = None,
        config: dict[str, Any] | str | os.PathLike[str] | None = None,
        cpu_adam: CpuAdam = "auto",
        checkpoint_format: CheckpointFormat = "sharded",
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        save_async: bool = False,
        on_save_error: OnSaveError = "stop",
        **others: Any,
    ) -> None:
        """Describes the run; nothing starts before the Trainer does.

        Args:
            stage: 1 partitions optimizer state over all ranks, 2 gradients too, 3 parameters too. By default 2.
            offload_optimizer: where optimizer state lives and is stepped: `none` (the device), `cpu` (the default), or
                `nvme`.
            offload_params: where parameters of stage 3 are when not in use: `none`, `cpu`, or `nvme` (bf16 only).
            nvme_path: a folder on a local disk for `nvme`; what a run wrote there goes with its process.
            config: further DeepSpeed configuration, or the JSON file of one. What the Trainer decides (accumulation,
                clipping, precision, optimizer, schedulers) may only be repeated in it.
            cpu_adam: whether torch's Adam and AdamW are replaced by DeepSpeed's for CPUs where the optimizer is
                offloaded: `auto` where it builds, `torch` never, `deepspeed` or fail.
            checkpoint_format: `sharded` loads in any layout and under `3d`; `deepspeed` is DeepSpeed's own, which loads
                on as many ranks only. Both are recognised when loading.
            process_group_backend: `gloo` or `nccl`; by the device if None.
            timeout: of collectives.
            save_async: write checkpoints in the background.
            on_save_error: `stop` training when a checkpoint cannot be written, or warn and `continue`.
            **others: nothing; degrees of other axes are refused in a line of their own.

        Raises:
            PlanError: the options cannot be, or disagree with the config.
            SupportError: DeepSpeed is not installed.
        """
        _refuse(others)
        given = {
            "stage": stage,
            "offload_optimizer": offload_optimizer,
            "offload_params": offload_params,
            "nvme_path": nvme_path,
        }
        self.options = resolve_options(self.default_options, given, read_config(config))
        before_import()
        super().__init__(
            ParallelPlan(pp=1, dp_replicate=1, dp_shard="auto", cp=1, tp=1, ep=1),
            process_group_backend=process_group_backend,
            timeout=timeout,
            save_async=save_async,
            on_save_error=on_save_error,
            checkpoint_format=checkpoint_format,
        )
        self.config: dict[str, Any] | None = {}
        self._cpu_adam = cpu_adam

    # --- setup ------------------------------------------------------------------------------------------------------

    def fill_axis(self, plan: ParallelPlan, world_size: int, ranks_per_node: int) -> ParallelPlan:
        """State is partitioned over the whole world, nodes or not."""
        return replace(plan, dp_shard=world_size)

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self.options.check_precision(str(self.precision_plugin.precision))
        if self.options.nvme_path is not None and self.options.uses_nvme:
            assert self.parallel_devices is not None
            choose_accelerator(self.parallel_devices[0])
            check_nvme(self.options.nvme_path)

    def _meet_ranks(self) -> None:
        import deepspeed

        choose_accelerator(self.root_device)
        super()._meet_ranks()
        self._set_node_environment_variables()
        deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False, timeout=self._timeout)

    @property
    def zero_stage_3(self) -> bool:
        """Whether parameters are partitioned."""
        return self.options.stage == 3

    @property
    def handles_gradient_accumulation(self) -> bool:
        """The loop decides when a step is due, as for any other strategy, also at an epoch's end."""
        return False

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Parameters of stage 3 are partitioned as they are made in `configure_model`."""
        with DeepSpeedStrategy.tensor_init_context(self, empty_init):
            yield

    def setup(self, trainer: "pl.Trainer") -> None:
        """Checks, then lets DeepSpeed take the model and the user's optimizer."""
        module = self.lightning_module
        assert module is not None
        self.stop_with_all_ranks(trainer)
        check_trainer(trainer, module, self.plan)
        if not module.automatic_optimization:
            raise SupportError(
                "Manual optimization (automatic_optimization=False) under ZeRO: a backward reduces gradients, and has to"
                " know whether it is the last of a step. Use automatic optimization, or strategy='3d' with pp=1, tp=1."
            )
        if self.mesh.dp_size > 1:
            self.even_batches = EvenBatches(
                trainer, self.mesh, self.root_device, lambda batch: run_beside(self, batch)
            )
            self.monitored = MonitoredLog.begin(module, self)
        for loop in (
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
            trainer.fit_loop.epoch_loop.val_loop,
        ):
            loop.inference_mode = False  # parameters that are gathered under it cannot be trained on
        self._seed = self.broadcast(torch.initial_seed() % 2**62)
        self._num_steps_run = 0
        self._config_initialized = False  # the model is here now, and evaluation has another one than training
        DeepSpeedStrategy.setup(self, trainer)

    def _format_config(self) -> None:
        module = self.lightning_module
        assert module is not None
        trainer = module.trainer
        fitting = trainer.state.fn == TrainerFn.FITTING
        options = self.options if fitting else self.options.for_evaluation()
        if options.uses_nvme:
            self._folder = self._folder or self._new_folder()
            options = replace(options, nvme_path=self._folder)
        sizes = [internals.num_elements(parameter) for parameter in module.parameters()]
        self.config = options.deepspeed_config(
            precision=str(self.precision_plugin.precision),
            accumulated=trainer.accumulate_grad_batches,
            clip_norm=trainer.gradient_clip_val,
            num_elements=sum(sizes),
            largest_elements=max(sizes, default=0),
        )

    def _new_folder(self) -> str:
        name = self.broadcast(f"zero-{uuid.uuid4().hex[:12]}")
        folder = Path(str(self.options.nvme_path)) / name
        folder.mkdir(parents=True, exist_ok=True)
        if self.local_rank == 0:  # not in teardown: a run may be saved, or go on, after its fit
            self._remove_folder = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return str(folder)

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]  # as in DeepSpeedStrategy
        return self._layer_sync.apply(model) if self._layer_sync is not None else model

    def _initialize_deepspeed_train(self, model: nn.Module) -> None:
        module = self.lightning_module
        assert module is not None
        self._end_engine(module)
        optimizers, schedulers = configured_optimizers(module)
        optimizer = self._only_optimizer(optimizers)
        groups = [list(group["params"]) for group in optimizer.param_groups if group["params"]]
        stepped = self._on_host(optimizer)
        self.model, _ = self._setup_model_and_optimizer(model, stepped)
        self._set_deepspeed_activation_checkpointing()
        zero = self.deepspeed_engine.optimizer
        _ENGINES[module] = self.deepspeed_engine
        stage_3 = self.options.stage == 3
        self._state = ZeroState(
            module=module,
            partitions=internals.Stage3Partitions(zero) if stage_3 else internals.Stage12Partitions(zero, groups),
            optimizer=stepped,
            groups=groups,
            folder=self._folder,
        )
        stepped.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]  # DeepSpeed does, in its step
        self.optimizers = [stepped]
        self.lr_scheduler_configs = schedulers
        plugin: Any = self.precision_plugin
        plugin.clip_gradients = self._clip_gradients

    def _only_optimizer(self, optimizers: list[Any]) -> Optimizer:
        module = self.lightning_module
        assert module is not None
        held = [optimizer for optimizer in optimizers if optimizer.param_groups]  # Lightning's stand-in has none
        if len(held) != 1:
            raise SupportError(
                f"ZeRO steps one optimizer, and configure_optimizers() gave {len(held) or 'none'}. Put the parameters"
                " into groups of one optimizer, or use another strategy."
            )
        optimizer: Optimizer = held[0]
        check_optimizer(optimizer)
        own = {id(parameter) for parameter in module.parameters()}
        foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
        if foreign:
            raise SupportError(
                f"The optimizer holds a parameter of shape {tuple(foreign[0].shape)} that is not in the model. Build it"
                " in configure_optimizers() from self.parameters()."
            )
        return optimizer

    def _on_host(self, optimizer: Optimizer) -> Optimizer:
        """DeepSpeed's Adam for CPUs in place of torch's, where the optimizer is offloaded and it builds."""
        if self.options.offload_optimizer == "none" or self._cpu_adam == "torch" or not can_be_cpu_adam(optimizer):
            return optimizer
        problem = cpu_adam_builds() if self.local_rank == 0 else None  # the others find it built
        problems = Ranks.of(None).all_gather(problem)
        found = next((each for each in problems if each is not None), None)
        if found is not None:
            text = f"DeepSpeed's Adam for CPUs does not build ({found})."
            if self._cpu_adam == "deepspeed":
                raise SupportError(f"{text} Use cpu_adam='torch'.")
            rank_zero_warn(f"{text} The optimizer's step runs in torch, which is slower.")
            return optimizer
        mark_scheduled_optimizer_stepped(optimizer)
        return as_cpu_adam(optimizer)

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any | None = None
    ) -> tuple[Any, Any]:
        import deepspeed

        trained = [] if optimizer is None else [p for p in model.parameters() if p.requires_grad]
        engine, zero, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=self.local_rank),
            config=self.config,
            model=model,
            model_parameters=trained,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, zero

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        module, state = self.lightning_module, self._state
        assert module is not None
        if state is not None and state.module is module:
            return  # an engine that trained it goes on
        assert self.config is not None
        if self.options.stage < 3:  # nothing is partitioned where nothing is optimized
            self.config.pop("zero_optimization")
        self.model, zero = self._setup_model_and_optimizer(model, None)
        if self.options.stage == 3:
            partitions = internals.Stage3Parameters(zero, list(module.parameters()))
            self._state = ZeroState(module=module, partitions=partitions, optimizer=None, groups=[], folder=None)

    def on_train_start(self) -> None:
        """Compares the batch sizes of the config, if it has any, with the loader's."""
        super().on_train_start()
        module = self.lightning_module
        assert module is not None
        for loader in train_loaders(module.trainer):
            size = getattr(loader, "batch_size", None)
            self.options.check_batch_size(size, module.trainer.accumulate_grad_batches, self.mesh.dp_size)

    # --- steps ------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's `training_step`."""
        self.begins("training_step")
        self._num_steps_run += 1
        output = super().training_step(*args, **kwargs)
        if isinstance(output, Mapping) and "num_tokens" in output:
            raise StepError(
                "training_step returned num_tokens, but DeepSpeed weighs all ranks alike. Leave it out, or use"
                " strategy='3d'."
            )
        return output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Runs DeepSpeed's backward; the loop has divided the loss by the accumulated batches already."""
        module = self.lightning_module
        assert module is not None
        self.deepspeed_engine.set_gradient_accumulation_boundary(not is_accumulating(module.trainer))
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Nothing: DeepSpeed adds up batches by itself until the boundary that `backward` sets."""
        yield

    def _clip_gradients(self, optimizer: Optimizer, clip_val: float | None = 0.0, *args: Any, **kwargs: Any) -> None:
        """Nothing: DeepSpeed clips in its step; what it would not do is refused."""
        clips = self.deepspeed_engine.gradient_clipping()
        if clip_val and clip_val != clips:
            raise SupportError(
                f"clip_gradients({clip_val}): DeepSpeed clips in its step, at the norm {clips:g}. Use"
                " Trainer(gradient_clip_val=...), or gradient_clipping in the DeepSpeed config."
            )

    @property
    def last_grad_norm(self) -> float | None:
        """Total norm of the gradients of the last step, before clipping."""
        norm = self.deepspeed_engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def _end_engine(self, module: nn.Module) -> None:
        """Takes the hooks of an engine that trained this module before from it, whichever strategy made it."""
        engine = _ENGINES.pop(module, None)
        if engine is not None:
            engine.destroy()
        self._state = None

    def teardown(self) -> None:
        """Gives the module its own `log` back; the processes and the state stay for another run."""
        if self.monitored is not None:
            self.monitored.end(self)
        super().teardown()


class ZeroInfinityStrategy(ZeroOffloadStrategy):
    """ZeRO-Infinity: stage 3 with optimizer state on a local disk and parameters in host memory."""

    strategy_name = "zero_infinity"
    default_options: Mapping[str, Any] = {
        "stage": 3,
        "offload_optimizer": "nvme",
        "offload_params": "cpu",
    }


def _refuse(others: Mapping[str, Any]) -> None:
    """Degrees of axes that ZeRO does not have, and everything else that is no option."""
    for name, value in others.items():
        if name in (*AXES, "ep", "virtual_stages", "num_microbatches") and value in (1, "auto"):
            continue
        if name in (*AXES, "ep", "schedule", "virtual_stages", "num_microbatches"):
            raise PlanError(
                f"{name}={value!r}: ZeRO partitions over data-parallel ranks only, and those are all ranks. Use"
                " strategy='3d' for other axes."
            )
        raise TypeError(f"ZeroOffloadStrategy has no option {name!r}.")
