# SPDX-License-Identifier: Apache-2.0
"""Serving: how many GPUs hold a model and its cache, which quantization saves a hop, and the arguments of vLLM.

Sources: KV bytes per token 2 L k d_h (latent attention: L (r_kv + d_rope)); decoding reads the weights and the cache
once a token, so it is bound by device memory; prefill computes 2 N per token (Pope et al. 2022, arXiv:2211.05102).
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lightning_3d.errors import PlanError
from lightning_3d.estimator.efficiency import DEFAULT_EFFICIENCY
from lightning_3d.hardware import Cluster
from lightning_3d.models.parameters import active_parameters, total_parameters
from lightning_3d.shape import ModelShape
from lightning_3d.units import GIB, format_count

WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.53}
"""Bytes of a weight; int4 with fp16 scales and zeros for groups of 128."""
CACHE_BYTES = {"bf16": 2.0, "fp8": 1.0}
MEMORY_UTILIZATION = 0.9
"""vLLM's default `--gpu-memory-utilization`."""
RESERVED_BYTES = 2 * GIB
"""CUDA context, graphs and NCCL."""
BATCHED_TOKENS = 8192
"""vLLM's default `--max-num-batched-tokens` with chunked prefill."""
ACTIVATION_BYTES = 4
"""Bytes of the widest intermediate (logits or feed-forward) for each batched token."""
SMALL_ALL_REDUCE_S = 15e-6
"""All-reduce of one token's hidden state in an island: the floor of measured tables is 13 to 20 us on H100."""
PIPELINE_FILL = 0.8
"""Throughput kept with stages over nodes, where decoding waits for each hop."""


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """One way to serve a model."""

    quantization: str
    cache: str
    tp: int
    pp: int
    replicas: int
    """Copies that the cluster holds."""
    weight_gib: float
    """Of one GPU."""
    cache_gib: float
    """Left for the cache on one GPU."""
    max_concurrency: int
    """Requests of the full context that one replica holds at once."""
    decode_tokens_per_s: float
    """Of one request alone: weights read once a token."""
    batch_tokens_per_s: float
    """Of one replica at the asked (or the full) concurrency."""
    prefill_tokens_per_s: float
    """Of one replica."""

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.pp


@dataclass(frozen=True, kw_only=True)
class ServingAdvice:
    """The chosen plan, others, and why."""

    shape: ModelShape
    cluster: Cluster
    context: int
    concurrency: int
    chosen: ServingPlan
    others: tuple[ServingPlan, ...]
    reasons: tuple[str, ...]

    def vllm_arguments(self) -> list[str]:
        """Arguments of `vllm serve` for one replica."""
        plan = self.chosen
        arguments = ["--tensor-parallel-size", str(plan.tp)]
        if plan.pp > 1:
            arguments += ["--pipeline-parallel-size", str(plan.pp)]
        arguments += [
            "--max-model-len",
            str(self.context),
            "--gpu-memory-utilization",
            str(MEMORY_UTILIZATION),
        ]
        if plan.quantization in ("fp8",):
            arguments += ["--quantization", "fp8"]
        if plan.cache == "fp8":
            arguments += ["--kv-cache-dtype", "fp8"]
        return [
            *arguments,
            "--max-num-seqs",
            str(max(1, min(plan.max_concurrency, self.concurrency or 1024))),
        ]

    def to_dict(self) -> dict[str, Any]:
        """The advice as plain data."""
        return {
            "model": self.shape.name,
            "cluster": self.cluster.describe(),
            "context": self.context,
            "chosen": asdict(self.chosen),
            "others": [asdict(plan) for plan in self.others],
            "reasons": list(self.reasons),
            "vllm": self.vllm_arguments(),
        }

    def text(self) -> str:
        """The advice for a terminal."""
        plan, count = self.chosen, format_count(total_parameters(self.shape))
        lines = [
            (f"{self.shape.name}, {count} parameters, on {self.cluster.describe()},"
            f" {self.context} tokens a request"),
            (f"Chosen: {plan.quantization} weights, tp={plan.tp} pp={plan.pp}, {plan.replicas} replicas;"
            f" weights {plan.weight_gib:.1f} GiB and cache {plan.cache_gib:.1f} GiB a GPU ({plan.cache}),"
            f" {plan.max_concurrency} requests at once a replica"),
            (f"Estimate a replica: {plan.decode_tokens_per_s:.0f} tokens/s for one request,"
            f" {plan.batch_tokens_per_s:,.0f} for {self.concurrency or plan.max_concurrency};"
            f" prefill {plan.prefill_tokens_per_s:,.0f} tokens/s"),
            *self.reasons,
            *(f"Else: {other.quantization} tp={other.tp} pp={other.pp}, {other.max_concurrency} requests"
              for other in self.others),
            f"vllm serve <model> {' '.join(self.vllm_arguments())}",
        ]  # fmt: skip
        return "\n".join(lines)


