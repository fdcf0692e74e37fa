# SPDX-License-Identifier: Apache-2.0
"""`ThreeDStrategy`: Lightning's hooks, translated into calls on the engine."""

from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_3d.compat_lightning import (
    let_finetuning_tell_shards_apart,
    let_strategy_run_backward,
    optimizers_to_device,
)
from lightning_3d.engine import ModelOptions, ParallelModel, parallelize
from lightning_3d.levers import DEFAULT_BACKEND, Offload, RecomputeOption, check_levers
from lightning_3d.parallel.compiled import check_backend
from lightning_3d.parallel.gradients import clip_by_value
from lightning_3d.parallel.loss_weighting import LossReduction, LossWeighting
from lightning_3d.pipeline.steps import PipelineSteps
from lightning_3d.plan import Degree, ParallelPlan, ScheduleName, check_microbatches
from lightning_3d.strategies import weight_averaging
from lightning_3d.strategies.auto_plan import Workplace, check_plan_against, choose_degrees
from lightning_3d.strategies.checkpointing import OnSaveError
from lightning_3d.strategies.even_batches import EvenBatches
from lightning_3d.strategies.logged_steps import LoggedSteps, sync_metrics_over_replicas
from lightning_3d.strategies.monitored import MonitoredLog
from lightning_3d.strategies.plan_table import print_plan
from lightning_3d.strategies.predictions import write_once
from lightning_3d.strategies.reuse import Parallelized, parallelized_before, remember
from lightning_3d.strategies.shared_randomness import share_random_state
from lightning_3d.strategies.stepping import SteppingStrategy
from lightning_3d.strategies.support import (
    check_optimizers,
    check_precision,
    check_trainer,
    something_to_optimize,
)
from lightning_3d.strategies.whole_state import gather_state
from lightning_3d.strategies.whole_summary import summarize_whole


