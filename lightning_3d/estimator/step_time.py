# SPDX-License-Identifier: Apache-2.0
"""Time of a training step, by cause.

`step = (m + (p - 1)/v) (F + B) + exposed communication + optimizer` (Narayanan et al. 2021, section 2.2), with the
slowest stage setting the pace and communication of each axis on the links it crosses.
"""

from dataclasses import dataclass
from math import log2
from typing import Any

from lightning_3d.estimator.collectives import Group, Network
from lightning_3d.estimator.compute import BlockTime, ComputeModel
from lightning_3d.estimator.efficiency import DEFAULT_EFFICIENCY, Efficiency
from lightning_3d.estimator.flops import model_flops_per_token
from lightning_3d.estimator.layout import Layout, Workload
from lightning_3d.estimator.states import StageBlocks, stage_blocks
from lightning_3d.estimator.traffic import Traffic, traffic
from lightning_3d.hardware import Cluster
from lightning_3d.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeEstimate:
    """Seconds of one step on the critical path, by cause."""

    compute_s: float
    recompute_s: float
    tensor_s: float
    """Collectives of tensor parallelism; nothing hides them."""
    context_s: float
    """Keys and values of context parallelism beyond what attention hides."""
    expert_s: float
    """Exchanges of expert parallelism that computing does not hide."""
    pipeline_s: float
    """Transfers between stages that computing does not hide."""
    bubble_s: float
    """Idle time of filling and draining the pipeline, and of waiting for the slowest stage."""
    data_s: float
    """Gathers and reductions of data parallelism beyond what computing hides."""
    optimizer_s: float
    offload_s: float
    other_s: float
    tokens: float
    """Tokens of the step over all ranks."""
    model_flops: float
    """Operations that the model needs for the step."""
    world_size: int
    peak_flops: float
    bubble_fraction: float
    """(p-1) / (v m + p - 1): share of a stage's time that filling and draining take."""

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return sum(getattr(self, name) for name in CAUSES)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second over all ranks."""
        return self.tokens / self.step_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens a second of one rank."""
        return self.tokens_per_s / self.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: needed operations over those of the datasheet (dense, 16-bit)."""
        return self.model_flops / (self.step_s * self.world_size * self.peak_flops)

    def to_dict(self) -> dict[str, float]:
        """Seconds by cause, and the rates."""
        causes = {name: getattr(self, name) for name in CAUSES}
        return {
            **causes,
            "step_s": self.step_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "mfu": self.mfu,
        }


ATTENTION_PASSES = 3.5
"""Forward and backward of flash attention over its forward: two products and five."""
CAUSES = (
    "compute_s",
    "recompute_s",
    "tensor_s",
    "context_s",
    "expert_s",
    "pipeline_s",
    "bubble_s",
    "data_s",
    "optimizer_s",
    "offload_s",
    "other_s",
)
"""Fields of `StepTimeEstimate` that add up to the step."""


def bubble_fraction(schedule: str, pp: int, virtual_stages: int, microbatches: int) -> float:
    """Idle share of a stage's step.

    GPipe and 1F1B (p-1)/(m+p-1); interleaved (p-1)/(vm+p-1); ZB-H1 a third of 1F1B's idle time (Qi et al. 2024,
    F = B = W).

    >>> bubble_fraction("1f1b", 4, 1, 12)
    0.2
    """
    idle = (pp - 1) / virtual_stages
    if schedule == "zero_bubble":
        idle = (pp - 1) / 3
    return idle / (microbatches + idle)


@dataclass(frozen=True, slots=True)
class _Microbatch:
    """Seconds of one microbatch on one stage."""

    forward: float
    backward: float
    recomputed: float
    tensor: float
    context: float
    expert: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.recomputed + self.tensor + self.context + self.expert


class StepTimeModel:
    """Estimates step times of layouts of one model and workload on one cluster."""

    def __init__(
        self,
        shape: ModelShape,
        workload: Workload,
        cluster: Cluster,
        efficiency: Efficiency = DEFAULT_EFFICIENCY,
    ) -> None:
        self.shape, self.workload, self.cluster = shape, workload, cluster
        self._efficiency = efficiency
        self._compute = ComputeModel(shape, workload, cluster.gpu, efficiency)
        self._network = Network(cluster, efficiency)
        self._blocks: dict[Any, tuple[BlockTime, BlockTime, tuple[float, float]]] = {}
        self._stages: dict[int, list[StageBlocks]] = {}
        self._flops_per_token = model_flops_per_token(shape, workload.seq_len)

    def groups(self, layout: Layout) -> dict[str, Group]:
        """The groups of each axis, tp innermost and pp outermost."""
        network, data = self._network, layout.dp_shard * layout.cp
        inner = layout.cp * layout.tp
        return {
            "tp": network.group(layout.tp, 1),
            "cp": network.group(layout.cp, layout.tp),
            "ep": network.group(layout.ep, layout.expert_tp if layout.expert_tp > 1 else 1),
            "dp_shard": network.group(data, layout.tp),
            "experts": network.group(layout.expert_shard_group, layout.ep * layout.expert_tp),
            "dp_replicate": network.group(layout.dp_replicate, layout.dp_shard * inner),
            "pp": network.group(layout.pp, layout.dp * inner),
        }

    def estimate(self, layout: Layout) -> StepTimeEstimate:
        """The step's time under a layout."""
        workload, microbatches = self.workload, layout.microbatches(self.workload)
        groups = self.groups(layout)
        moved = traffic(self.shape, workload, layout)
        slowest, mean = self._paces(layout, moved, groups)
        idle = bubble_fraction(layout.schedule, layout.pp, layout.virtual_stages, microbatches)
        waiting = idle / (1 - idle) * microbatches * mean.total
        data = self._data_s(layout, moved, groups, slowest, microbatches)
        pipeline = self._pipeline_s(layout, moved, groups, microbatches)
        scale = self.cluster.time_scale * self._straggling(layout)
        tokens = float(layout.dp * microbatches * layout.microbatch_size * workload.seq_len)
        return StepTimeEstimate(
            compute_s=scale * microbatches * (slowest.forward + slowest.backward),
            recompute_s=scale * microbatches * slowest.recomputed,
            tensor_s=scale * microbatches * slowest.tensor,
            context_s=scale * microbatches * slowest.context,
            expert_s=scale * microbatches * slowest.expert,
            pipeline_s=scale * pipeline,
            bubble_s=scale * waiting,
            data_s=scale * data,
            optimizer_s=scale * self._optimizer_s(layout, moved),
            offload_s=scale * self._offload_s(layout, moved),
            other_s=scale * self._efficiency.step_overhead_s,
            tokens=tokens,
            model_flops=tokens * self._flops_per_token,
            world_size=layout.world_size,
            peak_flops=self.cluster.gpu.peak_flops,
            bubble_fraction=idle,
        )

    def _straggling(self, layout: Layout) -> float:
        nodes = max(1.0, layout.world_size / self.cluster.island)
        return 1 + self._efficiency.straggler_per_doubling * log2(nodes)

    def _block_times(self, layout: Layout) -> tuple[BlockTime, BlockTime, tuple[float, float]]:
        key = (layout.tp, layout.cp, layout.microbatch_size, layout.sequence_parallel, layout.recompute,
               layout.recompute_fraction, layout.ep, layout.expert_tp)  # fmt: skip
        if key not in self._blocks:
            compute = self._compute
            self._blocks[key] = (
                compute.dense_block(layout),
                compute.moe_block(layout),
                compute.head_s(layout),
            )
        return self._blocks[key]

    def _paces(
        self, layout: Layout, moved: Traffic, groups: dict[str, Group]
    ) -> tuple[_Microbatch, _Microbatch]:
        """The slowest stage of a microbatch, and the mean one."""
        dense, moe, head = self._block_times(layout)
        if layout.pp not in self._stages:
            self._stages[layout.pp] = stage_blocks(self.shape, layout.pp)
        stages = self._stages[layout.pp]
        tensor, context, expert = self._block_communication_s(layout, moved, groups, dense, moe)

        def pace(num_dense: float, num_moe: float, head_forward: float, head_backward: float) -> _Microbatch:
            blocks = num_dense + num_moe
            return _Microbatch(
                forward=num_dense * dense.forward + num_moe * moe.forward + head_forward,
                backward=num_dense * dense.backward + num_moe * moe.backward + head_backward,
                recomputed=num_dense * dense.recomputed + num_moe * moe.recomputed,
                tensor=blocks * tensor,
                context=blocks * context,
                expert=num_moe * expert,
            )

        ends = [pace(stage.dense, stage.moe, 0.0, 0.0) for stage in (stages[0], stages[-1])]
        ends.append(pace(stages[-1].dense, stages[-1].moe, *head))
        slowest = max(ends, key=lambda stage: stage.total)
        dense_total, moe_total = self.shape.num_layers - self.shape.num_moe_layers, self.shape.num_moe_layers
        p = layout.pp
        mean = pace(dense_total / p, moe_total / p, head[0] / p, head[1] / p)
        return slowest, mean

    def _block_communication_s(
        self, layout: Layout, moved: Traffic, groups: dict[str, Group], dense: BlockTime, moe: BlockTime
    ) -> tuple[float, float, float]:
        """Seconds of tensor, context and expert communication of one block and microbatch that nothing hides."""
        network = self._network
        block = moe if self.shape.experts else dense
        tensor = moved.tensor_collectives * network.gather_s(moved.tensor_bytes, groups["tp"])
        tensor = max(0.0, tensor - block.slack)
        context = 0.0
        if layout.cp > 1:
            ring = 3 * network.gather_s(moved.context_bytes, groups["cp"])
            hidden_under = self._efficiency.context_overlap * ATTENTION_PASSES * block.attention
            context = max(0.0, ring - hidden_under)
        top_k = self.shape.experts.experts_per_token if self.shape.experts is not None else 1
        expert = moved.expert_exchanges * network.exchange_s(moved.expert_bytes, groups["ep"], top_k)
        if self.workload.expert_overlap and layout.schedule == "interleaved":
            hidden_under = self._efficiency.expert_overlap * (block.forward + block.backward)
            expert = max(0.0, expert - hidden_under)
        return tensor, context, expert

    def _pipeline_s(
        self, layout: Layout, moved: Traffic, groups: dict[str, Group], microbatches: int
    ) -> float:
        if layout.pp == 1:
            return 0.0
        one = self._network.send_s(moved.pipeline_bytes, groups["pp"])
        return 2 * microbatches * layout.virtual_stages * one * self._efficiency.pipeline_exposed

    def _data_s(
        self, layout: Layout, moved: Traffic, groups: dict[str, Group], pace: _Microbatch, microbatches: int
    ) -> float:
        """Exposed time of gathers, reductions and all-reduces over data-parallel ranks."""
        network, shard, replicate = self._network, groups["dp_shard"], groups["dp_replicate"]
        blocks = max(1.0, self.shape.num_layers / layout.pp)
        latency = blocks * shard.latency_s if shard.size > 1 else 0.0
        gather = latency + network.gather_s(moved.gathered_bytes, shard)
        gather += network.gather_s(moved.expert_gathered_bytes, groups["experts"])
        reduce = latency + network.gather_s(moved.reduced_bytes, shard)
        reduce += network.gather_s(moved.expert_reduced_bytes, groups["experts"])
        replicas = network.all_reduce_s(moved.replicated_bytes, replicate)
        overlap = self._efficiency.data_overlap if self.workload.overlap else 0.0
        forward, backward = pace.forward, pace.backward + pace.recomputed
        if layout.zero_stage < 3:
            gathers = gather if layout.zero_stage else 0.0
            return max(0.0, reduce + replicas - overlap * backward) + gathers
        if layout.pp > 1 and not layout.reshard_after_forward:
            return max(0.0, gather - overlap * forward) + max(0.0, reduce + replicas - overlap * backward)
        again = gather if layout.reshard_after_forward else 0.0
        first = max(0.0, gather - overlap * forward)
        middle = max(0.0, again - overlap * backward)
        last = max(0.0, again + reduce - overlap * backward) - middle
        return microbatches * (first + middle) + last + max(0.0, replicas - overlap * backward)

    def _optimizer_s(self, layout: Layout, moved: Traffic) -> float:
        updated = moved.updated_parameters
        if layout.offload != "none":
            return 0.0
        return (
            updated
            * self._efficiency.optimizer_bytes
            / (self.cluster.gpu.memory_bytes_per_s * self._efficiency.memory)
        )

    def _offload_s(self, layout: Layout, moved: Traffic) -> float:
        """Gradients down and parameters up once a step, and the host's slower update."""
        if layout.offload == "none":
            return 0.0
        crossing = moved.updated_parameters * (4 + 2) / self.cluster.gpu.host_bytes_per_s
        host_update = moved.updated_parameters * self._efficiency.optimizer_bytes / HOST_UPDATE_BYTES_PER_S
        streamed = 0.0
        if layout.offload == "parameters":
            microbatches = layout.microbatches(self.workload)
            streamed = 2 * microbatches * moved.updated_parameters * 2 / self.cluster.gpu.host_bytes_per_s
        return crossing + host_update + streamed


HOST_UPDATE_BYTES_PER_S = 20e9
"""Host memory bandwidth of one rank's Adam: a socket's 200 GB/s or so over its GPUs."""
