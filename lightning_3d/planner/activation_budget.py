# SPDX-License-Identifier: Apache-2.0
"""`recompute="2GiB"`: how many blocks of a rank must be recomputed, for the batch that has come."""

from collections.abc import Sequence

from lightning_3d.errors import PlanError
from lightning_3d.estimator import MemoryModel, Workload, layout_of_plan
from lightning_3d.estimator.activations import microbatches_in_flight
from lightning_3d.estimator.states import StageBlocks
from lightning_3d.levers import parse_recompute
from lightning_3d.plan import MICROBATCHES_PER_STAGE, ParallelPlan
from lightning_3d.planner.auto import matmul_of
from lightning_3d.shape import ModelShape
from lightning_3d.units import GIB, format_bytes


class ActivationBudget:
    """Solves a budget with the estimates of block activations; the same on all ranks."""

    def __init__(
        self,
        plan: ParallelPlan,
        shape: ModelShape,
        num_blocks: Sequence[int],
        *,
        precision: str,
        dropout: bool,
    ) -> None:
        """Takes what the estimates depend on, the batch excepted.

        Args:
            plan: resolved, with a budget.
            shape: of the model.
            num_blocks: blocks of each pipeline rank, the rank of the first stage first.
            precision: the Trainer's.
            dropout: whether blocks drop out.
        """
        budget = parse_recompute(plan.recompute).budget_bytes
        assert budget is not None
        self._plan, self._num_blocks, self._budget_bytes = plan, num_blocks, budget
        workload = Workload(
            seq_len=1, global_batch=1, matmul=matmul_of(precision), dropout=dropout, fused=plan.compile
        )
        self._model = MemoryModel(shape, workload)

    def num_recomputed(self, rank: int, num_tokens: int) -> int:
        """Blocks that a rank recomputes.

        Args:
            rank: pipeline rank, the one of the first stage is 0.
            num_tokens: tokens of a microbatch in the hidden state of a rank; with sequence parallelism its part.

        Raises:
            PlanError: not even the recomputation of all blocks keeps every rank to the budget.
        """
        counts = [self._solve(each, num_tokens) for each in range(len(self._num_blocks))]
        return counts[rank]

    def _solve(self, rank: int, num_tokens: int) -> int:
        plan = self._plan
        tokens = num_tokens * (plan.size("tp") if plan.sequence_parallel else 1)
        asked = plan.num_microbatches
        microbatches = MICROBATCHES_PER_STAGE * plan.size("pp") if asked == "auto" else asked
        in_flight = microbatches_in_flight(
            plan.schedule, plan.size("pp"), rank, plan.virtual_stages, microbatches
        )
        blocks = StageBlocks(0.0, float(self._num_blocks[rank]))
        if not self._model.shape.num_moe_layers:
            blocks = StageBlocks(float(self._num_blocks[rank]), 0.0)
        layout = layout_of_plan(plan, batch_per_replica=1)
        activations = self._model.rank_activations(layout, blocks, tokens, in_flight)
        count = activations.num_recomputed_within(self._budget_bytes)
        if count is None:
            least = activations.peak(activations.num_blocks)
            raise PlanError(
                f"recompute={plan.recompute!r}: with all {activations.num_blocks} blocks of pipeline rank {rank}"
                f" recomputed, {in_flight:g} microbatches of {tokens} tokens still take {format_bytes(least)}."
                f" Use recompute='{1.05 * least / GIB:.3g}GiB', a smaller batch, or more microbatches."
            )
        return count
