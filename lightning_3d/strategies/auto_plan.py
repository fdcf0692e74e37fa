# SPDX-License-Identifier: Apache-2.0
"""Checks a plan against the model before processes meet, and asks the planner for the degrees left `auto`."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_3d.compat_lightning import given_dataloader
from lightning_3d.errors import HardwareError, PlanError
from lightning_3d.hardware import Cluster, cluster_of_devices, load_cluster
from lightning_3d.models import readable_shape
from lightning_3d.parallel.blocks import find_blocks
from lightning_3d.plan import AXES, ParallelPlan
from lightning_3d.planner import resolve_auto
from lightning_3d.planner.report import report_text
from lightning_3d.shape import ModelShape

DEFAULT_SEQUENCE_LENGTH = 2048
"""Tokens of a sample where neither the module's `example_input_array` nor its config tells."""


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """Where a run takes place."""

    world_size: int
    ranks_per_node: int
    device: torch.device
    cluster: str | None
    """A cluster as `lightning-3d plan --cluster` takes it, to plan for instead of the devices here."""


def check_plan_against(plan: ParallelPlan, module: Any, blocks: str | None) -> None:
    """Checks heads, vocabulary and number of blocks; leaves what it cannot read to the checks of the layers.

    Raises:
        PlanError: a degree does not fit the model.
    """
    shape = readable_shape(module)
    if shape is None:
        return
    found = find_blocks(module, blocks)
    num_layers = shape.num_layers if found is None else len(found)
    # Sizes of layers are checked layer by layer, by the styles that apply to them. One head may stand for no attention.
    heads = shape.num_attention_heads if shape.num_attention_heads > 1 else 0
    kv_heads = shape.num_key_value_heads if heads else 0
    plan.check_model(
        replace(
            shape,
            num_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=0,
        )
    )


def choose_degrees(
    asked: ParallelPlan, module: Any, trainer: Any, where: Workplace, precision: str
) -> ParallelPlan | None:
    """Asks the planner for the degrees that are `auto`; rank 0 prints its table.

    Returns:
        The plan, or None where the planner has nothing to go by (a CPU without `cluster`, a model without blocks).
    """
    if all(getattr(asked, axis) != "auto" for axis in AXES):
        return None
    cluster, shape = _cluster(where), readable_shape(module)
    if cluster is None or shape is None:
        return None
    try:
        choice = resolve_auto(
            asked,
            shape,
            cluster,
            seq_len=_sequence_length(module, shape),
            batch_per_replica=_batch_size(trainer),
            precision=precision,
            compiled=asked.compile,
        )
    except PlanError as error:
        rank_zero_warn(
            f"The planner found no layout: {error} Going on with shards in the node and replicas across."
        )
        return None
    rank_zero_info(report_text(choice.report))
    return choice.plan


def _cluster(where: Workplace) -> Cluster | None:
    if where.cluster is not None:
        cluster = load_cluster(where.cluster)
        if cluster.world_size != where.world_size:
            raise PlanError(
                f"cluster={where.cluster!r} has {cluster.world_size} devices, but the Trainer starts {where.world_size}"
                " ranks. Make devices x num_nodes the cluster's size."
            )
        return cluster
    if where.device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(where.device)
    try:
        return cluster_of_devices(
            properties.name,
            properties.total_memory,
            world_size=where.world_size,
            gpus_per_node=where.ranks_per_node,
        )
    except HardwareError as error:
        rank_zero_warn(f"{error} Going on without the planner.")
        return None


def _sequence_length(module: Any, shape: ModelShape) -> int:
    example = module.example_input_array
    if isinstance(example, torch.Tensor) and example.dim() > 1:
        return int(example.shape[1])
    return shape.max_seq_len or DEFAULT_SEQUENCE_LENGTH


def _batch_size(trainer: Any) -> int:
    """Samples of a replica's batch, as far as they can be known before any data is loaded."""
    for holder in (trainer.datamodule, given_dataloader(trainer)):
        size = getattr(holder, "batch_size", None)
        if isinstance(size, int):
            return size
    return 1