class ThreeDStrategy(SteppingStrategy):
    """Trains an unmodified LightningModule over pipeline, data (replicate x shard) and tensor parallel ranks.

    Example::

        import lightning_3d
        trainer = Trainer(strategy="3d", devices=8)
        trainer = Trainer(strategy=ThreeDStrategy(pp=2, dp_shard=2, tp=2, num_microbatches=8), devices=8)
    """

    strategy_name = "3d"

    def __init__(
        self,
        pp: Degree = "auto",
        dp_replicate: Degree = "auto",
        dp_shard: Degree = "auto",
        cp: Degree = 1,
        tp: Degree = "auto",
        ep: Degree = 1,
        schedule: ScheduleName = "1f1b",
        num_microbatches: Degree = "auto",
        virtual_stages: int = 1,
        recompute: RecomputeOption = "none",
        offload: Offload = "none",
        compile: bool = False,
        compile_backend: str = DEFAULT_BACKEND,
        float8_all_gather: bool = False,
        sequence_parallel: bool = True,
        reshard_after_forward: bool = True,
        blocks: str | None = None,
        tp_styles: Mapping[str, str] | None = None,
        tp_head_attributes: tuple[str, ...] = (),
        first_stage_modules: tuple[str, ...] = (),
        last_stage_modules: tuple[str, ...] = (),
        loss_reduction: LossReduction = "mean",
        cluster: str | None = None,
        strict_topology: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        save_async: bool = False,
        on_save_error: OnSaveError = "stop",
    ) -> None:
        """Describes the layout; nothing starts before the Trainer does.

        Args:
            pp: pipeline stages in a row; `auto` is 1.
            dp_replicate: replicas of the sharded state, across nodes; `auto` takes the rest of the world.
            dp_shard: ranks that share parameters, gradients and optimizer state (FSDP2); `auto` fills a node.
            cp: ranks that split the sequence outside tensor parallelism.
            tp: ranks that split every layer (Megatron), inside a node; `auto` is 1.
            ep: ranks that share the experts.
            schedule: `1f1b`, `gpipe` or `interleaved`.
            num_microbatches: parts of a replica's batch under `pp` > 1; `auto` takes up to four a stage.
            virtual_stages: stages a rank holds, with `schedule="interleaved"`.
            recompute: `none`, `selective` (keep attention and half of the matrix products) or `full`, block by block; a
                share of the blocks (`0.5`); or what activations may take on a rank (`2GiB`).
            offload: `cpu` keeps parameters, gradients and optimizer state in the host's memory.
            compile: compile each block.
            compile_backend: what compiles them.
            float8_all_gather: compute the blocks' linear layers in 8 bits, and gather their weights in 8 (torchao).
            sequence_parallel: split activations along the sequence between tensor-parallel regions.
            reshard_after_forward: free gathered blocks after their forward (less memory, more traffic).
            blocks: name of the model's list of layers, if it is not its longest `ModuleList`.
            tp_styles: tensor-parallel styles by name pattern, before those found by themselves.
            tp_head_attributes: integer attributes of attention modules to divide by `tp`, beside the usual names.
            first_stage_modules: modules before the blocks that are defined behind them.
            last_stage_modules: modules behind the blocks that are defined before them.
            loss_reduction: whether `training_step` returns the mean or the sum over its part of the batch.
            cluster: what to plan `auto` degrees for (`2x8xH100`), if not for the GPUs that are here.
            strict_topology: refuse, rather than warn, when a chatty axis leaves the node.
            process_group_backend: `gloo` or `nccl`; by the device if None.
            timeout: of collectives.
            save_async: write checkpoints in the background. Hooks of callbacks must leave weights alone between a save
                and the next optimizer step.
            on_save_error: `stop` training when a checkpoint cannot be written, or warn and `continue`.

        Raises:
            PlanError: a degree or option is out of its range.
        """
        plan = ParallelPlan(
            pp=pp,
            dp_replicate=dp_replicate,
            dp_shard=dp_shard,
            cp=cp,
            tp=tp,
            ep=ep,
            schedule=schedule,
            num_microbatches=num_microbatches,
            virtual_stages=virtual_stages,
            recompute=recompute,
            offload=offload,
            compile=compile,
            compile_backend=compile_backend,
            float8_all_gather=float8_all_gather,
            sequence_parallel=sequence_parallel,
            reshard_after_forward=reshard_after_forward,
        )
        super().__init__(
            plan,
            strict_topology=strict_topology,
            process_group_backend=process_group_backend,
            timeout=timeout,
            save_async=save_async,
            on_save_error=on_save_error,
        )
        self._options = ModelOptions(
            blocks=blocks,
            tp_styles=tp_styles,
            tp_head_attributes=tuple(tp_head_attributes),
            first_stage_modules=tuple(first_stage_modules),
            last_stage_modules=tuple(last_stage_modules),
        )
        self._loss_reduction: LossReduction = loss_reduction
        self._cluster = cluster
        self._parallel: ParallelModel | None = None
        self._pipeline: PipelineSteps | None = None
        self._num_steps_run = 0
        self.last_grad_norm: Tensor | None = None

    # --- setup ------------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        check_microbatches(self.plan)
        check_levers(self.plan)
        if self.plan.compile:
            check_backend(self.plan.compile_backend, self.root_device)

    def setup_environment(self) -> None:
        """Chooses the degrees left open and checks all of them on the model, then meets the other ranks."""
        module = self.lightning_module
        assert module is not None
        if self._mesh is None:
            self._choose_plan(module)
        super().setup_environment()
        weight_averaging.take_over(module.trainer)

    def _choose_plan(self, module: "pl.LightningModule") -> None:
        where = Workplace(
            world_size=self.num_nodes * self.num_processes,
            ranks_per_node=self.num_processes,
            device=self.root_device,
            cluster=self._cluster,
        )
        chosen = choose_degrees(self._asked, module, module.trainer, where, self.precision_plugin.precision)
        self.plan = chosen or self.plan
        check_levers(self.plan)
        check_plan_against(self.plan, module, self._options.blocks)

    def setup(self, trainer: "pl.Trainer") -> None:
        """Checks, parallelizes the model, then lets the user build the optimizer on what this rank holds."""
        module = self.lightning_module
        assert self.accelerator is not None
        assert module is not None
        self.accelerator.setup(trainer)
        self.stop_with_all_ranks(trainer)
        let_finetuning_tell_shards_apart()
        share_random_state(self.mesh, self.root_device)
        write_once(trainer, self.mesh)
        if self.mesh.dp_size > 1:
            self.even_batches = EvenBatches(trainer, self.mesh, self.root_device, self._run_beside)
            self.monitored = MonitoredLog.begin(module, self)
        check_trainer(trainer, module, self.plan)
        check_precision(self.precision_plugin)
        for warning in self.topology_warnings:
            rank_zero_warn(warning)
        names_before = {id(parameter): name for name, parameter in module.named_parameters()}
        if self._parallel is None or self._parallel.root.module is not module:
            self._lay_out(trainer, module)
        assert self._parallel is not None
        self.follow_trail(self._parallel.trail)
        self._weighting = LossWeighting(self.mesh, self._loss_reduction, self.root_device)
        weight_averaging.begin(trainer, module, self._weights_may_change)
        for loop in (
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
            trainer.fit_loop.epoch_loop.val_loop,
        ):
            loop.inference_mode = False  # FSDP2 cannot train after a forward under inference_mode
        if trainer.state.fn == TrainerFn.FITTING:
            with something_to_optimize(module) if self._pipeline is not None else nullcontext() as stand_in:
                self.setup_optimizers(trainer)
            check_optimizers(self.optimizers, names_before, module, stand_in)
            if self._pipeline is not None:
                let_strategy_run_backward(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            offloaded = self.plan.offload != "none"
            optimizers_to_device(self.optimizers, torch.device("cpu") if offloaded else self.root_device)

    def _lay_out(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
        """Parallelizes a module, or takes over one that an earlier Trainer did."""
        precision = self.precision_plugin.precision
        self._seed = self.broadcast(torch.initial_seed() % 2**62)
        made = parallelized_before(module, self.mesh, precision)
        if made is not None:
            self._mesh = made.mesh
        # Before the check of the cut copies them.
        sync_metrics_over_replicas(module, self.mesh, self.root_device)
        if made is None:
            # Again, since configure_model may have made the model only now.
            check_plan_against(self.plan, module, self._options.blocks)
            self.model = self.precision_plugin.convert_module(module)
            summarize_whole(trainer, module)
            parallel = parallelize(
                module,
                self.mesh,
                self._options,
                device=self.root_device,
                precision=precision,
                seed=self._seed,
                shard_root=module.automatic_optimization,
            )
            remember(module, Parallelized(parallel=parallel, mesh=self.mesh, precision=precision))
        else:
            self.model, parallel = module, made.parallel
        self._parallel, self._pipeline = parallel, None
        self._build_steps(module)

    def whole_state_dict(self) -> dict[str, Tensor]:
        """The weights of the whole model, for `model.save_pretrained(path, state_dict=...)` or `torch.save`; collective.

        Returns:
            On global rank 0 every tensor, on the CPU; on other ranks nothing.

        Raises:
            CheckpointError: not all ranks call it.
        """
        module = self.lightning_module
        assert module is not None
        self.all_ranks_call("trainer.strategy.whole_state_dict")
        self._free_gathered()
        return gather_state(module, self.mesh)

    def _weights_may_change(self) -> None:
        """Comes before weights are read or written outside of steps: only shards are left, and no save copies them."""
        self._free_gathered()
        self.state_may_change()

    def _build_steps(self, module: "pl.LightningModule") -> None:
        assert self._parallel is not None
        mesh, device = self.mesh, self.root_device
        if self._parallel.cut is not None:
            assert self._parallel.gate is not None
            assert self._parallel.blocks is not None
            assert self._parallel.check is not None
            self._logs = LoggedSteps(module, mesh, device)
            self._pipeline = PipelineSteps(
                root=self._parallel.root,
                gate=self._parallel.gate,
                blocks=self._parallel.blocks,
                cut=self._parallel.cut,
                mesh=mesh,
                device=device,
                wire_dtype=self._wire_dtype(module),
                step_context=self.precision_plugin.forward_context,
                check=self._parallel.check,
                aside=self._logs.aside,
            )
        if self.is_global_zero:
            print_plan(self.plan, self._parallel)

    def _wire_dtype(self, module: "pl.LightningModule") -> torch.dtype:
        dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
        return self.broadcast(max(dtypes, key=lambda dtype: dtype.itemsize) if dtypes else torch.float32)

    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        """Builds optimizers anew: those of an earlier fit point at parameters that may be gone."""
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)

    def setup_precision_plugin(self) -> None:
        """Attaches the precision plugin and gives it the clipping that knows all meshes."""
        super().setup_precision_plugin()
        plugin: Any = self.precision_plugin
        plugin.clip_grad_by_norm = self._clip_by_norm
        plugin.clip_grad_by_value = lambda optimizer, clip_val: clip_by_value(
            plugin.main_params(optimizer), clip_val
        )

    def teardown(self) -> None:
        """Frees gathered parameters; the processes stay for another run."""
        self._free_gathered()
        if self.monitored is not None:
            self.monitored.end(self)
        super().teardown()
