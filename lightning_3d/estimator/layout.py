# SPDX-License-Identifier: Apache-2.0
"""A layout and the work it does: what every estimate is a function of.

`Layout` has all that moves memory and time, also what `ParallelPlan` leaves to the strategy (sharding stage,
recomputation, offload, microbatch size) or does not have yet; `Layout.to_plan` gives the plan that runs.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from lightning_3d.errors import PlanError
from lightning_3d.levers import parse_recompute
from lightning_3d.plan import ParallelPlan
from lightning_3d.units import GIB

Recompute: TypeAlias = Literal["none", "attention", "selective", "full"]
"""What the backward computes again: nothing; the attention scores (Korthikanti's "selective"); everything but
attention outputs and every second matrix product (selective checkpointing of operations, as in torchtitan); all."""
Offload: TypeAlias = Literal["none", "optimizer", "parameters"]
Matmul: TypeAlias = Literal["bf16", "fp16", "fp32", "fp8", "mxfp8", "nvfp4"]
Attention: TypeAlias = Literal["flash", "unfused"]

FP8_MATMULS = ("fp8", "mxfp8", "nvfp4")
"""Formats whose products run below 16 bits."""

LOGITS_BYTES_PLAIN = 12
"""Bytes of a logit under plain PyTorch: 16-bit (2), fp32 copy (4), its gradient (4), that of the 16-bit one (2); in
fp32 the logit, its softmax and its gradient come to the same."""

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble")
"""Schedules that the estimates know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How one training step is spread over ranks."""

    pp: int = 1
    """Pipeline ranks, p."""
    dp_replicate: int = 1
    """Replicas of the sharded state."""
    dp_shard: int = 1
    """Data-parallel ranks over which state is sharded."""
    cp: int = 1
    """Context-parallel ranks, c."""
    tp: int = 1
    """Tensor-parallel ranks, t."""
    ep: int = 1
    """Ranks over which experts are spread, e; part of the data, context and tensor ranks."""
    expert_tp: int = 1
    """Ranks over which each expert is split."""
    zero_stage: int = 3
    """What is sharded over `dp_shard x cp`: 0 nothing, 1 optimizer, 2 and gradients, 3 and parameters (FSDP)."""
    microbatch_size: int = 1
    """Sequences of one microbatch, b."""
    schedule: str = "1f1b"
    virtual_stages: int = 1
    """Stages a rank, v."""
    sequence_parallel: bool = True
    recompute: Recompute = "none"
    recompute_fraction: float = 1.0
    """Share of each stage's blocks that are recomputed (`recompute="full"` only)."""
    recompute_budget_bytes: float = 0.0
    """What a rank's activations may take; the share is then the smallest that keeps to it. 0 is no budget."""
    offload: Offload = "none"
    reshard_after_forward: bool = True
    """Whether gathered blocks are freed between forward and backward (`zero_stage=3` only)."""

    @property
    def dp(self) -> int:
        """Parts that the global batch is split into, d."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Ranks, W."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def shard_group(self) -> int:
        """Ranks over which dense state is sharded, D: FSDP uses the flattened (dp_shard, cp)."""
        return self.dp_shard * self.cp

    @property
    def expert_shard_group(self) -> int:
        """Ranks over which an expert's state is sharded: those of D x t that hold the same expert."""
        return max(1, self.dp_shard * self.cp * self.tp // (self.ep * self.expert_tp))

    def microbatches(self, workload: "Workload") -> int:
        """Microbatches of a step on each replica, m."""
        return max(1, workload.replica_batch(self.dp) // self.microbatch_size)

    def defers_reduction(self, workload: "Workload") -> bool:
        """Whether whole gradients pile up over microbatches and are reduced once (FSDP under a pipeline).

        Torch's stages gather once a step and reduce after the last microbatch (`set_requires_gradient_sync`), so
        gradients of a stage are whole until then: `+ 4 P / t`, never divided by the shard group.
        """
        return (
            self.zero_stage >= 2 and self.pp > 1 and self.shard_group > 1 and self.microbatches(workload) > 1
        )

    def describe(self) -> str:
        """Degrees above one, then the choices that differ from the plain ones.

        >>> Layout(pp=4, dp_shard=2, tp=8, recompute="full").describe()
        'pp4 dp_shard2 tp8 zero3 mbs1 recompute=full'
        """
        axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        parts = [f"{axis}{getattr(self, axis)}" for axis in axes if getattr(self, axis) > 1] or ["single"]
        if self.dp_shard * self.cp > 1:
            parts.append(f"zero{self.zero_stage}")
        parts.append(f"mbs{self.microbatch_size}")
        if self.pp > 1 and self.schedule != "1f1b":
            parts.append(f"{self.schedule}{self.virtual_stages if self.virtual_stages > 1 else ''}")
        if self.recompute != "none":
            parts.append(f"recompute={self.recompute_option}")
        if self.offload != "none":
            parts.append(f"offload={self.offload}")
        return " ".join(parts)

    @property
    def recompute_option(self) -> str:
        """Recomputation as `ParallelPlan.recompute` says it."""
        if self.recompute_budget_bytes:
            return f"{self.recompute_budget_bytes / GIB:.10g}GiB"
        if self.recompute == "full" and self.recompute_fraction < 1:
            return str(self.recompute_fraction)
        return self.recompute

    def to_plan(self, workload: "Workload") -> ParallelPlan:
        """The plan that runs this layout.

        Raises:
            PlanError: the engine does not have an axis or a schedule of this layout.
        """
        if self.recompute == "attention":
            raise PlanError(
                "recompute='attention' is estimated only. Use 'selective', which keeps attention."
            )
        if self.offload == "optimizer":
            raise PlanError(
                "offload='optimizer' is estimated only: this engine offloads parameters and gradients too"
                " (offload='cpu'). strategy='zero_offload' offloads the optimizer alone."
            )
        return ParallelPlan(
            pp=self.pp,
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            cp=self.cp,
            tp=self.tp,
            ep=self.ep,
            schedule=self.schedule,  # type: ignore[arg-type]  # checked by the plan
            num_microbatches=self.microbatches(workload) if self.pp > 1 else "auto",
            virtual_stages=self.virtual_stages,
            sequence_parallel=self.sequence_parallel,
            reshard_after_forward=self.reshard_after_forward,
            recompute=self.recompute_option,
            offload="none" if self.offload == "none" else "cpu",
        )


OFFLOAD_OF_PLAN: dict[str, Offload] = {"none": "none", "cpu": "parameters"}
"""What a plan's `offload` moves to the host: with FSDP2 the parameters, and with them gradients and optimizer."""


def layout_of_plan(plan: ParallelPlan, *, batch_per_replica: int) -> Layout:
    """The layout that a resolved plan runs.

    Args:
        plan: every degree is a number.
        batch_per_replica: sequences of a step on each data-parallel rank.
    """
    microbatches = plan.microbatches_for(batch_per_replica)
    again = parse_recompute(plan.recompute)
    return Layout(
        pp=plan.size("pp"),
        dp_replicate=plan.size("dp_replicate"),
        dp_shard=plan.size("dp_shard"),
        cp=plan.size("cp"),
        tp=plan.size("tp"),
        ep=plan.ep if isinstance(plan.ep, int) else 1,
        zero_stage=3 if plan.size("dp_shard") > 1 else 0,
        microbatch_size=max(1, batch_per_replica // microbatches),
        schedule=plan.schedule,
        virtual_stages=plan.virtual_stages,
        sequence_parallel=plan.sequence_parallel,
        recompute=again.mode,
        recompute_fraction=again.fraction,
        recompute_budget_bytes=again.budget_bytes or 0.0,
        offload=OFFLOAD_OF_PLAN[plan.offload],
        reshard_after_forward=plan.reshard_after_forward,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes that one parameter costs in each kind of state, before sharding."""

    parameters: float
    """The stored parameter: fp32 under FSDP2 with mixed precision, 16-bit in Megatron and DeepSpeed."""
    gradients: float
    optimizer: float
    """Moments, and the fp32 master copy where the stored parameter is 16-bit."""
    gathered: float = 2
    """The 16-bit copy of a block while it computes under `zero_stage=3`."""

    @property
    def total(self) -> float:
        """Bytes a parameter without sharding."""
        return self.parameters + self.gradients + self.optimizer


STATE_BYTES = {
    "fsdp2-mixed": StateBytes(parameters=4, gradients=4, optimizer=8),
    "zero": StateBytes(parameters=2, gradients=2, optimizer=12),
    "megatron-bf16": StateBytes(parameters=2, gradients=4, optimizer=12),
    "megatron-fp16": StateBytes(parameters=2, gradients=2, optimizer=16),
    "fp32": StateBytes(parameters=4, gradients=4, optimizer=8, gathered=4),
    "bf16": StateBytes(parameters=2, gradients=2, optimizer=4),
    "adam8bit": StateBytes(parameters=4, gradients=4, optimizer=2),
    "sgd": StateBytes(parameters=4, gradients=4, optimizer=0),
    "frozen": StateBytes(parameters=2, gradients=0, optimizer=0),
}
"""Regimes by name. Sources: ZeRO (arXiv:1910.02054) for 2+2+12, Megatron-LM's dist_optimizer.md for 18 = 2+4+12 and
20 = 2+2+16, FSDP2's mixed precision for 16 = 4+4+8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is trained a step, and with which kernels."""

    seq_len: int
    """Tokens of a sequence, s."""
    global_batch: int = 0
    """Sequences of a step over all replicas, B; 0 if `batch_per_replica` is given."""
    batch_per_replica: int = 0
    """Sequences of a step on each replica, where the data loader fixes that instead."""
    states: StateBytes = field(default_factory=lambda: STATE_BYTES["fsdp2-mixed"])
    matmul: Matmul = "bf16"
    """Number format of the block's matrix products."""
    attention: Attention = "flash"
    dropout: bool = False
    """Whether blocks keep dropout masks."""
    fused: bool = True
    """Whether norms and gated activations are one kernel each that keeps its input only (Megatron, `torch.compile`);
    plain PyTorch keeps an fp32 copy for each RMSNorm and both factors of the gate."""
    logits_bytes: float = 6
    """Bytes that one logit costs at the loss: 2 for 16-bit logits and 4 for their fp32 copy (Megatron goldens);
    10 with a separate softmax and gradient (plain PyTorch), 2 with a chunked loss."""
    autocast: bool = False
    """Whether 16-bit products come from `torch.autocast` alone, on whole fp32 parameters: the residual stream stays in
    fp32, every linear layer casts its own input, and 16-bit copies of the weights wait for the backward. Under FSDP's
    mixed precision the parameters themselves are gathered in 16 bits."""
    causal: bool = True
    """Whether attention skips the upper triangle (flash kernels do, unfused ones compute it)."""

    overlap: bool = True
    """Whether gathers and reductions of data parallelism run beside computing."""
    expert_overlap: bool = False
    """Whether, under the interleaved schedule, exchanges of experts run beside the compute of another microbatch:
    Megatron Core's combined 1F1B (`--overlap-moe-expert-parallel-comm`), which needs virtual stages."""

    def __post_init__(self) -> None:
        if self.seq_len < 1 or (self.global_batch > 0) == (self.batch_per_replica > 0):
            raise PlanError(
                f"seq_len={self.seq_len}, global_batch={self.global_batch}, batch_per_replica={self.batch_per_replica}:"
                " give a sequence length and one of the two batches."
            )

    @property
    def number_bytes(self) -> int:
        """Bytes of a number of the activations: 4 in fp32, else 2."""
        return 4 if self.matmul == "fp32" else 2

    def replica_batch(self, dp: int) -> int:
        """Sequences of a step on each of `dp` replicas."""
        return self.batch_per_replica or self.global_batch // dp
