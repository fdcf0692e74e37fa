# SPDX-License-Identifier: Apache-2.0
"""Running a user's steps over pipeline stages: split, agree, schedule, collect. See [Note: the step is the stage]."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.errors import ModelError, StepError
from lightning_3d.mesh import ParallelMesh
from lightning_3d.parallel.agreement import agree
from lightning_3d.parallel.blocks import Blocks
from lightning_3d.parallel.gate import BlockGate, BlockRun, MergeRun, ProbeRun, StageExit, StageRun
from lightning_3d.parallel.random_state import enter_stage, step_random_state
from lightning_3d.parallel.stand_ins import poison
from lightning_3d.pipeline.cut import Cut
from lightning_3d.pipeline.cut_check import CutCheck
from lightning_3d.pipeline.microbatch import batch_size_of, copy_of_batch, signature_of, split_batch
from lightning_3d.pipeline.runtime import PipelineRunner
from lightning_3d.profiling.failure_place import is_out_of_memory
from lightning_3d.schedules import Schedule, schedule_for_batch

Step = Callable[..., Any]


@dataclass
class StepOutcome:
    """What the last stage knows of one training batch; empty elsewhere."""

    losses: list[Tensor] = field(default_factory=list)
    """Detached loss of each microbatch, as the step returned it."""
    num_tokens: list[float] = field(default_factory=list)
    """`num_tokens` of each microbatch, if the step returned it."""
    extras: list[dict[str, Any]] = field(default_factory=list)
    """What else the step returned, for each microbatch."""


@dataclass
class _Batch:
    """The batch being run."""

    step: Step
    microbatches: list[Any]
    rest: tuple[Any, ...]
    scale_loss: Callable[[Tensor, float | None, int], Tensor] | None
    seed: int
    template: Any
    outcome: StepOutcome = field(default_factory=StepOutcome)
    hidden: list[Tensor] = field(default_factory=list)
    last_output: Any = None


class StageModule(nn.Module):
    """One stage as the schedule's executor sees it: hidden state and microbatch number in, hidden state or loss out."""

    def __init__(self, steps: "PipelineSteps", stage: int) -> None:
        super().__init__()
        self._run = steps.run_stage
        self._stage = stage

    def forward(self, hidden: Tensor, microbatch: int) -> Tensor:
        """hidden: [b, S, D] from the stage before (ignored on the first) -> [b, S, D], or the scalar loss."""
        return self._run(self._stage, hidden, int(microbatch))


