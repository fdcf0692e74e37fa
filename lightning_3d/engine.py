# SPDX-License-Identifier: Apache-2.0
"""The recipe: a model and a plan in, a parallel model out. Read `parallelize` from top to bottom."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_3d.errors import ModelError
from lightning_3d.mesh import ParallelMesh
from lightning_3d.models import readable_shape
from lightning_3d.parallel.blocks import Blocks, find_blocks, make_distinct
from lightning_3d.parallel.compiled import compile_blocks
from lightning_3d.parallel.float8 import convert_blocks
from lightning_3d.parallel.fsdp import StepRoot, apply_fsdp, callable_parts
from lightning_3d.parallel.gate import BlockGate
from lightning_3d.parallel.gradients import GradientLayout
from lightning_3d.parallel.initial_state import (
    broadcast_state,
    check_meta,
    check_same_model,
    is_on_meta,
    materialize,
    move_unsharded,
)
from lightning_3d.parallel.tensor import TensorParallel, apply_tp, resolve_tp
from lightning_3d.parallel.trail import Trail
from lightning_3d.pipeline.cut import Cut, apply_cut, plan_cut, survey
from lightning_3d.pipeline.cut_check import CutCheck
from lightning_3d.recomputation import choose_recompute
from lightning_3d.shape import ModelShape
from lightning_3d.tp_styles import ResolvedStyles


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What the user says about the model; everything has a default that is found by itself."""

    blocks: str | None = None
    """Name of the list of blocks inside the LightningModule."""
    tp_styles: Mapping[str, str] | None = None
    """Tensor-parallel styles by name pattern; see `lightning_3d.tp_styles`."""
    tp_head_attributes: tuple[str, ...] = ()
    """Further integer attributes of attention modules that tensor parallelism divides, such as a custom head count."""
    first_stage_modules: tuple[str, ...] = ()
    """Modules that run before the blocks although they are defined behind them."""
    last_stage_modules: tuple[str, ...] = ()
    """Modules that run behind the blocks although they are defined before them."""


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """This rank's part of a model, ready to run."""

    root: StepRoot
    """Runs steps with the parameters they read."""
    num_parameters: int
    """Parameters of the whole model."""
    shape: ModelShape | None
    """Dimensions of the whole model, for estimates; None where they cannot be read."""
    blocks: Blocks | None
    """The repeated layers, all of them; those of other stages are without parameters."""
    gate: BlockGate | None
    """Gate of the blocks; None where nothing happens at their borders."""
    cut: Cut | None
    """The stages; None with one stage."""
    check: CutCheck | None
    """Compares the stages with the whole model, once; None with one stage."""
    gradients: GradientLayout
    """What must be added up after the backward."""
    trail: Trail | None
    """Which sharded modules this rank goes through; None where nothing is sharded."""


def parallelize(
    module: nn.Module,
    mesh: ParallelMesh,
    options: ModelOptions,
    *,
    device: torch.device,
    precision: str,
    seed: int,
    shard_root: bool = True,
) -> ParallelModel:
    """Cuts, splits and shards a model in place; collective over the world.

    Args:
        module: the LightningModule, alike on every rank.
        mesh: the mesh, with its plan.
        options: what the user says about the model.
        device: this rank's device.
        precision: the Trainer's precision.
        seed: equal on all ranks; values of modules made on the meta device depend on it.
        shard_root: shard what is outside the blocks under one root that runs the steps; False shards each child
            of the module on its own, for steps that run several backwards (manual optimization).

    Raises:
        ModelError: the model cannot be parallelized this way.
        PlanError: a degree does not fit the model.
    """
    plan = mesh.plan
    check_same_model(module)
    blocks = find_blocks(module, options.blocks)
    _check_blocks(blocks, module, mesh)
    if blocks is not None and (mesh.pp_size > 1 or mesh.tp_mesh is not None):
        blocks = make_distinct(module, blocks)
    on_meta = is_on_meta(module)
    if on_meta:
        check_meta(module)
    broadcast_state(module, device)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    shape = readable_shape(module)

    # Before the cut: a style that one stage alone cannot follow must be refused on all of them.
    styles = _resolve_styles(module, blocks, mesh, options)
    check = _check_of_cut(module, blocks, mesh, precision)
    cut = _cut_stages(module, blocks, mesh, options)
    offload = plan.offload != "none"
    # With offload FSDP2 brings one block at a time and takes its shards back; to split tensors, all must be there.
    if not on_meta and not (offload and mesh.tp_mesh is None):
        module.to(device)

    local_blocks = _local_blocks(blocks, mesh, cut)
    if plan.float8_all_gather:
        convert_blocks(module, local_blocks, device, precision)
    tensor_parallel = _split_tensors(module, blocks, mesh, styles, options)
    recompute = choose_recompute(
        blocks, mesh, cut, shape, precision=precision, stop_early=tensor_parallel is None
    )
    if plan.compile:
        compile_blocks(local_blocks, plan.compile_backend, selective=plan.recompute == "selective")
    needs_gate = cut is not None or tensor_parallel is not None or recompute is not None
    gate = BlockGate(blocks.modules, tensor_parallel, recompute) if blocks and needs_gate else None

    root = StepRoot(module)
    _shard(root, module, blocks, mesh, precision, shard_root)
    _settle(module, device, seed, on_meta=on_meta, offload=offload)
    return ParallelModel(
        root=root,
        num_parameters=num_parameters,
        shape=shape,
        blocks=blocks,
        gate=gate,
        cut=cut,
        check=_begin_check(check, cut, module),
        gradients=_gradient_layout(module, mesh, cut, tensor_parallel, shard_root),
        trail=_trail_of(root, mesh),
    )


