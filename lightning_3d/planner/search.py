# SPDX-License-Identifier: Apache-2.0
"""All layouts that a model, a batch and a cluster allow.

Legality (Megatron-LM's arguments, its Bridge's parallelism guide): the degrees multiply to the world; tp divides
query heads and feed-forward and fits with the KV heads; a stage has a block for each of its chunks; replicas divide
the batch; ring context parallelism cuts the sequence in 2c parts; experts divide over ep.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from lightning_3d.errors import PlanError
from lightning_3d.estimator import Layout, Workload
from lightning_3d.estimator.layout import Offload, Recompute
from lightning_3d.hardware import Cluster
from lightning_3d.shape import ModelShape

SHORTEST_CONTEXT_PART = 8192
"""Tokens of a context-parallel rank below which the ring of keys and values is not worth its traffic."""
INTERLEAVED_CHUNKS = (2, 4)
"""Virtual stages that are tried."""
MICROBATCH_SIZES = (1, 2, 4, 8)
LONGEST_PIPELINE = 64


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What may vary."""

    fixed: Mapping[str, int] = field(default_factory=dict)
    """Degrees that the user gave: `pp`, `dp_replicate`, `dp_shard`, `cp`, `tp`, `ep`, `microbatch_size`,
    `virtual_stages`."""
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    """Kinds of recomputation, cheapest first: the first that fits is taken."""
    recompute_fraction: float = 1.0
    """Share of blocks that full recomputation applies to."""
    recompute_budget_bytes: float = 0.0
    """What a rank's activations may take under full recomputation of as few blocks as that needs; 0 is no budget."""
    offload: tuple[Offload, ...] = ("none", "optimizer", "parameters")
    """Tried in order, the next only if nothing fits with the one before."""
    schedules: tuple[str, ...] = ("1f1b", "interleaved")
    context_parallel: bool = True
    expert_parallel: bool = True
    accumulate: bool = True
    """Whether a replica's batch may be cut into microbatches without a pipeline (gradient accumulation)."""
    tensor_across_islands: bool = False

    def __post_init__(self) -> None:
        known = {"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "microbatch_size", "virtual_stages"}
        unknown = set(self.fixed) - known
        if unknown:
            raise PlanError(
                f"fixed has {sorted(unknown)}, which are no degrees. Use {', '.join(sorted(known))}."
            )

    def choices(self, name: str, options: list[int]) -> list[int]:
        """The options of a degree, or the one that is fixed."""
        return [self.fixed[name]] if name in self.fixed else options


def divisors(number: int) -> list[int]:
    """All divisors, in order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def tensor_degrees(shape: ModelShape, cluster: Cluster, workload: Workload, space: SearchSpace) -> list[int]:
    """Tensor-parallel degrees that split the model evenly and stay in an island."""
    limit = cluster.world_size if space.tensor_across_islands else min(cluster.island, cluster.world_size)
    widths = [shape.num_attention_heads or shape.hidden_size, shape.intermediate_size]
    if shape.experts is not None and shape.experts.shared_intermediate_size:
        widths.append(shape.experts.shared_intermediate_size)
    kv_heads = shape.num_key_value_heads or 1
    allowed = [
        tp
        for tp in divisors(
            limit if cluster.island % limit == 0 or space.tensor_across_islands else cluster.island
        )
        if all(width % tp == 0 for width in widths)
        and (kv_heads % tp == 0 or tp % kv_heads == 0)
        and workload.seq_len % tp == 0
        and cluster.world_size % tp == 0
        and _fits_node(tp, cluster, space)
    ]
    return space.choices("tp", allowed)


def _fits_node(tp: int, cluster: Cluster, space: SearchSpace) -> bool:
    if space.tensor_across_islands or tp <= cluster.gpus_per_node:
        return space.tensor_across_islands or cluster.gpus_per_node % tp == 0
    return tp <= cluster.island


def layouts(
    shape: ModelShape, cluster: Cluster, workload: Workload, space: SearchSpace
) -> Iterator[list[Layout]]:
    """Families of layouts that differ only in recomputation and resharding, cheapest in time first."""
    world = cluster.world_size
    for tp in tensor_degrees(shape, cluster, workload, space):
        for cp in space.choices("cp", _context_degrees(workload, world // tp, space)):
            if world % (tp * cp):
                continue
            for pp in space.choices("pp", _pipeline_degrees(shape, world // (tp * cp))):
                if world % (tp * cp * pp) == 0 and pp <= shape.num_layers:
                    base = Layout(pp=pp, cp=cp, tp=tp)
                    yield from _with_data_axes(base, shape, cluster, workload, space)


def _context_degrees(workload: Workload, ranks: int, space: SearchSpace) -> list[int]:
    if not space.context_parallel:
        return [1]
    longest = max(1, workload.seq_len // SHORTEST_CONTEXT_PART)
    return [cp for cp in divisors(ranks) if cp <= longest and (cp == 1 or workload.seq_len % (2 * cp) == 0)]


def _pipeline_degrees(shape: ModelShape, ranks: int) -> list[int]:
    return [pp for pp in divisors(ranks) if pp <= min(shape.num_layers, LONGEST_PIPELINE)]


def _with_data_axes(
    base: Layout, shape: ModelShape, cluster: Cluster, workload: Workload, space: SearchSpace
) -> Iterator[list[Layout]]:
    dp = cluster.world_size // base.world_size
    batch = workload.replica_batch(dp)
    if batch == 0 or workload.global_batch % dp:
        return
    for shard in _shard_degrees(dp, base, cluster, space):
        for ep in space.choices("ep", _expert_degrees(shape, shard * base.cp * base.tp, space)):
            sharded = replace(base, dp_replicate=dp // shard, dp_shard=shard, ep=ep)
            sharded = replace(sharded, zero_stage=3 if sharded.shard_group > 1 else 0)
            for size in space.choices("microbatch_size", _microbatch_sizes(batch, base.pp, space)):
                if batch % size == 0:
                    yield from _with_schedules(replace(sharded, microbatch_size=size), shape, workload, space)


def _shard_degrees(dp: int, base: Layout, cluster: Cluster, space: SearchSpace) -> list[int]:
    """Full sharding, sharding inside a node (HSDP), and replicas."""
    if "dp_shard" in space.fixed or "dp_replicate" in space.fixed:
        shard = space.fixed.get("dp_shard", dp // space.fixed.get("dp_replicate", 1) or 1)
        replicate = space.fixed.get("dp_replicate", dp // shard or 1)
        return [shard] if shard * replicate == dp else []
    inside = max(1, cluster.gpus_per_node // (base.tp * base.cp))
    return sorted({dp, inside if dp % inside == 0 else 1, 1}, reverse=True)


def _expert_degrees(shape: ModelShape, ranks: int, space: SearchSpace) -> list[int]:
    if shape.experts is None or not space.expert_parallel:
        return [1]
    return [ep for ep in divisors(min(ranks, shape.experts.num_experts)) if _divides(ep, shape, ranks)]


def _divides(ep: int, shape: ModelShape, ranks: int) -> bool:
    return shape.experts is not None and shape.experts.num_experts % ep == 0 and ranks % ep == 0


def _microbatch_sizes(batch: int, pp: int, space: SearchSpace) -> list[int]:
    if pp == 1 and not space.accumulate:
        return [batch]
    return [size for size in MICROBATCH_SIZES if size <= batch]


def _with_schedules(
    base: Layout, shape: ModelShape, workload: Workload, space: SearchSpace
) -> Iterator[list[Layout]]:
    microbatches = base.microbatches(workload)
    if base.pp == 1:
        yield _variants(base, space)
        return
    if microbatches < base.pp and "pp" not in space.fixed:
        return
    for schedule in space.schedules:
        if schedule != "interleaved":
            yield _variants(replace(base, schedule=schedule), space)
            continue
        for chunks in space.choices("virtual_stages", list(INTERLEAVED_CHUNKS)):
            if chunks > 1 and microbatches % base.pp == 0 and base.pp * chunks <= shape.num_layers:
                yield _variants(replace(base, schedule=schedule, virtual_stages=chunks), space)


def _variants(base: Layout, space: SearchSpace) -> list[Layout]:
    """From fast and large to slow and small: parameters kept gathered, then freed, then recomputation."""
    first, *others = space.recompute
    base = replace(
        base,
        recompute_fraction=space.recompute_fraction,
        recompute_budget_bytes=space.recompute_budget_bytes,
    )
    kept = replace(base, recompute=first, reshard_after_forward=False)
    if base.zero_stage < 3 or base.pp > 1:
        return [kept, *(replace(kept, recompute=kind) for kind in others)]
    freed = replace(kept, reshard_after_forward=True)
    return [kept, freed, *(replace(freed, recompute=kind) for kind in others)]
