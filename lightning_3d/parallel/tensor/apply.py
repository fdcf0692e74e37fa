# SPDX-License-Identifier: Apache-2.0
"""`apply_tp`: tensor and sequence parallelism for a model that does not know of it."""

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_3d.parallel.tensor.context import TensorContext
from lightning_3d.parallel.tensor.gradients import sum_gradients
from lightning_3d.parallel.tensor.heads import divide_attributes
from lightning_3d.parallel.tensor.layers import (
    BlockScope,
    ColumnLinear,
    LinearShard,
    LocalParameters,
    RowLinear,
    ShardedInput,
    WholeSequence,
)
from lightning_3d.parallel.tensor.mixing import check_forward, first_argument, mix_in, mix_in_layer
from lightning_3d.parallel.tensor.narrow import reads_width
from lightning_3d.parallel.tensor.parameters import ParameterSharder
from lightning_3d.parallel.tensor.region import draws_random_numbers
from lightning_3d.parallel.tensor.sharding import (
    ModuleSharding,
    ShardingPlan,
    ShardingPlanner,
    config_of,
    gather_facts,
)
from lightning_3d.parallel.tensor.vocab_shard import VocabShard
from lightning_3d.parallel.tensor.vocabulary import VocabEmbedding, VocabHead
from lightning_3d.tp_styles import ResolvedStyles, TpStyle, resolve_styles


