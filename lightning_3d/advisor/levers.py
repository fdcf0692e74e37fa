# SPDX-License-Identifier: Apache-2.0
"""The levers on memory, in the order in which the field tries them.

(1) cheap and local: bf16, recomputation, a smaller microbatch; (2) sharding what replicas hold twice; (3) tensor
parallelism inside a node; (4) pipeline stages across nodes; (5) offload, the slowest. A lever changes the facts of a
run, and the estimator says what that saves.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from lightning_3d.advisor.run import RunFacts, uses_autocast
from lightning_3d.errors import PlanError
from lightning_3d.estimator.layout import STATE_BYTES, Layout
from lightning_3d.estimator.rank_traffic import rank_traffic
from lightning_3d.schedules import ideal_bubble_fraction
from lightning_3d.units import format_bytes

Bound: TypeAlias = Literal["activations", "states", "logits"]
"""What fills a rank: activations of blocks; parameters, gradients and optimizer; logits and what the loss makes."""


@dataclass(frozen=True, kw_only=True)
class Lever:
    """One lever."""

    group: int
    """Its place in the decision order, 1 to 5."""
    name: str
    lowers: tuple[Bound, ...]
    pull: Callable[[RunFacts], RunFacts | str]
    """The run with the lever pulled, or why there is nothing to pull: it is on already, or cannot go further."""
    setting: Callable[[RunFacts], str]
    """What to set, given the run with the lever pulled."""
    cost: Callable[[RunFacts, RunFacts], str]
    """What it costs, given the run before and after."""


def _bf16(run: RunFacts) -> RunFacts | str:
    if run.workload.matmul != "fp32":
        return f"already on: precision={run.precision}"
    states = replace(STATE_BYTES["fsdp2-mixed"], optimizer=run.workload.states.optimizer)
    workload = replace(
        run.workload, matmul="bf16", states=states, autocast=uses_autocast("bf16-mixed", run.layout)
    )
    return replace(run, precision="bf16-mixed", workload=workload)


def _selective(run: RunFacts) -> RunFacts | str:
    if run.layout.recompute != "none":
        return f"already on: recompute={run.layout.recompute}"
    return run.with_layout(replace(run.layout, recompute="selective"))


def _full(run: RunFacts) -> RunFacts | str:
    if run.layout.recompute_option == "full":
        return "already on: recompute=full"
    return run.with_layout(
        replace(run.layout, recompute="full", recompute_fraction=1.0, recompute_budget_bytes=0.0)
    )


def _smaller_microbatch(run: RunFacts) -> RunFacts | str:
    size = run.layout.microbatch_size
    if size == 1:
        return "a microbatch is one sequence already"
    half = max(part for part in range(1, size) if size % part == 0)
    return run.with_layout(replace(run.layout, microbatch_size=half))


def _shard(run: RunFacts) -> RunFacts | str:
    layout = run.layout
    if layout.zero_stage == 3 and layout.dp_shard > 1 and layout.dp_replicate == 1:
        return f"already on: dp_shard={layout.dp_shard}, all replicas"
    if layout.dp == 1:
        return "there is one replica: more devices are needed"
    inside = max(1, run.ranks_per_node // layout.tp)
    shard = layout.dp
    if layout.dp_shard < inside < layout.dp and layout.dp % inside == 0:
        shard = inside  # first inside the node, replicas across
    return run.with_layout(replace(layout, zero_stage=3, dp_shard=shard, dp_replicate=layout.dp // shard))


def _tensor(run: RunFacts) -> RunFacts | str:
    shape, layout = run.shape, run.layout
    tp = layout.tp * 2
    if tp > run.ranks_per_node:
        return f"a node has {run.ranks_per_node} ranks"
    heads, kv_heads = shape.num_attention_heads or tp, shape.num_key_value_heads or tp
    if heads % tp or shape.intermediate_size % tp or (kv_heads % tp and tp % kv_heads):
        return f"tp={tp} does not divide the heads or the feed-forward"
    return _take_ranks(run, replace(layout, tp=tp))


def _pipeline(run: RunFacts) -> RunFacts | str:
    pp = run.layout.pp * 2
    if pp > run.shape.num_layers:
        return f"there are {run.shape.num_layers} blocks"
    after = _take_ranks(run, replace(run.layout, pp=pp))
    if isinstance(after, str):
        return after
    if after.layout.microbatches(after.workload) < pp:
        return f"a replica's batch has fewer than {pp} microbatches"
    return after


def _take_ranks(run: RunFacts, wanted: Layout) -> RunFacts | str:
    """The run with a degree doubled; the ranks come from replicas, or else from shards."""
    if wanted.dp_replicate % 2 == 0:
        return run.with_layout(replace(wanted, dp_replicate=wanted.dp_replicate // 2))
    if wanted.dp_shard % 2 == 0:
        return run.with_layout(replace(wanted, dp_shard=wanted.dp_shard // 2))
    return "there are no replicas to take ranks from: more devices are needed"


def _offload(run: RunFacts) -> RunFacts | str:
    if run.layout.offload != "none":
        return f"already on: offload={run.layout.offload}"
    after = run.with_layout(replace(run.layout, offload="parameters", zero_stage=3))
    try:
        after.layout.to_plan(after.workload)
    except PlanError as error:
        return str(error).rstrip(".")
    return after


def _extra_traffic(axis: str, before: RunFacts, after: RunFacts) -> str:
    def moved(run: RunFacts) -> float:
        return rank_traffic(run.shape, run.workload, run.layout, min(run.stage, run.layout.pp - 1))[axis]

    return f"{format_bytes(max(0.0, moved(after) - moved(before)))} more a rank and step over {axis}"


def _bubble(run: RunFacts) -> str:
    layout = run.layout
    share = ideal_bubble_fraction(
        layout.schedule,
        num_ranks=layout.pp,
        num_microbatches=layout.microbatches(run.workload),
        virtual_stages=layout.virtual_stages,
    )
    return f"a bubble of {share:.0%}"


def _price_of_microbatches(before: RunFacts, after: RunFacts) -> str:
    if after.layout.pp > 1:
        return f"; {_bubble(after)}"
    return f"; {_extra_traffic('dp_shard', before, after)}" if after.layout.dp_shard > 1 else ""


def _batches(run: RunFacts) -> str:
    if run.layout.pp > 1:
        return f"num_microbatches={run.layout.microbatches(run.workload)}"
    return f"batch_size={run.batch_size}, accumulate_grad_batches={run.accumulate}"


def _degrees(run: RunFacts) -> str:
    layout: Layout = run.layout
    degrees = (f"{axis}={getattr(layout, axis)}" for axis in ("pp", "dp_replicate", "dp_shard", "tp"))
    return ", ".join(text for text in degrees if not text.endswith("=1"))


LEVERS: tuple[Lever, ...] = (
    Lever(
        group=1,
        name="bf16",
        lowers=("activations", "logits"),
        pull=_bf16,
        setting=lambda run: "precision=bf16-mixed",
        cost=lambda before, after: "none: faster on tensor cores; fp32 master weights stay",
    ),
    Lever(
        group=1,
        name="selective recompute",
        lowers=("activations",),
        pull=_selective,
        setting=lambda run: "recompute=selective",
        cost=lambda before, after: "half of the matrix products twice: up to 1/6 more FLOPs",
    ),
    Lever(
        group=1,
        name="full recompute",
        lowers=("activations",),
        pull=_full,
        setting=lambda run: "recompute=full",
        cost=lambda before, after: "one more forward: 1/3 more FLOPs",
    ),
    Lever(
        group=1,
        name="smaller microbatch",
        lowers=("activations", "logits"),
        pull=_smaller_microbatch,
        setting=_batches,
        cost=lambda before, after: (
            f"the same step in smaller products{_price_of_microbatches(before, after)}"
        ),
    ),
    Lever(
        group=2,
        name="shard the states (FSDP)",
        lowers=("states",),
        pull=_shard,
        setting=_degrees,
        cost=lambda before, after: _extra_traffic("dp_shard", before, after),
    ),
    Lever(
        group=3,
        name="tensor parallel in the node",
        lowers=("activations", "states", "logits"),
        pull=_tensor,
        setting=_degrees,
        cost=lambda before, after: _extra_traffic("tp", before, after),
    ),
    Lever(
        group=4,
        name="pipeline across nodes",
        lowers=("states", "logits"),
        pull=_pipeline,
        setting=lambda run: f"{_degrees(run)}, {_batches(run)}",
        cost=lambda before, after: _bubble(after),
    ),
    Lever(
        group=5,
        name="offload to the host",
        lowers=("states",),
        pull=_offload,
        setting=lambda run: "offload=cpu",
        cost=lambda before, after: (
            f"{format_bytes(after.fullest().host)} of host memory a rank, over PCIe each step"
        ),
    ),
)
"""In decision order."""

NO_HELP = (
    "Gradient accumulation by itself does not help: the peak is that of one microbatch. It is what a smaller microbatch"
    " is paid with."
)