class PipelineSteps:
    """Runs training and evaluation steps over the stages of one model replica."""

    def __init__(
        self,
        *,
        root: nn.Module,
        gate: BlockGate,
        blocks: Blocks,
        cut: Cut,
        mesh: ParallelMesh,
        device: torch.device,
        wire_dtype: torch.dtype,
        step_context: Callable[[], AbstractContextManager[Any]],
        check: CutCheck,
        aside: Callable[[bool], AbstractContextManager[Any]],
    ) -> None:
        """Builds the runner of the stages; runs nothing yet.

        Args:
            root: called with a step, gathers what the step reads (`StepRoot`).
            gate: gate of the blocks.
            blocks: the blocks.
            cut: which blocks each stage has.
            mesh: the mesh.
            device: this rank's device.
            wire_dtype: dtype of the hidden state between stages.
            step_context: makes the context (autocast) around a step.
            check: compares the stages with the whole model in the first training batch.
            aside: makes the context around a run of the step that does not count: it forgets what is logged, and puts
                metrics back; buffers too if its argument is true.
        """
        self._aside = aside
        self._check = check
        self._root, self._gate, self._blocks, self._cut = root, gate, blocks, cut
        self._mesh, self._device = mesh, device
        self._wire_dtype, self._step_context = wire_dtype, step_context
        self._loss_dtype = torch.float64 if wire_dtype == torch.float64 else torch.float32
        self._shapes: dict[Any, tuple[torch.Size, Any]] = {}
        self._batch: _Batch | None = None
        self._training = False
        plan = mesh.plan
        self.runner = PipelineRunner(
            stages={stage: StageModule(self, stage) for stage in mesh.local_stages},
            num_stages=plan.num_stages,
            group=mesh.group("pp"),
            stage_to_group_rank={stage: mesh.stage_owner(stage) for stage in range(plan.num_stages)},
            device=device,
            fsdp_root=root,
            fsdp_modules={
                stage: [blocks.modules[index] for index in cut.stages[stage]] for stage in mesh.local_stages
            },
        )

    def train(
        self,
        step: Step,
        batch: Any,
        rest: tuple[Any, ...],
        *,
        scale_loss: Callable[[Tensor, float | None, int], Tensor],
        reduce_gradients: bool,
        seed: int,
    ) -> StepOutcome:
        """Runs forward and backward of a batch; gradients are accumulated in the parameters.

        Args:
            step: the user's `training_step`.
            batch: this replica's batch.
            rest: further arguments of the step.
            scale_loss: (loss, num_tokens, number of microbatches) -> what the backward starts from.
            reduce_gradients: whether FSDP reduces the gradients at the end (the last batch of an accumulation).
            seed: of this batch, equal within a replica.
        """
        is_checked = self._check.is_due
        # Before anything is gathered.
        is_comparable = is_checked and self._check.is_unchanged(self._root, self._device)
        shape, run = self._begin(step, batch, rest, scale_loss, seed)
        self._training = True
        self.runner.run(
            self._schedule(len(run.microbatches), train=True),
            hidden=(shape, self._wire_dtype),
            loss_dtype=self._loss_dtype,
            backward=True,
            reduce_gradients=reduce_gradients,
        )
        self._batch = None
        if is_checked:
            self._finish_check(run, batch, is_comparable)
        return run.outcome

    def _finish_check(self, run: _Batch, batch: Any, is_comparable: bool) -> None:
        if is_comparable:
            module = self._root.get_submodule("module")
            self._check.compare(
                module,
                (split_batch(batch, len(run.microbatches))[0], *run.rest),
                run.outcome.losses[0] if run.outcome.losses else None,
                step_name=run.step.__name__,
                loss_of=lambda output: read_step_output(output)[0],
                seed=run.seed,
                device=self._device,
                context=self._step_context,
            )
        self._check.finish(self._device)

    def evaluate(self, step: Step, batch: Any, rest: tuple[Any, ...], *, seed: int) -> Any:
        """Runs an evaluation step: the blocks microbatch by microbatch, the rest once on the whole batch.

        Returns:
            What the step returned, on the rank of the last stage; None elsewhere.
        """
        shape, run = self._begin(step, batch, rest, None, seed)
        self._training = False
        self.runner.run(
            self._schedule(len(run.microbatches), train=False),
            hidden=(shape, self._wire_dtype),
            loss_dtype=self._loss_dtype,
            backward=False,
            reduce_gradients=False,
        )
        self._batch = None
        if not self._mesh.holds_loss:
            return None
        merge = MergeRun(self._gate.num_blocks, torch.cat(run.hidden), run.last_output)
        with step_random_state(seed, self._device), self._step_context():
            return self._root(self._follow, merge, step, (copy_of_batch(batch), *rest))

    def run_stage(self, stage: int, hidden: Tensor, microbatch: int) -> Tensor:
        """Runs one stage on one microbatch; called by the executor."""
        run = self._batch
        if run is None:
            raise StepError("A stage was run outside a step.")
        is_last = stage == len(self._cut.stages) - 1
        output, last_output = self._follow_stage(run, stage, hidden, microbatch)
        if not is_last:
            self._check_gradient(stage, output)
            return output.to(self._wire_dtype)
        if not self._training:
            run.hidden.append(output)
            run.last_output = last_output
            return torch.zeros((), dtype=self._loss_dtype, device=self._device)
        return self._collect_loss(run, output)

    def _follow_stage(self, run: _Batch, stage: int, hidden: Tensor, microbatch: int) -> tuple[Any, Any]:
        """Runs a stage; while the cut is checked, once more beside, to see whether NaN in place of stand-ins shows."""
        found = self._run_step(run, stage, hidden, microbatch, None)
        if stage > 0 and self._training and self._check.is_due:
            output = self._output_on_nan(run, stage, hidden, microbatch)
            if _is_finite(hidden) and _is_finite(found[0]) and not _is_finite(output):
                self._check.add_leak(stage, self._cut.stages[stage])
        return found

    def _output_on_nan(self, run: _Batch, stage: int, hidden: Tensor, microbatch: int) -> Any:
        """What a stage gives with NaN in place of stand-ins; None where the step refuses NaN.

        All ranks of the stage run this, whatever their microbatches: they gather weights together.
        """
        received = hidden.detach().clone()  # the step may write into it
        try:
            with torch.no_grad(), self._aside(True):
                return self._run_step(run, stage, received, microbatch, poison)[0]
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None

    def _run_step(
        self,
        run: _Batch,
        stage: int,
        hidden: Tensor,
        microbatch: int,
        stand_in: Callable[[Tensor], Tensor] | None,
    ) -> tuple[Any, Any]:
        """What the step gave at the end of the stage, and the output of its last block."""
        blocks, seed = self._cut.stages[stage], run.seed + microbatch
        is_stopped = stage < len(self._cut.stages) - 1 or not self._training
        traversal = StageRun(
            self._gate,
            blocks.start,
            blocks.stop,
            hidden if stage > 0 else None,
            exit_at_stop=is_stopped,
            template=run.template,
            on_start=lambda: enter_stage(seed, stage, self._device),
            stand_in=stand_in,
        )
        arguments = (copy_of_batch(run.microbatches[microbatch]), *run.rest)
        # What a step logs before it calls the model, the run to its end logs.
        aside = self._aside(False) if is_stopped else nullcontext()
        with aside, step_random_state(seed, self._device), self._step_context():
            return self._root(self._follow, traversal, run.step, arguments), traversal.last_output

    def _check_gradient(self, stage: int, hidden: Tensor) -> None:
        if not self._training or hidden.requires_grad:
            return
        blocks = (self._blocks.modules[index] for index in self._cut.stages[stage])
        if any(parameter.requires_grad for block in blocks for parameter in block.parameters()):
            raise StepError(
                f"Stage {stage} ran without gradients although its blocks are trained: the step ended inside"
                " torch.no_grad() or checkpoint(use_reentrant=True). Use checkpoint(use_reentrant=False)."
            )

    def _follow(self, traversal: BlockRun, step: Step, arguments: tuple[Any, ...]) -> Any:
        try:
            with self._gate.running(traversal):
                output = step(*arguments)
        except StageExit as exit_:
            return exit_.hidden
        if isinstance(traversal, StageRun):
            traversal.check_complete()
        elif isinstance(traversal, ProbeRun):
            raise StepError(
                "The step returned without calling the model. Under pipeline parallelism every step must call the model"
                " exactly once. Use pp=1 for steps that do not."
            )
        return output

    def _collect_loss(self, run: _Batch, output: Any) -> Tensor:
        loss, num_tokens, extras = read_step_output(output)
        run.outcome.losses.append(loss.detach())
        run.outcome.extras.append(extras)
        if num_tokens is not None:
            run.outcome.num_tokens.append(num_tokens)
        assert run.scale_loss is not None
        return run.scale_loss(loss, num_tokens, len(run.microbatches)).to(self._loss_dtype)

    def _begin(
        self,
        step: Step,
        batch: Any,
        rest: tuple[Any, ...],
        scale_loss: Callable[[Tensor, float | None, int], Tensor] | None,
        seed: int,
    ) -> tuple[torch.Size, _Batch]:
        """Splits the batch and learns the shape of the hidden state, all ranks alike."""
        # Another step, or another data loader, may use the same batch otherwise.
        key = (getattr(step, "__name__", ""), *rest[1:], signature_of(batch))
        size, probe = agree(batch_size_of(batch), key not in self._shapes, self._device)
        microbatches = split_batch(batch, self._mesh.plan.microbatches_for(size))
        if probe:
            self._shapes[key] = self._probe(step, (batch, *rest), seed)
        whole, template = self._shapes[key]
        shape = torch.Size((whole[0] // len(microbatches), *whole[1:]))
        if self._gate.border is not None:
            self._gate.border.expect_sequence(shape[1])
            shape = self._gate.border.local_hidden_shape(shape)
        self._batch = _Batch(step, microbatches, rest, scale_loss, seed, template)
        return shape, self._batch

    def _probe(self, step: Step, arguments: tuple[Any, ...], seed: int) -> tuple[torch.Size, Any]:
        """Shape of the whole batch's hidden state between stages, and an output of a block; all ranks together."""
        for twin, block in zip(self._cut.twins, self._blocks.modules, strict=True):
            twin.train(block.training)
        probe = ProbeRun(self._cut.twins)
        with self._aside(True), torch.no_grad(), step_random_state(seed, self._device), self._step_context():
            self._root(self._follow, probe, step, copy_of_batch(arguments))
        if len(set(probe.hidden_shapes)) > 1:
            shapes = ", ".join(str(tuple(shape)) for shape in dict.fromkeys(probe.hidden_shapes))
            raise ModelError(
                f"The hidden state changes its shape between blocks ({shapes}), so stages cannot be cut anywhere."
                " Name a list of equal blocks with the strategy's blocks=..., or use pp=1."
            )
        return probe.hidden_shapes[0], probe.template

    def _schedule(self, num_microbatches: int, *, train: bool) -> Schedule:
        plan = self._mesh.plan
        name = plan.schedule if train else ("looped_bfs" if plan.virtual_stages > 1 else "gpipe")
        return schedule_for_batch(
            name,
            num_ranks=self._mesh.pp_size,
            num_microbatches=num_microbatches,
            virtual_stages=plan.virtual_stages,
        )


def _is_finite(value: Any) -> bool:
    """Whether a hidden state, or the loss in what a step returned, has no NaN."""
    tensor = value.get("loss") if isinstance(value, Mapping) else value
    return not (isinstance(tensor, Tensor) and bool(tensor.detach().isnan().any()))


def read_step_output(output: Any) -> tuple[Tensor, float | None, dict[str, Any]]:
    """Takes apart what a training step returned.

    Args:
        output: a loss, or a mapping with `loss` and, for exact weighting, `num_tokens`.

    Returns:
        The loss, the number of tokens it is the mean of, and the rest.

    Raises:
        StepError: there is no loss.
    """
    if isinstance(output, Tensor):
        return output, None, {}
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        extras = {key: value for key, value in output.items() if key != "loss"}
        tokens = extras.get("num_tokens")
        return output["loss"], None if tokens is None else float(tokens), extras
    kind = "None" if output is None else type(output).__name__
    raise StepError(
        f"training_step returned {kind}, but a pipeline needs a loss on every microbatch: return a tensor, or a"
        " dictionary with 'loss'. To skip a batch, return a loss multiplied by zero."
    )
