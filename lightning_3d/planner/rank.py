# SPDX-License-Identifier: Apache-2.0
"""The planner: every legal layout, estimated, ranked, and the reason why better-looking ones were refused."""

from dataclasses import dataclass, replace

from lightning_3d.errors import PlanError
from lightning_3d.estimator import (
    Layout,
    MemoryEstimate,
    MemoryModel,
    StepTimeEstimate,
    StepTimeModel,
    Workload,
)
from lightning_3d.estimator.efficiency import DEFAULT_EFFICIENCY, Efficiency
from lightning_3d.estimator.layout import Offload
from lightning_3d.estimator.memory import MEMORY_MARGIN
from lightning_3d.hardware import Cluster
from lightning_3d.planner.cautions import cautions
from lightning_3d.planner.search import SearchSpace, layouts
from lightning_3d.shape import ModelShape
from lightning_3d.units import GIB

WORTH_COMPLEXITY = 0.02
"""Gain below which the layout with fewer axes is preferred."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedPlan:
    """A layout with its estimates."""

    layout: Layout
    memory: MemoryEstimate
    """Of the fullest stage."""
    time: StepTimeEstimate
    fits: bool
    cautions: tuple[str, ...] = ()
    """What the field learned the hard way about such layouts."""

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """What layouts are ranked by."""
        return self.time.tokens_per_s_per_gpu


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """The best layout of a kind that was not chosen, and why."""

    kind: str
    layout: Layout
    reason: str


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """What the planner found."""

    shape: ModelShape
    cluster: Cluster
    workload: Workload
    ranked: tuple[RankedPlan, ...]
    """Layouts that fit, best first, the best variant of each set of degrees."""
    refusals: tuple[Refusal, ...]
    num_layouts: int
    """Layouts that were estimated."""
    planner: "Planner"
    """The planner that made this, for estimates of further layouts."""

    def stages(self, layout: Layout) -> list[MemoryEstimate]:
        """Memory of every pipeline stage under a layout."""
        return self.planner.memory_model.stages(layout)

    def stage_memory(self, layout: Layout, rank: int) -> MemoryEstimate:
        """Memory of one pipeline stage under a layout."""
        return self.planner.memory_model.stage(layout, rank)

    def step_model(self) -> StepTimeModel:
        """The time model, for its groups and links."""
        return self.planner.time_model

    @property
    def best(self) -> RankedPlan:
        """The chosen layout.

        Raises:
            PlanError: nothing fits.
        """
        if not self.ranked:
            raise PlanError(self.nothing_fits())
        return self.ranked[0]

    def nothing_fits(self) -> str:
        """What to change when no layout fits."""
        need = f" The smallest: {self.refusals[0].reason}." if self.refusals else ""
        return (
            f"no layout of {self.shape.name or 'the model'} fits {self.cluster.describe()}"
            f" ({self.num_layouts} tried).{need} Use more devices, a shorter sequence, a smaller microbatch,"
            " 8-bit optimizer state, or parameter-efficient training."
        )


@dataclass(kw_only=True, slots=True)
class _Found:
    """What one pass over all layouts found."""

    fitting: dict[tuple[int, ...], RankedPlan]
    """The best fitting layout of each set of degrees."""
    tight: dict[str, RankedPlan]
    """The smallest layout that does not fit, of each kind."""
    count: int


class Planner:
    """Ranks layouts of one model and workload on one cluster."""

    def __init__(
        self,
        shape: ModelShape,
        cluster: Cluster,
        workload: Workload,
        *,
        space: SearchSpace | None = None,
        efficiency: Efficiency = DEFAULT_EFFICIENCY,
    ) -> None:
        self.shape, self.cluster, self.workload = shape, cluster, workload
        self.space = space or SearchSpace()
        self.memory_model = MemoryModel(shape, workload)
        self.time_model = StepTimeModel(shape, workload, cluster, efficiency)
        self.budget_bytes = cluster.gpu.memory_bytes * MEMORY_MARGIN

    def judge(self, layout: Layout) -> RankedPlan:
        """The estimates of one layout, with all its cautions."""
        memory, time = self.memory_model.peak(layout), self.time_model.estimate(layout)
        found = cautions(self.shape, self.cluster, self.workload, layout, time)
        return RankedPlan(
            layout=layout, memory=memory, time=time, fits=self._fits(memory, layout), cautions=found
        )

    def rank(self) -> PlanReport:
        """All layouts, best first.

        Returns:
            The report; its `ranked` is empty if nothing fits.

        Raises:
            PlanError: no legal layout has the fixed degrees.
        """
        found = self._try_all(self.space.offload[0])
        for offload in self.space.offload[1:]:
            if not found.fitting:
                found = self._try_all(offload)
        if not found.count:
            raise PlanError(self._nothing_legal())
        ranked = _prefer_simple(sorted(found.fitting.values(), key=_rank_key))
        shown = [self.judge(plan.layout) for plan in ranked[:SHOWN_WITH_CAUTIONS]]
        ranked = shown + ranked[SHOWN_WITH_CAUTIONS:]
        return PlanReport(
            shape=self.shape,
            cluster=self.cluster,
            workload=self.workload,
            ranked=tuple(ranked),
            refusals=tuple(self._refusals(ranked, found.tight)),
            num_layouts=found.count,
            planner=self,
        )

    def _fits(self, memory: MemoryEstimate, layout: Layout) -> bool:
        device = memory.device_bytes * self.cluster.memory_scale
        return device <= self.budget_bytes and memory.host <= self._host_bytes(layout)

    def _host_bytes(self, layout: Layout) -> float:
        """A rank's share of its node's memory."""
        return self.cluster.host_memory_bytes / min(self.cluster.gpus_per_node, layout.world_size)

    def _try_all(self, offload: Offload) -> "_Found":
        """Estimates every family of layouts: the first variant that fits, or how small the smallest gets."""
        found = _Found(fitting={}, tight={}, count=0)
        for variants in layouts(self.shape, self.cluster, self.workload, self.space):
            smallest: tuple[Layout, MemoryEstimate] | None = None
            for variant in variants:
                layout = _offloaded(variant, offload)
                found.count += 1
                memory = self.memory_model.peak(layout)
                if self._fits(memory, layout):
                    time = self.time_model.estimate(layout)
                    _keep_best(found.fitting, RankedPlan(layout=layout, memory=memory, time=time, fits=True))
                    break
                smallest = (layout, memory)
            else:
                if smallest is not None:
                    _keep_smallest(found.tight, *smallest, self.time_model)
        return found

    def _refusals(self, ranked: list[RankedPlan], tight: dict[str, RankedPlan]) -> list[Refusal]:
        """One reason for each kind of layout that is not the best one's."""
        by_kind: dict[str, RankedPlan] = {}
        for plan in ranked:
            by_kind.setdefault(kind_of(plan.layout), plan)
        refusals = []
        for kind in KINDS:
            if kind in by_kind and kind != kind_of(ranked[0].layout):
                refusals.append(
                    Refusal(
                        kind=kind, layout=by_kind[kind].layout, reason=_why_slower(by_kind[kind], ranked[0])
                    )
                )
            elif kind not in by_kind and kind in tight:
                refusals.append(
                    Refusal(kind=kind, layout=tight[kind].layout, reason=self._why_large(tight[kind]))
                )
        if not ranked:
            refusals.sort(key=lambda refusal: tight[refusal.kind].memory.device_bytes)
        return refusals

    def _why_large(self, plan: RankedPlan) -> str:
        host = self._host_bytes(plan.layout)
        if plan.memory.host > host:
            return (
                f"{plan.layout.describe()} needs {plan.memory.host / GIB:.1f} GiB of the host's memory a rank,"
                f" which has {host / GIB:.1f}"
            )
        parts = sorted(plan.memory.to_dict().items(), key=lambda item: -item[1])
        largest = [
            f"{name} {value / GIB:.1f}"
            for name, value in parts
            if name not in ("allocated", "device", "host")
        ]
        return (
            f"{plan.layout.describe()} needs {plan.memory.device_bytes / GIB:.1f} GiB"
            f" of {self.budget_bytes / GIB:.1f}: {', '.join(largest[:2])}"
        )

    def _nothing_legal(self) -> str:
        fixed = ", ".join(f"{name}={value}" for name, value in self.space.fixed.items()) or "nothing"
        batch = self.workload.global_batch or f"{self.workload.batch_per_replica} a replica"
        return (
            f"no legal layout with {fixed} fixed: {self.cluster.world_size} ranks, batch {batch}, sequence"
            f" {self.workload.seq_len}, {self.shape.num_layers} blocks, {self.shape.num_attention_heads} heads,"
            f" {self.shape.num_key_value_heads} KV heads. Fix fewer degrees, or use a batch that"
            f" {self.cluster.world_size} ranks divide."
        )