def cache_bytes_per_token(shape: ModelShape, cache: str = "bf16") -> float:
    """Bytes of the KV cache of one token over all blocks.

    >>> from lightning_3d.models import load_shape
    >>> [int(cache_bytes_per_token(load_shape(name))) // 1024 for name in ("llama-3-8b", "llama-3-70b")]
    [128, 320]
    """
    if shape.latent_attention is not None:
        width = shape.latent_attention.kv_lora_rank + shape.latent_attention.qk_rope_head_dim
    else:
        width = shape.key_width + shape.value_width
    return shape.num_layers * width * CACHE_BYTES[cache]


def cache_bytes_of_request(shape: ModelShape, context: int, cache: str = "bf16") -> float:
    """Bytes of the cache of one request; blocks with a window keep no more tokens than it."""
    per_token = cache_bytes_per_token(shape, cache) / max(1, shape.num_layers)
    windowed = shape.num_sliding_layers
    kept = (shape.num_layers - windowed) * context + windowed * min(context, shape.sliding_window)
    return per_token * kept


def plan_serving(shape: ModelShape, cluster: Cluster, *, context: int, concurrency: int = 0) -> ServingAdvice:
    """Chooses quantization and degrees for serving.

    The order: fewest hops first. tp stays in the island, pp only crosses nodes, and weights are quantized before a
    replica is spread over nodes, as a hop costs every token more than 8-bit weights do.

    Args:
        shape: dimensions of the model.
        cluster: the devices.
        context: tokens of a request, prompt and answer.
        concurrency: requests at once over the cluster; 0 takes what fits.

    Raises:
        PlanError: not even 4-bit weights fit, or the context is longer than the model's.
    """
    if context < 1 or (shape.max_seq_len is not None and context > shape.max_seq_len):
        raise PlanError(
            f"context={context} is not from 1 to max_seq_len={shape.max_seq_len}. Use a shorter one."
        )
    plans = [
        plan
        for quantization in WEIGHT_BYTES
        for plan in _plans(shape, cluster, quantization, context, concurrency)
    ]
    wanted = max(1, concurrency)
    enough = [plan for plan in plans if plan.max_concurrency * plan.replicas >= wanted]
    if not enough:
        most = max((plan.max_concurrency * plan.replicas for plan in plans), default=0)
        raise PlanError(
            f"{wanted} requests of {context} tokens do not fit {cluster.describe()}: at most {most}, in 4 bits."
            " Use more GPUs, a shorter context, or fewer requests."
        )
    chosen = min(enough, key=_serving_key)
    others = tuple(
        min((plan for plan in enough if plan.quantization == name), key=_serving_key)
        for name in WEIGHT_BYTES
        if name != chosen.quantization and any(plan.quantization == name for plan in enough)
    )
    return ServingAdvice(
        shape=shape,
        cluster=cluster,
        context=context,
        concurrency=concurrency,
        chosen=chosen,
        others=others,
        reasons=tuple(_reasons(shape, cluster, chosen, plans)),
    )


def _serving_key(plan: ServingPlan) -> tuple[float, ...]:
    """Fewest hops, then the least quantized, then most tokens/s of the cluster."""
    quantized = list(WEIGHT_BYTES).index(plan.quantization)
    return (plan.pp, quantized, -plan.batch_tokens_per_s * plan.replicas, plan.tp)


def _plans(
    shape: ModelShape, cluster: Cluster, quantization: str, context: int, concurrency: int
) -> Iterator[ServingPlan]:
    if quantization == "fp8" and cluster.gpu.peak_flops_fp8 <= cluster.gpu.peak_flops:
        return
    for tp in _tensor_degrees(shape, cluster):
        for pp in range(1, cluster.num_nodes + 1):
            if pp > 1 and (tp < cluster.gpus_per_node or shape.num_layers < pp):
                continue
            plan = _plan(shape, cluster, quantization, tp, pp, context, concurrency)
            if plan is not None:
                yield plan
                break