class TensorParallel:
    """A model under tensor parallelism: the borders of its blocks and its partial gradients."""

    def __init__(
        self, model: nn.Module, context: TensorContext, plan: ShardingPlan, partial: Collection[str]
    ) -> None:
        self.plan = plan
        """What became of each module."""
        self._model, self._context = model, context
        self._partial = set(partial)

    @property
    def sequence_parallel(self) -> bool:
        """Whether the blocks work on shards of the sequence."""
        return self._context.sequence_parallel

    @property
    def partial_parameters(self) -> list[str]:
        """Names of parameters whose gradients must be summed over tp.

        Without sequence parallelism they are known after a forward, which shows what works on sharded activations.
        """
        seen = self._context.partial_modules
        return [
            name
            for name, _ in self._model.named_parameters()
            if name in self._partial or name.rpartition(".")[0] in seen
        ]

    def enter_blocks(self, hidden: Tensor) -> Tensor:
        """Hidden state before the first block [B, S, D], replicated -> what the blocks take."""
        return self._context.enter_blocks(hidden)

    def exit_blocks(self, hidden: Tensor) -> Tensor:
        """What the last block gave -> [B, S, D], replicated."""
        return self._context.exit_blocks(hidden)

    def expect_sequence(self, length: int) -> None:
        """Tells a pipeline stage that does not enter the blocks itself the length S of the whole sequence.

        Only needed where tp does not divide S: the padding is then cut off. `enter_blocks` does it by itself.
        """
        self._context.sequence_length = length

    def local_hidden_shape(self, shape: Iterable[int]) -> torch.Size:
        """Shape of the hidden state between blocks, given its shape [B, S, ...] outside of them."""
        batch, length, *rest = shape
        part = -(-length // self._context.size) if self.sequence_parallel else length
        return torch.Size([batch, part, *rest])

    def sum_partial_gradients(self, params: Iterable[Tensor] | None = None) -> None:
        """Sums the gradients of `params`, by default of `partial_parameters`, over tp; once per optimizer step."""
        if params is None:
            names = set(self.partial_parameters)
            params = [parameter for name, parameter in self._model.named_parameters() if name in names]
        sum_gradients(params, self._context.group)


def resolve_tp(
    model: nn.Module,
    blocks: Collection[str],
    tp_size: int,
    styles: Mapping[str, str | TpStyle] | None = None,
) -> ResolvedStyles:
    """Decides and checks the style of every module of a whole model, before a pipeline cuts it; sends nothing.

    Args:
        model: the model, or the LightningModule around it.
        blocks: names of the repeated layers.
        tp_size: number of tp ranks.
        styles: `fnmatch` pattern on module names -> style, before those of a Hugging Face config and the table.

    Returns:
        Styles to give to `apply_tp` for each stage.

    Raises:
        ModelError: the model cannot be sharded like this.
    """
    config = config_of(model)
    resolved = resolve_styles(
        [name for name, _ in model.named_modules()],
        gather_facts(model, blocks),
        user=styles,
        config_plan=config.base_model_tp_plan if config is not None else None,
    )
    ShardingPlanner(model, blocks, resolved, tp_size, 0).plan()
    return resolved


def apply_tp(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    tp_mesh: DeviceMesh,
    styles: Mapping[str, str | TpStyle] | None = None,
    *,
    sequence_parallel: bool,
    head_attributes: Collection[str] = (),
) -> TensorParallel:
    """Shards a model over the tp mesh, in place; names of parameters stay.

    Args:
        model: the model, or the LightningModule around it; the same on all ranks but for its values, which are taken
            from tp rank 0.
        blocks: name -> block, the repeated layers in order. Outside of them all activations are replicated.
        tp_mesh: a mesh of one dim.
        styles: `fnmatch` pattern on module names -> style, or what `resolve_tp` gave for the whole model, of which
            `model` may be a stage.
        sequence_parallel: whether the blocks work on shards of the sequence.
        head_attributes: further integer attributes of attention modules to divide by tp.

    Returns:
        The borders for the gates of the blocks and the gradients to sum.

    Raises:
        ModelError: the model cannot be sharded like this; on all ranks, before any of them sends anything.
    """
    group = tp_mesh.get_group()
    if not isinstance(styles, ResolvedStyles):
        styles = resolve_tp(model, blocks, group.size(), styles)
    chosen = _present(styles, model, blocks)
    plan = ShardingPlanner(model, blocks, chosen, group.size(), group.rank()).plan()
    random = any(draws_random_numbers(block.modules()) for block in blocks.values())
    context = TensorContext(tp_mesh, sequence_parallel=sequence_parallel, random=random)
    applier = _Applier(model, blocks, context, plan, chosen)
    applier.check()
    applier.place_parameters(ParameterSharder(tp_mesh))
    applier.swap_classes()
    for name, layout in plan.heads.items():
        divide_attributes(model.get_submodule(name), layout, context.size, head_attributes)
    return TensorParallel(model, context, plan, applier.partial_parameters())


def _present(styles: ResolvedStyles, model: nn.Module, blocks: Collection[str]) -> dict[str, TpStyle]:
    """The styles of modules that this stage has; in place of others there may be stand-ins without parameters."""
    facts = gather_facts(model, blocks)
    return {name: style for name, style in styles.items() if name in facts}


class _Applier:
    """Carries out a `ShardingPlan`."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        context: TensorContext,
        plan: ShardingPlan,
        styles: Mapping[str, TpStyle],
    ) -> None:
        self._model, self._blocks, self._context = model, blocks, context
        self._plan, self._styles = plan, styles
        self._modules = dict(model.named_modules())

    def check(self) -> None:
        """Raises if a module cannot be changed; nothing has been yet."""
        for name, module in self._modules.items():
            owns = bool(module._parameters) and self._is_localised(name, module)
            if owns or name in self._plan.inputs or name in self._blocks:
                check_forward(module, name)

    def place_parameters(self, sharder: ParameterSharder) -> None:
        """Shards and replicates parameters; gives buffers the values of tp rank 0."""
        for name, module in self._modules.items():
            sharding = self._plan.modules.get(name)
            for key in list(module._parameters):
                if sharding is None:
                    self._place_whole(sharder, name, module, key)
                else:
                    sharder.place(module, key, sharding.weight_dim if key == "weight" else sharding.bias_dim)
            for buffer in module._buffers.values():
                if buffer is not None:
                    sharder.synchronize(buffer)

    def _place_whole(self, sharder: ParameterSharder, name: str, module: nn.Module, key: str) -> None:
        parameter = module._parameters[key]
        if parameter is None:
            return
        if self._is_localised(name, module):
            sharder.place(module, key, None)
        else:
            sharder.synchronize(parameter.data)

    def _is_localised(self, name: str, module: nn.Module) -> bool:
        """Whether a module's replicated parameters are DTensors.

        Those of a container outside the blocks stay plain: its parameters may be used by any of its methods, not by
        its forward alone.
        """
        return self._block_of(name) != "" or not any(True for _ in module.children())

    def _block_of(self, name: str) -> str:
        return next((block for block in self._blocks if name == block or name.startswith(f"{block}.")), "")

    def swap_classes(self) -> None:
        """Mixes the sharded forwards into the modules."""
        for name, module in self._modules.items():
            sharding = self._plan.modules.get(name)
            if sharding is not None:
                self._swap_sharded(name, module, sharding)
            elif any(isinstance(value, DTensor) for value in module._parameters.values()):
                mix_in(module, LocalParameters)
                heads = self._plan.heads.get(name)
                owners = self._owners(name, module)
                module.__dict__["_local_parameters"] = (
                    self._context,
                    name,
                    owners,
                    heads.num_heads if heads else -1,
                )
            if name in self._plan.inputs:
                first = first_argument(module)
                narrow = name in self._plan.heads and reads_width(module, first)
                mix_in(module, ShardedInput)
                module.__dict__["_sharded_input"] = (self._context, first, narrow)
        for name, block in self._blocks.items():
            self._swap_block(name, block)

    def _owners(self, name: str, module: nn.Module) -> list[nn.Module]:
        """Whose parameters the forward of a module may read: its own and, but for blocks, its children's."""
        inside = [module] if name in self._blocks else module.modules()
        sharded = {id(self._modules[key]) for key in self._plan.modules}
        return [child for child in inside if id(child) not in sharded]

    def _swap_sharded(self, name: str, module: nn.Module, sharding: ModuleSharding) -> None:
        if sharding.kind in ("vocab_embedding", "vocab_head"):
            mix_in_layer(module, VocabEmbedding if sharding.kind == "vocab_embedding" else VocabHead)
            weight = module._parameters["weight"]
            assert weight is not None  # the plan was made from it
            module.__dict__["_vocab_shard"] = VocabShard(self._context.group, weight.shape[0])
            return
        mixin = ColumnLinear if sharding.kind == "column" else RowLinear
        mix_in_layer(module, mixin)
        module.__dict__["_linear_shard"] = LinearShard(
            context=self._context,
            transposed=sharding.transposed,
            own_input=name in self._plan.own_inputs,
            parts=sharding.parts,
        )

    def _swap_block(self, name: str, block: nn.Module) -> None:
        mix_in(block, BlockScope)
        block.__dict__["_block_scope"] = self._context
        if not self._context.sequence_parallel:
            return
        for key, child in block.named_children():
            if self._needs_whole_sequence(f"{name}.{key}", child):
                first = first_argument(child)
                mix_in(child, WholeSequence)
                child.__dict__["_whole_sequence"] = (self._context, first)

    def _needs_whole_sequence(self, name: str, module: nn.Module) -> bool:
        """A child of a block that nothing shards, and that is more than a layer which works token by token."""
        if any(key == name or key.startswith(f"{name}.") for key in self._plan.modules):
            return False
        if isinstance(module, nn.Linear):
            return False
        return any(parameter.dim() > 1 for parameter in module.parameters())

    def partial_parameters(self) -> set[str]:
        """Replicated parameters whose gradients are known to be partial."""
        names: set[str] = set()
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            owner = name.rpartition(".")[0]
            sharding, style = self._plan.modules.get(owner), self._styles.get(owner)
            if self._block_of(owner) == "" or not isinstance(parameter, DTensor) or _is_sharded(parameter):
                continue
            if (
                self._context.sequence_parallel
                or (sharding and sharding.parts)
                or (style and style.kind == "partial")
            ):
                names.add(name)
        return names


def _is_sharded(parameter: DTensor) -> bool:
    return any(placement.is_shard() for placement in parameter.placements)