SHOWN_WITH_CAUTIONS = 12
"""Layouts for which cautions are worked out."""

KINDS = ("replicas", "FSDP", "FSDP in the node", "TP", "PP", "PP + TP", "CP")
"""Kinds of layouts in the order in which the field tries them."""


def _offloaded(layout: Layout, offload: Offload) -> Layout:
    """The layout with its state on the host; what comes from there block by block is not kept on the device."""
    if offload == "parameters":
        return replace(layout, offload=offload, reshard_after_forward=True)
    return layout if offload == "none" else replace(layout, offload=offload)


def kind_of(layout: Layout) -> str:
    """The kind of a layout, by the axes that it uses beside data parallelism."""
    if layout.cp > 1:
        return "CP"
    if layout.pp > 1:
        return "PP + TP" if layout.tp > 1 else "PP"
    if layout.tp > 1:
        return "TP"
    if layout.dp_shard == 1:
        return "replicas"
    return "FSDP in the node" if layout.dp_replicate > 1 else "FSDP"


def _degrees(layout: Layout) -> tuple[int, ...]:
    return (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.ep)


def _rank_key(plan: RankedPlan) -> tuple[object, ...]:
    layout = plan.layout
    return (-plan.tokens_per_s_per_gpu, _complexity(layout), _degrees(layout), layout.describe())