def _trail_of(root: StepRoot, mesh: ParallelMesh) -> Trail | None:
    if mesh.fsdp_mesh is None or mesh.dp_size == 1:
        return None
    trail = Trail()
    trail.follow(root)
    return trail


def _check_blocks(blocks: Blocks | None, module: nn.Module, mesh: ParallelMesh) -> None:
    plan = mesh.plan
    along_blocks = {
        f"pp={mesh.pp_size}": mesh.pp_size > 1,
        f"tp={mesh.size('tp')}": mesh.tp_mesh is not None,
        f"recompute={plan.recompute!r}": plan.recompute != "none",
        "compile=True": plan.compile,
        "float8_all_gather=True": plan.float8_all_gather,
    }
    asked = [name for name, is_asked in along_blocks.items() if is_asked]
    if blocks is None and asked:
        raise ModelError(
            f"{type(module).__name__} has no ModuleList or Sequential of two or more layers, along which"
            f" {', '.join(asked)} would work. Put the repeated layers in a ModuleList, or use data parallelism only."
        )


def _check_of_cut(
    module: nn.Module, blocks: Blocks | None, mesh: ParallelMesh, precision: str
) -> CutCheck | None:
    if blocks is None or mesh.plan.num_stages == 1:
        return None
    is_low = precision not in ("32-true", "64-true") or mesh.plan.float8_all_gather
    return CutCheck(module, blocks.name, mesh, low_precision=is_low)


def _begin_check(check: CutCheck | None, cut: Cut | None, module: nn.Module) -> CutCheck | None:
    if check is not None and cut is not None:
        check.begin(module, tuple(stage.start for stage in cut.stages))
    return check


def _cut_stages(
    module: nn.Module, blocks: Blocks | None, mesh: ParallelMesh, options: ModelOptions
) -> Cut | None:
    if blocks is None or mesh.plan.num_stages == 1:
        return None
    surroundings = survey(module, blocks, options.first_stage_modules, options.last_stage_modules)
    cut = plan_cut(module, blocks, mesh.plan.num_stages, surroundings)
    apply_cut(module, blocks, cut, mesh.local_stages)
    return cut


def _local_blocks(blocks: Blocks | None, mesh: ParallelMesh, cut: Cut | None) -> list[nn.Module]:
    if blocks is None:
        return []
    if cut is None:
        return list(blocks.modules)
    return [blocks.modules[index] for stage in mesh.local_stages for index in cut.stages[stage]]


def _resolve_styles(
    module: nn.Module, blocks: Blocks | None, mesh: ParallelMesh, options: ModelOptions
) -> ResolvedStyles | None:
    if mesh.tp_mesh is None or blocks is None:
        return None
    return resolve_tp(module, blocks.names(), mesh.size("tp"), options.tp_styles)


def _split_tensors(
    module: nn.Module,
    blocks: Blocks | None,
    mesh: ParallelMesh,
    styles: ResolvedStyles | None,
    options: ModelOptions,
) -> TensorParallel | None:
    if mesh.tp_mesh is None or blocks is None:
        return None
    return apply_tp(
        module,
        dict(zip(blocks.names(), blocks.modules, strict=True)),
        mesh.tp_mesh,
        styles,
        sequence_parallel=mesh.plan.sequence_parallel,
        head_attributes=options.tp_head_attributes,
    )


def _shard(
    root: StepRoot,
    module: nn.Module,
    blocks: Blocks | None,
    mesh: ParallelMesh,
    precision: str,
    shard_root: bool,
) -> None:
    block_modules = () if blocks is None else blocks.modules
    if mesh.fsdp_mesh is None:
        return
    apply = partial(
        apply_fsdp,
        mesh=mesh.fsdp_mesh,
        precision=precision,
        reshard_after_forward=mesh.plan.reshard_after_forward,
        offload=mesh.plan.offload != "none",
    )
    if shard_root:
        apply(root, block_modules)
        return
    for part in callable_parts(module):
        apply(part, [b for b in block_modules if b is not part and any(b is m for m in part.modules())])


def _settle(module: nn.Module, device: torch.device, seed: int, *, on_meta: bool, offload: bool) -> None:
    """Gives what was made on the meta device its values, and brings all but offloaded shards to the device."""
    if on_meta:
        materialize(module, torch.device("cpu") if offload else device, seed)
    if offload:
        move_unsharded(module, device)
    elif on_meta:
        module.to(device)  # what was not on the meta device


def _gradient_layout(
    module: nn.Module,
    mesh: ParallelMesh,
    cut: Cut | None,
    tensor_parallel: TensorParallel | None,
    shard_root: bool,
) -> GradientLayout:
    names = dict(module.named_parameters())

    def tp_partial() -> list[nn.Parameter]:
        return [] if tensor_parallel is None else [names[name] for name in tensor_parallel.partial_parameters]

    shared = () if cut is None else cut.surroundings.shared
    tied = () if cut is None else cut.tied
    # A sharded root holds what no block does.
    whole = [] if shard_root else [p for p in names.values() if not isinstance(p, DTensor)]
    return GradientLayout(
        mesh=mesh,
        tp_partial=tp_partial,
        pp_shared=[names[name] for name in shared if name in names],
        pp_tied=[names[name] for name in tied if name in names],
        tied_group=mesh.make_tied_group() if tied else None,
        loose=whole if mesh.dp_size > 1 else (),
    )
