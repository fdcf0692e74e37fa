# SPDX-License-Identifier: Apache-2.0
"""The planner in one call: for the command line, and for `auto` degrees of a running engine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_3d.errors import PlanError
from lightning_3d.estimator import STATE_BYTES, Layout, Workload
from lightning_3d.estimator.layout import LOGITS_BYTES_PLAIN, OFFLOAD_OF_PLAN, Matmul, StateBytes
from lightning_3d.hardware import Cluster
from lightning_3d.levers import parse_recompute
from lightning_3d.plan import ParallelPlan
from lightning_3d.planner.rank import Planner, PlanReport
from lightning_3d.planner.search import SearchSpace
from lightning_3d.shape import ModelShape

PLAN_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


def plan_for(
    shape: ModelShape,
    cluster: Cluster,
    *,
    seq_len: int,
    global_batch: int = 0,
    batch_per_replica: int = 0,
    precision: str = "bf16",
    compiled: bool = False,
    states: StateBytes | None = None,
    fixed: Mapping[str, int] | None = None,
    space: SearchSpace | None = None,
) -> PlanReport:
    """Ranks the layouts of a model on a cluster.

    Args:
        shape: dimensions of the model.
        cluster: the devices.
        seq_len: tokens of a sequence.
        global_batch: sequences of a step over all replicas.
        batch_per_replica: sequences of a step on each replica, instead of `global_batch`.
        precision: `bf16`, `fp16`, `fp32`, `fp8`, `mxfp8` or `nvfp4`, for the blocks' matrix products.
        compiled: whether blocks run compiled, or with fused kernels; plain PyTorch keeps more activations.
        states: bytes of parameters, gradients and optimizer; FSDP2's mixed precision if None.
        fixed: degrees that are given (`{"tp": 8}`).
        space: what may vary; everything if None.

    Raises:
        PlanError: no layout is legal.
    """
    workload = Workload(
        seq_len=seq_len,
        global_batch=global_batch,
        batch_per_replica=batch_per_replica,
        states=states or states_of(precision),
        matmul=matmul_of(precision),
        fused=compiled,
        logits_bytes=LOGITS_BYTES_PLAIN,
    )
    space = space or SearchSpace()
    if fixed:
        space = replace(space, fixed={**space.fixed, **fixed})
    return Planner(shape, cluster, workload, space=space).rank()


def states_of(precision: str) -> StateBytes:
    """The states of FSDP2 with Adam under a precision; `bf16-true` keeps everything in 16 bits."""
    if precision.endswith("-true") and not precision.startswith("32"):
        return STATE_BYTES["bf16"]
    return STATE_BYTES["fp32" if matmul_of(precision) == "fp32" else "fsdp2-mixed"]


def matmul_of(precision: str) -> Matmul:
    """The product format of a Lightning precision (`bf16-mixed`, `32-true`) or of a plain name."""
    name = precision.lower()
    for known in ("nvfp4", "mxfp8", "fp8", "bf16", "fp16"):
        if name.startswith(known):
            return known
    if name.startswith("16"):
        return "fp16"
    if name.startswith(("fp32", "32")):
        return "fp32"
    raise PlanError(f"precision={precision!r} is unknown. Use bf16, fp16, fp32, fp8, mxfp8 or nvfp4.")


ENGINE_SPACE = SearchSpace(
    recompute=("none",),
    offload=("none",),
    schedules=("1f1b",),
    context_parallel=False,
    expert_parallel=False,
    accumulate=False,
)
"""What `auto` may choose in a running engine: it does not switch on recomputation, offload or another schedule."""


def runs(layout: Layout, workload: Workload) -> bool:
    """Whether this version of the engine has all that a layout asks for."""
    try:
        layout.to_plan(workload)
    except PlanError:
        return False
    return True


def only_runnable(space: SearchSpace) -> SearchSpace:
    """The space without what this version of the engine lacks."""
    probe = Workload(seq_len=1, global_batch=1)
    return replace(
        space,
        recompute=tuple(kind for kind in space.recompute if runs(Layout(recompute=kind), probe)),
        offload=tuple(kind for kind in space.offload if runs(Layout(offload=kind), probe)),
        context_parallel=space.context_parallel and runs(Layout(cp=2), probe),
        expert_parallel=space.expert_parallel and runs(Layout(ep=2), probe),
    )


@dataclass(frozen=True, kw_only=True)
class AutoChoice:
    """What `auto` became."""

    plan: ParallelPlan
    report: PlanReport


def resolve_auto(
    plan: ParallelPlan,
    shape: ModelShape,
    cluster: Cluster,
    *,
    seq_len: int,
    batch_per_replica: int,
    precision: str = "bf16-mixed",
    compiled: bool = False,
    states: StateBytes | None = None,
) -> AutoChoice:
    """Chooses the `auto` degrees of a plan; given degrees stay.

    Args:
        plan: the user's plan, with some degrees `auto`.
        shape: the model's real dimensions (`lightning_3d.models.shape_of_module`).
        cluster: the real devices (`lightning_3d.hardware.cluster_of_devices`).
        seq_len: tokens of a sample.
        batch_per_replica: samples of the data loader's batch, which one replica trains on.
        precision: the Trainer's precision.
        compiled: whether blocks run compiled.
        states: bytes of the states, if they are not those of FSDP2 with Adam.

    Returns:
        The resolved plan, and the report whose table says why.

    Raises:
        PlanError: no legal layout has the given degrees, or none fits the devices.
    """
    fixed = {axis: getattr(plan, axis) for axis in PLAN_AXES if getattr(plan, axis) != "auto"}
    again = parse_recompute(plan.recompute)
    space = replace(
        ENGINE_SPACE,
        fixed=fixed,
        schedules=(plan.schedule,),
        recompute=(again.mode,),
        recompute_fraction=again.fraction,
        recompute_budget_bytes=again.budget_bytes or 0.0,
        offload=(OFFLOAD_OF_PLAN[plan.offload],),
    )
    if plan.virtual_stages > 1:
        space = replace(space, fixed={**fixed, "virtual_stages": plan.virtual_stages})
    if isinstance(plan.num_microbatches, int) and plan.num_microbatches > 1:
        size = max(1, batch_per_replica // plan.num_microbatches)
        space = replace(space, fixed={**space.fixed, "microbatch_size": size})
    states = states or states_of(precision)
    if plan.float8_all_gather:
        states = replace(states, gathered=1)
    report = plan_for(
        shape,
        cluster,
        seq_len=seq_len,
        batch_per_replica=batch_per_replica,
        precision=precision,
        compiled=compiled,
        states=states,
        space=space,
    )
    return AutoChoice(plan=_with_layout(plan, report.best.layout, report.workload), report=report)


def _with_layout(plan: ParallelPlan, layout: Layout, workload: Workload) -> ParallelPlan:
    chosen = {axis: getattr(layout, axis) for axis in PLAN_AXES}
    microbatches = plan.num_microbatches
    if microbatches == "auto" and layout.pp > 1:
        microbatches = layout.microbatches(workload)
    return replace(plan, **chosen, num_microbatches=microbatches)
