# SPDX-License-Identifier: Apache-2.0
"""`ThreeDStrategy` under the names of its axes: the same engine with other defaults."""

from dataclasses import replace
from typing import Any

from lightning_3d.plan import Degree, ParallelPlan
from lightning_3d.strategies.three_d import ThreeDStrategy


class HybridShardStrategy(ThreeDStrategy):
    """HYBRID_SHARD FSDP2: shard inside the node, replicate across nodes; FULL_SHARD on one node."""

    strategy_name = "hybrid_shard"

    def __init__(self, dp_replicate: Degree = "auto", dp_shard: Degree = "auto", **options: Any) -> None:
        """Takes the options of `ThreeDStrategy` by keyword.

        Args:
            dp_replicate: replicas of the sharded state; `auto` is the number of nodes.
            dp_shard: ranks that share the state; `auto` is the ranks of a node.
            **options: of `ThreeDStrategy`.
        """
        super().__init__(dp_replicate=dp_replicate, dp_shard=dp_shard, **options)


class TensorParallelStrategy(ThreeDStrategy):
    """Megatron tensor parallelism with sequence parallelism over the ranks of a node, FSDP2 over nodes."""

    strategy_name = "tensor_parallel"

    def __init__(self, tp: Degree = "auto", **options: Any) -> None:
        """Takes the options of `ThreeDStrategy` by keyword.

        Args:
            tp: ranks that split every layer; `auto` is the ranks of a node.
            **options: of `ThreeDStrategy`.
        """
        super().__init__(tp=tp, **options)

    def fill_axis(self, plan: ParallelPlan, world_size: int, ranks_per_node: int) -> ParallelPlan:
        """`auto` takes a node."""
        return replace(plan, tp=ranks_per_node) if plan.tp == "auto" else plan


class PipelineStrategy(ThreeDStrategy):
    """Pipeline parallelism over all ranks that no other axis takes."""

    strategy_name = "pipeline"

    def __init__(self, pp: Degree = "auto", **options: Any) -> None:
        """Takes the options of `ThreeDStrategy` by keyword.

        Args:
            pp: stages in a row; `auto` is the whole world, divided by the other axes given.
            **options: of `ThreeDStrategy`.
        """
        super().__init__(pp=pp, **options)

    def fill_axis(self, plan: ParallelPlan, world_size: int, ranks_per_node: int) -> ParallelPlan:
        """`auto` takes what the given axes leave."""
        if plan.pp != "auto":
            return plan
        others = 1
        for degree in (plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp):
            others *= degree if isinstance(degree, int) else 1
        return replace(plan, pp=max(1, world_size // others))
