# SPDX-License-Identifier: Apache-2.0
"""What the field learned the hard way, said before the run: each caution names the value, the cost and the remedy."""

from lightning_3d.estimator import Layout, StepTimeEstimate, Workload
from lightning_3d.hardware import Cluster
from lightning_3d.shape import ModelShape

TENSOR_CORE_MULTIPLE = 8
"""Widths must be multiples of 8 for 16-bit tensor cores."""
FAST_HEAD_DIMS = (64, 80, 96, 128, 192, 256)
"""Head widths that attention kernels are made for (BLOOM with 108 was 34 to 42 % slower than with 216)."""
THINNEST_SPLIT = 1024
"""Columns of a rank's feed-forward below which matrix products starve."""
LARGE_BUBBLE = 0.15
LARGE_COMMUNICATION = 0.2
LARGE_BATCH_TOKENS = 16e6
"""Tokens of a step that the largest published runs use (Llama 3: 16 M); more changes what is learned."""
SLOW_LINK_BYTES_PER_S = 100e9
"""Tensor parallelism below this costs more than it saves (PCIe 4: 31 GB/s, 25 Gb Ethernet: 3)."""


def cautions(
    shape: ModelShape, cluster: Cluster, workload: Workload, layout: Layout, time: StepTimeEstimate
) -> tuple[str, ...]:
    """All cautions about a layout, the costliest kinds first."""
    return (
        *_tensor(shape, cluster, layout, time),
        *_pipeline(shape, workload, layout, time),
        *_data(cluster, layout, time),
        *(_kernels(shape, layout) if cluster.gpu.name != "CPU" else ()),
        *_batch(workload, layout),
    )


def _tensor(shape: ModelShape, cluster: Cluster, layout: Layout, time: StepTimeEstimate) -> list[str]:
    found = []
    share = time.tensor_s / time.step_s
    if layout.tp > cluster.island:
        found.append(
            f"tp={layout.tp} leaves the island of {cluster.island}: its collectives cross the network in every block"
            f" and take {share:.0%} of the step. Use tp <= {cluster.island} and pp across nodes."
        )
    elif layout.tp > 1 and cluster.link_bytes_per_s < SLOW_LINK_BYTES_PER_S:
        found.append(
            f"tp={layout.tp} over {cluster.gpu.link_bytes_per_s / 1e9:.0f} GB/s without NVLink takes {share:.0%} of"
            " the step. Use FSDP or pp instead."
        )
    kv_heads = shape.num_key_value_heads
    if kv_heads and layout.tp > kv_heads:
        found.append(
            f"tp={layout.tp} exceeds num_key_value_heads={kv_heads}: keys and values are computed and stored"
            f" {layout.tp // kv_heads} times. Use tp <= {kv_heads}."
        )
    return found


def _pipeline(shape: ModelShape, workload: Workload, layout: Layout, time: StepTimeEstimate) -> list[str]:
    if layout.pp == 1:
        return []
    found, microbatches = [], layout.microbatches(workload)
    if time.bubble_fraction > LARGE_BUBBLE:
        found.append(
            f"pp={layout.pp} with {microbatches} microbatches idles {time.bubble_fraction:.0%} of the step. Use more"
            f" microbatches (>= {4 * layout.pp}), virtual stages, or a smaller pp."
        )
    uneven = shape.num_layers % (layout.pp * layout.virtual_stages)
    if uneven:
        found.append(
            f"{shape.num_layers} blocks do not divide over {layout.pp * layout.virtual_stages} stages: {uneven} of them"
            " have one block more, and the others wait."
        )
    return found


def _data(cluster: Cluster, layout: Layout, time: StepTimeEstimate) -> list[str]:
    share = time.data_s / time.step_s
    if share < LARGE_COMMUNICATION:
        return []
    across = layout.dp > 1 and layout.world_size > cluster.island
    where = (
        f"at {cluster.network_bytes_per_s / 1e9:.0f} GB/s a GPU between nodes"
        if across
        else "inside the node"
    )
    return [
        (
            f"gathers and reductions over dp_shard={layout.dp_shard} take {share:.0%} of the step {where}. Use more"
            " tokens a microbatch, dp_shard inside a node, or tp/pp to make a rank's part smaller."
        )
    ]


def _kernels(shape: ModelShape, layout: Layout) -> list[str]:
    found = []
    if shape.head_dim and shape.latent_attention is None and shape.head_dim not in FAST_HEAD_DIMS:
        remedy = (
            "a multiple of 64"
            if shape.head_dim % TENSOR_CORE_MULTIPLE == 0
            else "a multiple of 8, best of 64"
        )
        found.append(f"head_dim={shape.head_dim} is slow on tensor cores (up to 40 %). Prefer {remedy}.")
    for name, width in (("hidden_size", shape.hidden_size), ("intermediate_size", shape.intermediate_size)):
        if width % TENSOR_CORE_MULTIPLE:
            found.append(f"{name}={width} is not a multiple of 8, which 16-bit tensor cores need. Pad it.")
    vocab = shape.vocab_size
    if vocab % (TENSOR_CORE_MULTIPLE * layout.tp):
        padded = -(-vocab // (128 * layout.tp)) * 128 * layout.tp
        found.append(
            f"vocab_size={vocab} is not a multiple of 8 x tp. Pad the embedding to {padded} for a fast head."
        )
    if layout.tp > 1 and shape.intermediate_size / layout.tp < THINNEST_SPLIT:
        found.append(
            f"tp={layout.tp} leaves {shape.intermediate_size // layout.tp} feed-forward columns a rank: the products"
            " are too thin to be fast. Use a smaller tp."
        )
    return found


def _batch(workload: Workload, layout: Layout) -> list[str]:
    tokens = workload.replica_batch(layout.dp) * layout.dp * workload.seq_len
    if tokens <= LARGE_BATCH_TOKENS:
        return []
    fewer = (
        " Fewer replicas (more pp, tp or cp) allow a smaller one."
        if workload.replica_batch(layout.dp) == 1
        else ""
    )
    return [
        (
            f"a step of {tokens / 1e6:.0f} M tokens is beyond what the largest runs use, which changes what is learned."
            f" Use a smaller batch, or check the learning-rate schedule.{fewer}"
        )
    ]
