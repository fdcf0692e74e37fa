# SPDX-License-Identifier: Apache-2.0
"""Sizes of what each axis moves, per rank; `rank_traffic` adds them up over a step.

Sources: Narayanan et al. 2021 (arXiv:2104.04473) section 3; Korthikanti et al. 2022 (arXiv:2205.05198) section 4;
Rajbhandari et al. 2020 (arXiv:1910.02054) section 7; Megatron-LM's MoE README.
"""

from dataclasses import dataclass

from lightning_3d.estimator.layout import FP8_MATMULS, Layout, Workload
from lightning_3d.estimator.states import StageBlocks, rank_parameters
from lightning_3d.shape import ModelShape

TENSOR_COLLECTIVES = 8
"""Gathers and scatters of a block, forward and backward: four all-reduces, each a scatter and a gather."""
TENSOR_COLLECTIVES_AGAIN = 4
"""Those of the forward, once more under full recomputation."""
EXPERT_EXCHANGES = 4
"""All-to-alls of a block of experts: dispatch and combine, forward and backward."""
EXPERT_EXCHANGES_AGAIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one rank moves; sizes are before the (n-1)/n of a ring."""

    tensor_bytes: float
    """Of one gather or scatter of hidden states over tp."""
    tensor_collectives: int
    """Of them, for one block and microbatch."""
    context_bytes: float
    """Keys and values of the whole sequence, for one block and microbatch."""
    expert_bytes: float
    """Rows that a rank sends in one exchange."""
    expert_exchanges: int
    pipeline_bytes: float
    """Of one hidden state between stages."""
    gathered_bytes: float
    """Parameters of the rank's stage in one gather, routed experts left out."""
    reduced_bytes: float
    """Gradients of the rank's stage in one reduction, routed experts left out."""
    expert_gathered_bytes: float
    """Parameters of the rank's experts, which fewer ranks share."""
    expert_reduced_bytes: float
    replicated_bytes: float
    """Gradients all-reduced over replicas."""
    updated_parameters: float
    """Parameters whose optimizer state the rank holds."""


def traffic(shape: ModelShape, workload: Workload, layout: Layout) -> Traffic:
    """What a middle stage's rank moves under a layout."""
    tokens = layout.microbatch_size * workload.seq_len / layout.cp
    hidden = workload.number_bytes * tokens * shape.hidden_size
    again = layout.recompute == "full"
    blocks = StageBlocks(
        (shape.num_layers - shape.num_moe_layers) / layout.pp, shape.num_moe_layers / layout.pp
    )
    counts = rank_parameters(shape, layout, blocks, first=layout.pp == 1, last=True)
    states = workload.states
    sharded = counts.dense / layout.shard_group + counts.experts / layout.expert_shard_group
    whole_gradients = states.gradients * counts.total
    rows = shape.experts.experts_per_token if shape.experts is not None and layout.ep > 1 else 0
    row_bytes = workload.number_bytes if workload.matmul not in FP8_MATMULS else FP8_DISPATCH_BYTES
    return Traffic(
        tensor_bytes=hidden if layout.tp > 1 else 0.0,
        tensor_collectives=TENSOR_COLLECTIVES + (TENSOR_COLLECTIVES_AGAIN if again else 0),
        context_bytes=workload.number_bytes
        * tokens
        * layout.cp
        * (shape.key_width + shape.value_width)
        / layout.tp,
        expert_bytes=row_bytes * tokens / layout.tp * rows * shape.hidden_size,
        expert_exchanges=EXPERT_EXCHANGES + (EXPERT_EXCHANGES_AGAIN if again else 0),
        pipeline_bytes=hidden / layout.tp if layout.pp > 1 else 0.0,
        gathered_bytes=states.gathered * counts.dense,
        reduced_bytes=states.gradients * counts.dense,
        expert_gathered_bytes=states.gathered * counts.experts,
        expert_reduced_bytes=states.gradients * counts.experts,
        replicated_bytes=whole_gradients / (layout.shard_group if layout.zero_stage else 1),
        updated_parameters=sharded if layout.zero_stage else counts.total,
    )


FP8_DISPATCH_BYTES = 1.5
"""Mean bytes of a number in the exchanges of experts with 8-bit dispatch and 16-bit combine."""
