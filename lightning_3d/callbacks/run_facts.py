# SPDX-License-Identifier: Apache-2.0
"""What estimates need to know of a run, read from its Trainer, whatever its strategy is."""

from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.advisor import RunFacts, uses_autocast
from lightning_3d.callbacks.batches import size_of_batch
from lightning_3d.compat import tree_tensors
from lightning_3d.errors import PlanError
from lightning_3d.estimator import Layout, Workload, layout_of_plan
from lightning_3d.estimator.layout import LOGITS_BYTES_PLAIN, Offload, StateBytes
from lightning_3d.models import readable_shape
from lightning_3d.parallel.blocks import Blocks, find_blocks
from lightning_3d.plan import ParallelPlan
from lightning_3d.planner.auto import matmul_of, states_of


def facts_of(trainer: Trainer, module: LightningModule, batch: Any) -> RunFacts | None:
    """The facts of a run, from its first batch on; None for models that the estimator cannot read."""
    shape = getattr(trainer.strategy, "model_shape", None) or readable_shape(module)
    size = size_of_batch(batch)
    if shape is None or not size.num_tokens or not shape.num_layers:
        return None
    batch_size, seq_len = size.num_samples, size.seq_len
    precision = str(trainer.precision)
    accumulate = trainer.accumulate_grad_batches
    layout = layout_of(trainer, batch_size)
    datamodule = getattr(trainer, "datamodule", None)
    try:
        matmul, states = matmul_of(precision), states_of(precision)
    except PlanError:
        return None
    workload = Workload(
        seq_len=seq_len,
        batch_per_replica=batch_size if layout.pp > 1 else batch_size * accumulate,
        states=replace(states, optimizer=optimizer_bytes(trainer, states)),
        matmul=matmul,
        fused=False,
        logits_bytes=LOGITS_BYTES_PLAIN,
        autocast=uses_autocast(precision, layout),
    )
    return RunFacts(
        shape=shape,
        layout=layout,
        workload=workload,
        stage=stage_of(trainer),
        accumulate=accumulate,
        precision=precision,
        ranks_per_node=max(1, trainer.world_size // trainer.num_nodes),
        is_cpu=trainer.strategy.root_device.type == "cpu",
        datamodule_has_batch_size=isinstance(getattr(datamodule, "batch_size", None), int),
    )


def layout_of(trainer: Trainer, batch_size: int) -> Layout:
    """The layout of any strategy: ours by its plan, Lightning's own as the axes that they are."""
    strategy, world = trainer.strategy, trainer.world_size
    plan = getattr(strategy, "plan", None)
    options: Any = getattr(strategy, "options", None)
    if hasattr(options, "offload_optimizer"):  # one of our ZeRO strategies
        offload: Offload = "none" if options.offload_optimizer == "none" else "optimizer"
        offload = offload if options.offload_params == "none" else "parameters"
        return Layout(dp_shard=world, zero_stage=options.stage, microbatch_size=batch_size, offload=offload)
    if isinstance(strategy, DeepSpeedStrategy):
        stage = int((strategy.config or {}).get("zero_optimization", {}).get("stage", 0))
        return Layout(dp_shard=world, zero_stage=stage, microbatch_size=batch_size)
    if isinstance(plan, ParallelPlan):
        return layout_of_plan(plan, batch_per_replica=batch_size)
    if isinstance(strategy, (FSDPStrategy, ModelParallelStrategy)):
        return Layout(dp_shard=world, microbatch_size=batch_size)
    return Layout(dp_replicate=world, zero_stage=0, microbatch_size=batch_size)


def stage_of(trainer: Trainer) -> int:
    """Pipeline stage of this rank; 0 without stages."""
    mesh = getattr(trainer.strategy, "mesh", None)
    return int(mesh.local_stages[0]) if mesh is not None else 0


def optimizer_bytes(trainer: Trainer, states: StateBytes) -> float:
    """Bytes of optimizer state a parameter: counted where there is one already, else by the regime's Adam."""
    held = sum(tensor.nbytes for tensor in map(local_of, optimizer_tensors(trainer)))
    trained = [
        parameter
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if optimizer.state.get(parameter)
    ]
    count = sum(local_of(parameter).numel() for parameter in trained)
    return held / count if count else states.optimizer


def optimizer_tensors(trainer: Trainer) -> list[Tensor]:
    """All tensors of optimizer state on this rank."""
    return [
        tensor
        for optimizer in trainer.optimizers
        for state in optimizer.state.values()
        for tensor in tree_tensors(state)
    ]


def known_tensors(trainer: Trainer, module: LightningModule, batch: Any = None) -> dict[str, list[Tensor]]:
    """What is in memory between two steps, by category of a trace."""
    return {
        "parameters": list(module.parameters()),
        "gradients": gradients_of(module),
        "optimizer": optimizer_tensors(trainer),
        "buffers": [*module.buffers(), *tree_tensors(batch)],
    }


def gradients_of(module: LightningModule) -> list[Tensor]:
    """The gradients that are there."""
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def blocks_of(trainer: Trainer, module: LightningModule) -> dict[str, nn.Module]:
    """The model's blocks by name; empty if it has none."""
    parallel = getattr(trainer.strategy, "parallel_model", None)
    blocks: Blocks | None = parallel.blocks if parallel is not None else find_blocks(module)
    return {} if blocks is None else dict(zip(blocks.names(), blocks.modules, strict=True))


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
