# SPDX-License-Identifier: Apache-2.0
"""`ParallelPlan`: the degrees of every parallel axis and the choices that go with them, as frozen data.

A plan is what the user means. It is resolved against the world (`resolve`) and checked against the model and the
cluster (`check_model`, `check_cluster`) before any process group exists, so that a wrong number costs a line of
text and not an allocation of GPUs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Literal, TypeAlias

from lightning_3d.errors import PlanError
from lightning_3d.levers import (
    DEFAULT_BACKEND,
    Offload,
    RecomputeOption,
    canonical_recompute,
    check_values,
)
from lightning_3d.shape import ModelShape

Degree: TypeAlias = int | Literal["auto"]
ScheduleName: TypeAlias = Literal["1f1b", "gpipe", "interleaved"]

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes from the slowest link to the fastest; the product of their sizes is the world size."""

SCHEDULES: Mapping[str, str] = {
    "1f1b": "one forward, one backward: at most `pp` microbatches in flight",
    "gpipe": "all forwards, then all backwards: every microbatch in flight",
    "interleaved": "1F1B over several virtual stages a rank: a smaller bubble for more traffic",
}

MICROBATCHES_PER_STAGE = 4
"""`num_microbatches="auto"` asks for this many a stage: a 1F1B bubble of (p-1)/(4p+p-1), below 20 % for any p."""


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """How a model, its optimizer and its batches are spread over ranks.

    Raises:
        PlanError: a degree or an option is out of its range, or two of them exclude each other.
    """

    pp: Degree = 1
    """Pipeline stages in a row; each rank holds a run of the model's blocks (`virtual_stages` runs of them)."""
    dp_replicate: Degree = "auto"
    """Replicas of the sharded state; gradients are averaged over them. Across nodes in HYBRID_SHARD."""
    dp_shard: Degree = "auto"
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP2). Inside a node in HYBRID_SHARD."""
    cp: Degree = 1
    """Ranks over which the sequence is split outside tensor parallelism."""
    tp: Degree = 1
    """Ranks over which each layer's heads and feed-forward are split (Megatron), inside the NVLink island."""
    ep: Degree = 1
    """Ranks over which experts are spread; they are borrowed from `dp_shard`."""
    schedule: ScheduleName = "1f1b"
    """Order of the microbatches' forwards and backwards on each stage; see `SCHEDULES`."""
    num_microbatches: Degree = "auto"
    """Parts that each replica's batch is split into under `pp` > 1: this is gradient accumulation inside one batch."""
    virtual_stages: int = 1
    """Stages a rank holds; more than 1 only with `schedule="interleaved"`."""
    recompute: RecomputeOption = "none"
    """Which activations are computed again in the backward, block by block: a mode of `RECOMPUTE_MODES`, the share of
    blocks (`0.5`), or what activations may take on a rank (`"2GiB"`)."""
    offload: Offload = "none"
    """Where parameters, gradients and optimizer state live; see `OFFLOADS`."""
    compile: bool = False
    """Whether each block is compiled (`torch.compile`)."""
    compile_backend: str = DEFAULT_BACKEND
    """What compiles the blocks."""
    float8_all_gather: bool = False
    """Whether the blocks' linear layers compute in 8 bits, in which FSDP2 gathers their weights too (torchao)."""
    sequence_parallel: bool = True
    """Whether activations between tensor-parallel regions are split along the sequence (Korthikanti et al. 2022)."""
    reshard_after_forward: bool = True
    """True frees gathered blocks after their forward (FULL_SHARD), False after their backward (SHARD_GRAD_OP)."""

    def __post_init__(self) -> None:
        for name in (*AXES, "ep", "num_microbatches"):
            _check_degree(name, getattr(self, name))
        if self.schedule not in SCHEDULES:
            raise PlanError(
                f"schedule={self.schedule!r} is unknown. Use one of {', '.join(map(repr, SCHEDULES))}."
            )
        object.__setattr__(self, "recompute", canonical_recompute(self.recompute))
        check_values(self.offload, self.compile, self.compile_backend, self.float8_all_gather)
        _check_degree("virtual_stages", self.virtual_stages, auto=False)
        if self.schedule == "interleaved" and self.virtual_stages == 1 and self.pp != 1:
            raise PlanError(
                "schedule='interleaved' needs virtual_stages >= 2. Set virtual_stages=2, or schedule='1f1b'."
            )
        if self.schedule != "interleaved" and self.virtual_stages > 1:
            raise PlanError(
                f"virtual_stages={self.virtual_stages} is for schedule='interleaved', not {self.schedule!r}."
                " Set schedule='interleaved', or virtual_stages=1."
            )
        for axis in ("cp", "ep"):
            if getattr(self, axis) not in (1, "auto"):
                raise PlanError(f"{axis}={getattr(self, axis)} is not available yet. Use {axis}=1.")

    @property
    def is_resolved(self) -> bool:
        """Whether every axis is a number."""
        return all(isinstance(getattr(self, axis), int) for axis in AXES)

    def size(self, axis: str) -> int:
        """Degree of an axis of a resolved plan.

        Raises:
            PlanError: the degree is still `"auto"`.
        """
        degree = getattr(self, axis)
        if not isinstance(degree, int):
            raise PlanError(
                f"{axis}={degree!r} is not resolved. Call plan.resolve(world_size, ranks_per_node) first."
            )
        return degree

    @property
    def world_size(self) -> int:
        """Product of the mesh axes of a resolved plan."""
        return prod(self.size(axis) for axis in AXES)

    @property
    def dp(self) -> int:
        """Data-parallel replicas: parts that the global batch is split into."""
        return self.size("dp_replicate") * self.size("dp_shard")

    @property
    def num_stages(self) -> int:
        """Pipeline stages over all ranks, virtual ones included."""
        return self.size("pp") * self.virtual_stages

    def resolve(self, world_size: int, ranks_per_node: int | None = None) -> "ParallelPlan":
        """Replaces every `"auto"` degree so that the axes fill the world.

        The rule of this method is the field's first step: shard inside the node, replicate across nodes, and leave
        `tp`, `pp` and `cp` at 1 unless they are given.

        Args:
            world_size: number of ranks.
            ranks_per_node: ranks that share a node's fast links; all of them if None.

        Raises:
            PlanError: no numbers for the open axes fill the world.
        """
        fixed = {axis: 1 if getattr(self, axis) == "auto" else self.size(axis) for axis in ("pp", "cp", "tp")}
        ep = 1 if self.ep == "auto" else self.ep
        rest = self._ranks_left_for_data(fixed, world_size)
        island = max(1, (ranks_per_node or world_size) // (fixed["cp"] * fixed["tp"]))
        replicate, shard = self.dp_replicate, self.dp_shard
        if replicate == "auto" and shard == "auto":
            shard = max(degree for degree in _divisors(rest) if degree <= island)
        if shard == "auto":
            shard = _remaining(rest, "dp_replicate", replicate, world_size)
        if replicate == "auto":
            replicate = _remaining(rest, "dp_shard", shard, world_size)
        resolved = replace(
            self,
            pp=fixed["pp"],
            cp=fixed["cp"],
            tp=fixed["tp"],
            ep=ep,
            dp_replicate=replicate,
            dp_shard=shard,
        )
        if resolved.world_size != world_size:
            raise PlanError(
                f"{resolved.describe()} has {resolved.world_size} ranks, but the world has {world_size}."
                " Change a degree or the number of devices, or leave dp_shard='auto' to take the rest."
            )
        return resolved

    def _ranks_left_for_data(self, fixed: Mapping[str, int], world_size: int) -> int:
        model_ranks = prod(fixed.values())
        if world_size % model_ranks:
            axes = " x ".join(f"{axis}={degree}" for axis, degree in fixed.items() if degree > 1)
            raise PlanError(
                f"{axes} needs a multiple of {model_ranks} ranks, but the world has {world_size}."
                f" Use degrees whose product divides {world_size}."
            )
        return world_size // model_ranks

    def describe(self) -> str:
        """The degrees above 1, or `single` for one rank.

        >>> ParallelPlan(pp=2, dp_replicate=1, dp_shard=2, tp=2).describe()
        'pp=2 x dp_shard=2 x tp=2'
        """
        parts = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) != 1]
        return " x ".join(parts) or "single"

    def to_dict(self) -> dict[str, int | str | bool]:
        """The plan as plain data: what `strategy.init_args` of a YAML config holds."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def check_model(self, shape: ModelShape, sequence_length: int | None = None) -> None:
        """Checks tensor and pipeline degrees against the model's dimensions.

        Args:
            shape: dimensions of the model.
            sequence_length: tokens of a sample, if known.

        Raises:
            PlanError: a degree does not divide what it splits; the message lists the degrees that do.
        """
        self._check_tensor_degree(shape)
        if self.num_stages > shape.num_layers:
            raise PlanError(
                f"{self.num_stages} pipeline stages (pp={self.pp} x virtual_stages={self.virtual_stages}) need at least"
                f" as many blocks, but the model has num_layers={shape.num_layers}."
                f" Use at most {shape.num_layers} stages."
            )
        tp = self.size("tp")
        if self.sequence_parallel and sequence_length is not None and sequence_length % tp:
            raise PlanError(
                f"tp={tp} with sequence_parallel does not divide the sequence length {sequence_length}."
                f" Pad the sequence to {sequence_length + tp - sequence_length % tp}, or set sequence_parallel=False."
            )

    def _check_tensor_degree(self, shape: ModelShape) -> None:
        tp = self.size("tp")
        broken = _broken_tensor_rule(tp, shape)
        if broken:
            allowed = [degree for degree in range(1, tp) if not _broken_tensor_rule(degree, shape)]
            raise PlanError(f"tp={tp} {broken}. Use {_alternatives(allowed)}.")

    def check_cluster(self, ranks_per_node: int, *, strict: bool = False) -> list[str]:
        """Checks that the chatty axes stay on fast links.

        Args:
            ranks_per_node: ranks that share a node.
            strict: raise instead of returning warnings.

        Returns:
            Warnings, each with its cost and remedy.

        Raises:
            PlanError: in strict mode, instead of a warning.
        """
        warnings = []
        tp, cp = self.size("tp"), self.size("cp")
        if tp > ranks_per_node or ranks_per_node % tp:
            warnings.append(
                f"tp={tp} does not fit a node of {ranks_per_node} ranks: four collectives per block and microbatch"
                f" would cross the network. Use tp <= {ranks_per_node} and pp across nodes."
            )
        elif tp * cp > ranks_per_node:
            warnings.append(
                f"tp={tp} x cp={cp} exceeds a node of {ranks_per_node} ranks: keys and values would cross the network"
                f" in every block. Use cp <= {ranks_per_node // tp}."
            )
        if strict and warnings:
            raise PlanError(warnings[0])
        return warnings

    def microbatches_for(self, batch_size: int) -> int:
        """Number of equal microbatches that a batch of one replica is split into.

        The asked number if it divides the batch; for a batch that is short or odd (the last one of an epoch), the
        largest divisor of its size below the asked number.

        Args:
            batch_size: samples of the batch on each replica, or the greatest common divisor of several.

        >>> plan = ParallelPlan(pp=2, dp_replicate=1, dp_shard=1, num_microbatches=4)
        >>> plan.microbatches_for(8), plan.microbatches_for(6), plan.microbatches_for(7)
        (4, 3, 1)
        """
        if self.size("pp") == 1:
            return 1
        asked = self.num_microbatches
        if asked == "auto":
            asked = MICROBATCHES_PER_STAGE * self.size("pp")
        return max(degree for degree in _divisors(batch_size) if degree <= asked)

    def check_batch(self, batch_size: int) -> None:
        """Checks the batch of one replica against an explicit number of microbatches and the schedule.

        Args:
            batch_size: samples of a full batch on each replica.

        Raises:
            PlanError: the microbatches do not divide the batch, or are fewer than the stages.
        """
        if self.size("pp") == 1 or self.num_microbatches == "auto":
            return
        if batch_size % self.num_microbatches:
            allowed = [m for m in _divisors(batch_size) if m >= self.size("pp")]
            raise PlanError(
                f"num_microbatches={self.num_microbatches} does not divide the batch of {batch_size} samples a replica."
                f" Use {_alternatives(allowed, 'num_microbatches')}, or another batch size."
            )


def check_microbatches(plan: ParallelPlan) -> None:
    """Checks an explicit number of microbatches, and of virtual stages, against the stages.

    Raises:
        PlanError: fewer microbatches than stages (most of the pipeline would idle), or microbatches without stages.
    """
    asked, pp = plan.num_microbatches, plan.size("pp")
    if pp == 1 and plan.virtual_stages > 1:
        raise PlanError(
            f"virtual_stages={plan.virtual_stages} has no effect with pp=1: one rank has nobody to wait for."
            " Use virtual_stages=1, or pp >= 2."
        )
    if asked == "auto" or (asked == 1 and pp == 1):
        return
    if pp == 1:
        raise PlanError(
            f"num_microbatches={asked} has no effect with pp=1."
            f" Use Trainer(accumulate_grad_batches={asked}), or pp >= 2."
        )
    if asked < pp:
        raise PlanError(
            f"num_microbatches={asked} is below pp={pp}: {pp - asked} of {pp} stages would always idle."
            f" Use num_microbatches >= {pp}; {MICROBATCHES_PER_STAGE * pp} keeps the bubble below 20 %."
        )
    if plan.schedule == "interleaved" and asked % pp:
        raise PlanError(
            f"num_microbatches={asked} is not a multiple of pp={pp}, which schedule='interleaved' needs."
            f" Use {asked - asked % pp} or {asked + pp - asked % pp}, or schedule='1f1b'."
        )


def _broken_tensor_rule(tp: int, shape: ModelShape) -> str:
    """The first dimension that a tensor-parallel degree does not fit, or an empty text; 0 stands for unknown."""
    for name in ("num_attention_heads", "intermediate_size"):
        value = getattr(shape, name)
        if value and value % tp:
            return f"does not divide {name}={value}"
    kv_heads = shape.num_key_value_heads
    if kv_heads and kv_heads % tp and tp % kv_heads:
        return f"and num_key_value_heads={kv_heads} do not divide each other"
    if shape.vocab_size and shape.vocab_size < tp:
        return f"is larger than vocab_size={shape.vocab_size}"
    return ""


def _check_degree(name: str, value: object, *, auto: bool = True) -> None:
    if auto and value == "auto":
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        also = " or 'auto'" if auto else ""
        raise PlanError(f"{name}={value!r} is not a degree. Use a whole number >= 1{also}.")


def _remaining(rest: int, given_name: str, given: Degree, world_size: int) -> int:
    taken = 1 if given == "auto" else given
    if rest % taken:
        raise PlanError(
            f"{given_name}={taken} does not divide the {rest} ranks left for data in a world of {world_size}."
            f" Use {_alternatives(_divisors(rest), given_name)}."
        )
    return rest // taken


def _divisors(number: int, at_most: int | None = None) -> list[int]:
    limit = number if at_most is None else min(at_most, number)
    return [d for d in range(1, limit + 1) if number % d == 0]


def _alternatives(values: list[int], name: str = "tp") -> str:
    if not values:
        return f"another {name}"
    if len(values) == 1:
        return f"{name}={values[0]}"
    return f"{name}={', '.join(map(str, values[:-1]))} or {values[-1]}"