def _tensor_degrees(shape: ModelShape, cluster: Cluster) -> list[int]:
    limit = min(cluster.gpus_per_node, cluster.world_size)
    heads = shape.num_attention_heads or 1
    return [tp for tp in range(1, limit + 1) if limit % tp == 0 and heads % tp == 0]


def _plan(
    shape: ModelShape, cluster: Cluster, quantization: str, tp: int, pp: int, context: int, concurrency: int
) -> ServingPlan | None:
    """The plan with these degrees, or None if no request fits."""
    gpu, ranks = cluster.gpu, tp * pp
    weights = total_parameters(shape) * WEIGHT_BYTES[quantization] / ranks
    widest = max(shape.vocab_size, shape.intermediate_size * 2) / tp
    activations = BATCHED_TOKENS * ACTIVATION_BYTES * max(widest, shape.hidden_size)
    room = gpu.memory_bytes * MEMORY_UTILIZATION - weights - activations - RESERVED_BYTES
    cache = "bf16"
    request = cache_bytes_of_request(shape, context, cache) / pp / _cache_split(shape, tp)
    held = int(room // request) if request else 0
    if held < 1:
        return None
    replicas = max(1, cluster.world_size // ranks)
    together = min(held, -(-concurrency // replicas)) if concurrency else held
    return ServingPlan(
        quantization=quantization,
        cache=cache,
        tp=tp,
        pp=pp,
        replicas=replicas,
        weight_gib=weights / GIB,
        cache_gib=room / GIB,
        max_concurrency=held,
        decode_tokens_per_s=_decode_rate(shape, cluster, quantization, tp, pp, request, 1),
        batch_tokens_per_s=_decode_rate(shape, cluster, quantization, tp, pp, request, together),
        prefill_tokens_per_s=gpu.achievable_flops
        * DEFAULT_EFFICIENCY.matmul
        * ranks
        / (2 * active_parameters(shape)),
    )


def _cache_split(shape: ModelShape, tp: int) -> int:
    """Ranks over which the cache is split: as many as KV heads; a latent cache is whole on each."""
    return 1 if shape.latent_attention is not None else min(tp, shape.num_key_value_heads or tp)


def _decode_rate(
    shape: ModelShape, cluster: Cluster, quantization: str, tp: int, pp: int, request: float, together: int
) -> float:
    """Tokens a second of a replica: weights once, the caches of all requests, two all-reduces a block."""
    gpu = cluster.gpu
    parameters = total_parameters(shape) if together > 1 else active_parameters(shape)
    weights = parameters * WEIGHT_BYTES[quantization] / (tp * pp)
    reading = (weights + request / 2 * together) / (gpu.memory_bytes_per_s * DEFAULT_EFFICIENCY.memory)
    latency = 2 * shape.num_layers / pp * SMALL_ALL_REDUCE_S if tp > 1 else 0.0
    computing = (
        2
        * active_parameters(shape)
        / (tp * pp)
        * together
        / (gpu.achievable_flops * DEFAULT_EFFICIENCY.matmul)
    )
    stage = max(reading, computing) + latency
    return together / stage * (PIPELINE_FILL if pp > 1 and together >= pp else 1 / pp)


def _reasons(shape: ModelShape, cluster: Cluster, chosen: ServingPlan, plans: list[ServingPlan]) -> list[str]:
    reasons = []
    plain = [plan for plan in plans if plan.quantization == "bf16"]
    if chosen.quantization != "bf16":
        instead = f"pp={min(plan.pp for plan in plain)} over nodes" if plain else "more GPUs than there are"
        reasons.append(f"{chosen.quantization} weights: bf16 would need {instead} for these requests.")
    if chosen.pp > 1:
        reasons.append(
            f"pp={chosen.pp}: one node of {cluster.gpus_per_node} GPUs does not hold the weights and a cache."
        )
    if chosen.tp > _cache_split(shape, chosen.tp):
        why = (
            "a latent cache is not split"
            if shape.latent_attention
            else f"{shape.num_key_value_heads} KV heads"
        )
        copies = chosen.tp // _cache_split(shape, chosen.tp)
        reasons.append(f"tp={chosen.tp} stores each cache {copies} times: {why}.")
    if chosen.replicas > 1:
        reasons.append(
            f"{chosen.replicas} replicas behind a balancer: throughput grows with them, latency does not."
        )
    return reasons
