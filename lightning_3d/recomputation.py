# SPDX-License-Identifier: Apache-2.0
"""Which blocks of this rank are recomputed: a mode or a share as it is, a budget by the planner's estimates."""

from functools import partial

from lightning_3d.errors import PlanError
from lightning_3d.levers import parse_recompute
from lightning_3d.mesh import ParallelMesh
from lightning_3d.parallel.blocks import Blocks
from lightning_3d.parallel.recompute import Recompute
from lightning_3d.parallel.tensor.region import draws_random_numbers
from lightning_3d.pipeline.cut import Cut
from lightning_3d.planner.activation_budget import ActivationBudget
from lightning_3d.shape import ModelShape


def choose_recompute(
    blocks: Blocks | None,
    mesh: ParallelMesh,
    cut: Cut | None,
    shape: ModelShape | None,
    *,
    precision: str,
    stop_early: bool,
) -> Recompute | None:
    """How the blocks of this rank drop their activations; None keeps them.

    Args:
        blocks: all blocks of the model.
        mesh: the mesh, with its plan.
        cut: the stages; None with one.
        shape: of the whole model, if it can be read.
        precision: the Trainer's.
        stop_early: see `Recompute`.

    Raises:
        PlanError: a budget depends on dimensions that cannot be read.
    """
    plan = mesh.plan
    inside = plan.compile and plan.recompute == "selective"  # see [Note: what is compiled]
    if blocks is None or plan.recompute == "none" or inside:
        return None
    stages = (range(len(blocks)),) if cut is None else cut.stages
    choice, solve = parse_recompute(plan.recompute), None
    if choice.budget_bytes is not None:
        if shape is None:
            raise PlanError(
                f"recompute={plan.recompute!r} depends on the model's dimensions, which cannot be read from it. Give"
                " the share of blocks to recompute instead (recompute=0.5)."
            )
        counts = [0] * mesh.pp_size
        for stage, held in enumerate(stages):
            counts[stage % mesh.pp_size] += len(held)
        dropout = any(draws_random_numbers(block.modules()) for block in blocks.modules)
        budget = ActivationBudget(plan, shape, counts, precision=precision, dropout=dropout)
        solve = partial(budget.num_recomputed, mesh.local_stages[0] % mesh.pp_size)
    return Recompute(
        choice,
        [stages[stage] for stage in mesh.local_stages],
        stop_early=stop_early,
        solve=solve,
    )