def _complexity(layout: Layout) -> int:
    """Axes in use; sharding counts half of one, and replicas nothing: what fits is not sharded."""
    axes = sum(degree > 1 for degree in (layout.pp, layout.cp, layout.tp, layout.virtual_stages))
    return 2 * axes + (layout.dp_shard > 1)


def _keep_best(fitting: dict[tuple[int, ...], RankedPlan], plan: RankedPlan) -> None:
    key = _degrees(plan.layout)
    if key not in fitting or _rank_key(plan) < _rank_key(fitting[key]):
        fitting[key] = plan


def _keep_smallest(
    tight: dict[str, RankedPlan], layout: Layout, memory: MemoryEstimate, time: StepTimeModel
) -> None:
    kind = kind_of(layout)
    if kind not in tight or memory.device_bytes < tight[kind].memory.device_bytes:
        tight[kind] = RankedPlan(layout=layout, memory=memory, time=time.estimate(layout), fits=False)


def _prefer_simple(ranked: list[RankedPlan]) -> list[RankedPlan]:
    """Moves the simplest of the layouts that are as good as the best to the top."""
    if not ranked:
        return ranked
    bar = ranked[0].tokens_per_s_per_gpu * (1 - WORTH_COMPLEXITY)
    close = [plan for plan in ranked if plan.tokens_per_s_per_gpu >= bar]
    chosen = min(close, key=lambda plan: (_complexity(plan.layout), _rank_key(plan)))
    return [chosen, *(plan for plan in ranked if plan is not chosen)]


CAUSE_NAMES = {
    "compute_s": "compute on thinner matrices",
    "recompute_s": "recomputation, for memory",
    "tensor_s": "TP collectives",
    "context_s": "keys and values over CP",
    "expert_s": "expert exchanges",
    "pipeline_s": "pipeline transfers",
    "bubble_s": "pipeline bubble",
    "data_s": "gathers and reductions of data parallelism",
    "optimizer_s": "optimizer",
    "offload_s": "offload",
    "other_s": "overheads",
}
"""What each part of the step's time is called in a reason."""


def _why_slower(plan: RankedPlan, best: RankedPlan) -> str:
    """How much slower a plan is than the best, and the part of the step that makes it so."""
    loss = 1 - plan.tokens_per_s_per_gpu / best.tokens_per_s_per_gpu
    work = plan.time.tokens / best.time.tokens
    extra = {name: getattr(plan.time, name) - getattr(best.time, name) * work for name in CAUSE_NAMES}
    cause = max(extra, key=lambda name: extra[name])
    if loss <= 0:
        return f"{plan.layout.describe()}: as fast, but with more axes"
    return f"{plan.layout.describe()}: {loss:.0%} fewer tokens/s, most by {CAUSE_NAMES[cause]} (+{extra[cause]:.2f} s)"
