# SPDX-License-Identifier: Apache-2.0
"""The part of a strategy that runs steps, backwards and clipping, whole or over pipeline stages."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.compat_lightning import (
    call_hook,
    is_accumulating,
    zero_gradients,
)
from lightning_3d.engine import ParallelModel
from lightning_3d.errors import PlanError
from lightning_3d.parallel.agreement import check_same_batch
from lightning_3d.parallel.fsdp import reshard, set_gradient_sync
from lightning_3d.parallel.loss_weighting import LossReduction, LossWeighting
from lightning_3d.parallel.random_state import seed_for, step_random_state
from lightning_3d.pipeline.microbatch import batch_size_of, tensors_of
from lightning_3d.pipeline.steps import PipelineSteps, read_step_output
from lightning_3d.shape import ModelShape
from lightning_3d.strategies.checkpointing import CheckpointedStrategy
from lightning_3d.strategies.even_batches import run_beside
from lightning_3d.strategies.logged_steps import LoggedSteps
from lightning_3d.strategies.step_outputs import merge_outcome

_CHECKED_BATCHES = 4
"""Batches of a run that the ranks of a replica compare, to find data that is sharded by the wrong rank."""


class SteppingStrategy(CheckpointedStrategy):
    """Runs the user's steps on a model that `ThreeDStrategy.setup` has made parallel."""

    _parallel: ParallelModel | None
    _pipeline: PipelineSteps | None
    _logs: LoggedSteps
    _weighting: LossWeighting
    _loss_reduction: LossReduction
    _seed: int
    _num_steps_run: int
    last_grad_norm: Tensor | None

    # --- steps ------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's `training_step`; with pipeline stages, its backward too."""
        self.begins("training_step")
        batch, rest = _split_arguments(args, kwargs)
        if self._num_steps_run < _CHECKED_BATCHES and self.plan.world_size > self.mesh.dp_size:
            check_same_batch(list(tensors_of(batch)), self.mesh, self.root_device)
        self._num_steps_run += 1
        module = self.lightning_module
        assert module is not None
        if self._pipeline is not None:
            return self._pipelined_training_step(module, batch, rest)
        output = self._run_whole(module.training_step, (batch, *rest))
        if isinstance(output, Mapping) and "num_tokens" in output:
            self._num_tokens: float | None = read_step_output(output)[1]
        else:
            self._num_tokens = None
        return output

    def _pipelined_training_step(
        self, module: "pl.LightningModule", batch: Any, rest: tuple[Any, ...]
    ) -> Any:
        assert self._pipeline is not None
        trainer = module.trainer
        batch_idx = trainer.fit_loop.batch_idx
        if batch_idx == 0:
            self._warn_of_odd_batch(batch)
        if batch_idx % trainer.accumulate_grad_batches == 0:
            zero_gradients(trainer, batch_idx, self.optimizers[0])
        scaler = getattr(self.precision_plugin, "scaler", None)
        amp_scale = 1.0 if scaler is None else scaler.scale(torch.ones((), device=self.root_device))

        def scale_loss(loss: Tensor, num_tokens: float | None, num_microbatches: int) -> Tensor:
            parts = num_microbatches * trainer.accumulate_grad_batches
            return self._weighting.weigh(loss, num_tokens, parts) * amp_scale

        window_ends = not is_accumulating(trainer)
        with self._logs.recording():
            outcome = self._pipeline.train(
                module.training_step,
                batch,
                rest,
                scale_loss=scale_loss,
                reduce_gradients=window_ends,
                seed=self._step_seed(),
            )
        output = merge_outcome(outcome, self._loss_reduction)
        loss, tokens = self._logs.publish(
            [output.get("loss", 0.0), sum(outcome.num_tokens) if outcome.num_tokens else -1.0], split=True
        )
        self._weighting.count(tokens if tokens >= 0 else None)
        output["loss"] = torch.tensor(loss, dtype=torch.float32, device=self.root_device)
        call_hook(trainer, "on_before_backward", output["loss"])
        if window_ends:
            self._complete_gradients()
        call_hook(trainer, "on_after_backward")
        return output if len(output) > 1 else output["loss"]

    def _warn_of_odd_batch(self, batch: Any) -> None:
        """A full batch that the asked number of microbatches does not divide runs with fewer: say so."""
        try:
            self.plan.check_batch(batch_size_of(batch))
        except PlanError as error:
            rank_zero_warn(f"{error} As it is, fewer and larger microbatches are used.")

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's `validation_step`; its output is on the ranks of the last stage."""
        return self._evaluation_step("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's `test_step`; its output is on the ranks of the last stage."""
        return self._evaluation_step("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's `predict_step`; its output is on the ranks of the last stage."""
        return self._evaluation_step("predict_step", args, kwargs)

    def _evaluation_step(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.begins(name)
        step = getattr(self.lightning_module, name)
        batch, rest = _split_arguments(args, kwargs)
        self._num_steps_run += 1
        if self._pipeline is None:
            return self._run_whole(step, (batch, *rest))
        with self._logs.recording():
            output = self._pipeline.evaluate(step, batch, rest, seed=self._step_seed())
        if name != "predict_step":
            self._logs.publish([], split=False)
        return output

    def _run_beside(self, batch: Any) -> None:
        """See `run_beside`."""
        run_beside(self, batch)

    def _run_whole(self, step: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        assert self._parallel is not None
        random = (
            step_random_state(self._step_seed(), self.root_device)
            if self.plan.world_size > 1
            else nullcontext()
        )
        with random, self.precision_plugin.forward_context():
            return self._parallel.root(step, *arguments)

    def _step_seed(self) -> int:
        return seed_for(self._seed, self._num_steps_run, self.mesh.dp_rank)

    def on_validation_end(self) -> None:
        """Frees what evaluation gathered, so that the next forward reads fresh weights."""
        self._free_gathered()

    on_test_end = on_predict_end = on_validation_end

    def _free_gathered(self) -> None:
        if self._parallel is not None:
            reshard(self._parallel.root)

    # --- backward and optimizer -------------------------------------------------------------------------------------

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Runs the backward of a whole step (pp=1) and completes the gradients where an optimizer step follows."""
        module = self.lightning_module
        assert module is not None
        plugin, automatic = self.precision_plugin, module.automatic_optimization
        self.pre_backward(closure_loss)
        if automatic:
            closure_loss = self._weigh(closure_loss, module.trainer.accumulate_grad_batches)
        closure_loss = plugin.pre_backward(closure_loss, module)
        plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if not automatic:
            self._average_loose_gradients()
        elif not is_accumulating(module.trainer):
            self._complete_gradients()
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _weigh(self, closure_loss: Tensor, accumulated: int) -> Tensor:
        """Undoes Lightning's division by the accumulated batches where tokens or sums set the weight."""
        self._weighting.count(self._num_tokens)
        if self._num_tokens is None and self._loss_reduction == "mean":
            return closure_loss
        return self._weighting.weigh(closure_loss * accumulated, self._num_tokens, accumulated)

    def _complete_gradients(self) -> None:
        assert self._parallel is not None
        assert self.lightning_module is not None
        self._parallel.gradients.complete()
        self._weighting.finish(self.lightning_module.parameters())

    def _average_loose_gradients(self) -> None:
        assert self._parallel is not None
        self._parallel.gradients.average_loose()

    def _before_step(self, *_: Any) -> None:
        super()._before_step()
        self._average_loose_gradients()  # after a loss.backward() that this strategy did not see

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Defers the reduction of gradients while batches are accumulated."""
        assert self._parallel is not None
        set_gradient_sync(self._parallel.root, enabled=False)
        try:
            yield
        finally:
            set_gradient_sync(self._parallel.root, enabled=True)

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        assert self._parallel is not None
        parameters = self.precision_plugin.main_params(optimizer)
        self.last_grad_norm = self._parallel.gradients.clip_by_norm(parameters, clip_val)

    @property
    def parallel_model(self) -> ParallelModel | None:
        """This rank's part of the model; None before `setup`."""
        return self._parallel

    @property
    def model_shape(self) -> ModelShape | None:
        """Dimensions of the whole model, for estimates; None before `setup`, or where they cannot be read."""
        return None if self._parallel is None else self._parallel.shape

    @property
    def last_bubble_fraction(self) -> float | None:
        """Idle share of the last training batch on this rank; None without pipeline stages."""
        report = None if self._pipeline is None else self._pipeline.runner.last_report
        return None if report is None else report.idle_fraction

    @property
    def last_idle_s(self) -> float:
        """Seconds that this rank idled in the pipeline in the last batch; 0 without pipeline stages."""
        report = None if self._pipeline is None else self._pipeline.runner.last_report
        return 0.0 if report is None else report.idle_s


def _split_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    values = (*args, *kwargs.values())
    return values[0], values[1:]
