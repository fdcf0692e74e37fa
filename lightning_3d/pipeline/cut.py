# SPDX-License-Identifier: Apache-2.0
"""Cutting a model: a rank keeps the parameters of its stages and drops the others, names unchanged.

What surrounds the blocks is sorted into three: modules before the blocks belong to the first stage, modules behind
them to the last, and parameters that hang on a container of these (or on the LightningModule, outside the model) are
held by every stage and their gradients added up.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.errors import ModelError, StepError
from lightning_3d.parallel.absent import AbsentTensor
from lightning_3d.parallel.blocks import Blocks
from lightning_3d.parallel.gate import gate_of
from lightning_3d.parallel.stand_ins import run_on_meta
from lightning_3d.pipeline.balance import balance_stages
from lightning_3d.pipeline.order import modules_before_blocks


@dataclass(frozen=True)
class Surroundings:
    """Parameterised modules outside the blocks, and the parameters every stage holds."""

    first: tuple[str, ...]
    """Names of modules that run before the blocks."""
    last: tuple[str, ...]
    """Names of modules that run behind the blocks."""
    shared: tuple[str, ...]
    """Names of parameters that all stages hold."""


@dataclass(frozen=True)
class Cut:
    """Which blocks each stage runs, and what the ranks of a replica have in common."""

    stages: tuple[range, ...]
    """Block indices of each stage."""
    surroundings: Surroundings
    num_parameters: tuple[int, ...]
    """Parameters of each stage, a tied embedding counted on both."""
    tied: tuple[str, ...]
    """Names of parameters that both the first and the last stage use (tied embeddings)."""
    twins: tuple[nn.Module, ...]
    """Meta copies of all blocks, for shapes."""


def survey(
    root: nn.Module, blocks: Blocks, first: tuple[str, ...] = (), last: tuple[str, ...] = ()
) -> Surroundings:
    """Sorts what surrounds the blocks: into what runs before them and what runs behind them.

    A trial run tells, where the model runs on token ids; elsewhere the order of definition does.

    Args:
        root: the LightningModule.
        blocks: its blocks.
        first: names of modules to put on the first stage whatever the order of definition.
        last: names of modules to put on the last stage. A module in both runs before and behind the blocks: every
            stage holds it.

    Raises:
        ModelError: `first` or `last` names no such module.
    """
    found: dict[str, str] = {}
    shared: list[str] = []
    path = blocks.name.split(".")
    for depth in range(len(path)):
        container = root.get_submodule(".".join(path[:depth]))
        prefix = "".join(f"{part}." for part in path[:depth])
        shared += [prefix + name for name, _ in container.named_parameters(recurse=False)]
        side = "first"
        for name, child in container.named_children():
            if name == path[depth]:
                side = "last"
            elif next(child.parameters(), None) is None:
                continue
            elif depth == 0 and len(path) > 1:  # beside the model, not inside: used before, behind or both
                shared += [f"{name}.{key}" for key, _ in child.named_parameters()]
            else:
                found[prefix + name] = side
    before = modules_before_blocks(root, blocks, found)
    if before is not None:
        found = {name: "first" if name in before else "last" for name in found}
    for names, side in ((first, "first"), (last, "last")):
        for name in names:
            if name not in found:
                raise ModelError(
                    f"{side}_stage_modules names {name!r}, which is not a module beside the blocks"
                    f" {blocks.name!r}. Choose among: {', '.join(found) or 'none'}."
                )
            found[name] = side
    # What runs before and behind the blocks is held by every stage. In one order on all ranks, which a set has not:
    # their gradients are added up as one flat tensor.
    for name in dict.fromkeys(name for name in first if name in last):
        del found[name]
        shared += [f"{name}.{key}" for key, _ in root.get_submodule(name).named_parameters()]
    return Surroundings(
        tuple(name for name, side in found.items() if side == "first"),
        tuple(name for name, side in found.items() if side == "last"),
        tuple(shared),
    )


def plan_cut(root: nn.Module, blocks: Blocks, num_stages: int, surroundings: Surroundings) -> Cut:
    """Divides the blocks by cost and copies their structure to the meta device. Changes nothing.

    The cost of a module is its number of parameters: the memory of its state, and for linear layers its arithmetic.
    A head tied to the embedding is counted on both sides.

    Raises:
        PlanError: more stages than blocks.
    """
    costs = [_num_parameters(block) for block in blocks.modules]
    first_cost = sum(_num_parameters(root.get_submodule(name)) for name in surroundings.first)
    last_cost = sum(_num_parameters(root.get_submodule(name)) for name in surroundings.last)
    stages = balance_stages(costs, num_stages, first_cost=first_cost, last_cost=last_cost)
    totals = [sum(costs[index] for index in stage) for stage in stages]
    totals[0] += first_cost
    totals[-1] += last_cost
    first = _parameters_by_identity(root, surroundings.first)
    last = _parameters_by_identity(root, surroundings.last)
    _check_shared_weights(blocks, stages, first, last)
    tied = tuple(first[key] for key in first if key in last)
    twins = tuple(_meta_twin(block) for block in blocks.modules)
    return Cut(tuple(stages), surroundings, tuple(totals), tied, twins)


def _check_shared_weights(
    blocks: Blocks, stages: list[range], first: dict[int, str], last: dict[int, str]
) -> None:
    """Refuses weights that would become a copy on each of several stages, trained apart."""
    users: dict[int, set[int]] = {key: {0} for key in first}
    for key in last:
        users.setdefault(key, set()).add(len(stages) - 1)
    for stage, indices in enumerate(stages):
        for index in indices:
            for name, parameter in blocks.modules[index].named_parameters():
                holders = users.setdefault(id(parameter), set())
                holders.add(stage)
                if len(holders) > 1 and not (id(parameter) in first and id(parameter) in last):
                    raise ModelError(
                        f"Parameter {name!r} of block {index} is shared between pipeline stages {sorted(holders)}."
                        " Only the first and the last stage may share a weight (tied embeddings)."
                        " Use pp=1, or untie it."
                    )


def apply_cut(root: nn.Module, blocks: Blocks, cut: Cut, local_stages: list[int]) -> None:
    """Drops the parameters of other ranks' stages from `root`, in place.

    Args:
        root: the LightningModule.
        blocks: its blocks.
        cut: from `plan_cut`.
        local_stages: stages that this rank keeps.
    """
    holds_first, holds_last = 0 in local_stages, len(cut.stages) - 1 in local_stages
    keep = {id(root.get_parameter(name)) for name in cut.tied} if holds_first or holds_last else set()
    kept_blocks = {index for stage in local_stages for index in cut.stages[stage]}
    for index, block in enumerate(blocks.modules):
        if index not in kept_blocks:
            _drop_state(block, blocks.name, keep=set())
    if not holds_first:
        for name in cut.surroundings.first:
            _stand_in(root.get_submodule(name), name, keep, blocks.modules[0])
    if not holds_last:
        for name in cut.surroundings.last:
            _forbid(root.get_submodule(name), name, keep, blocks.modules[0])


class _Elsewhere:
    """Mixed into the class of a module whose parameters live on another stage."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name, twin, block = self.__dict__["_elsewhere"]
        if not gate_of(block).is_running:
            raise StepError(
                f"Module {name!r} is on another pipeline stage and was called outside a step. Call the model in"
                " training_step, validation_step, test_step or predict_step only, or use pp=1."
            )
        if twin is None:
            raise ModelError(
                f"Module {name!r} is held by the last pipeline stage but was called before the blocks."
                f" Name it in the strategy's first_stage_modules=({name!r},)."
            )
        if gate_of(block).is_behind_blocks:  # zeros would pass for its output, and the loss would be of them
            raise ModelError(
                f"Module {name!r} is held by the first pipeline stage but was called behind the blocks."
                f" Name it in the strategy's last_stage_modules=({name!r},), and in first_stage_modules too if it also"
                " runs before them."
            )
        return gate_of(block).stand_in_for(run_on_meta(twin, args, kwargs, device=_device_of(args, kwargs)))


def _stand_in(module: nn.Module, name: str, keep: set[int], block: nn.Module) -> None:
    """Makes a module of the first stage answer with zeros of the right shape."""
    _mark(module, name, _meta_twin(module), block)
    _drop_state(module, name, keep)


def _forbid(module: nn.Module, name: str, keep: set[int], block: nn.Module) -> None:
    """Makes a call of a module of the last stage an error that names the remedy."""
    _mark(module, name, None, block)
    _drop_state(module, name, keep)


def _mark(module: nn.Module, name: str, twin: nn.Module | None, block: nn.Module) -> None:
    cls = type(module)
    module.__class__ = type(
        cls.__name__, (_Elsewhere, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__}
    )
    module.__dict__["_elsewhere"] = (name, twin, block)


def _drop_state(module: nn.Module, module_name: str, keep: set[int]) -> None:
    """Unregisters parameters and buffers, except parameters whose identity is in `keep`.

    In a parameter's place stays something that has its shape and dtype, which models ask for.
    """
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in keep:
                delattr(child, name)
                child.__dict__[name] = AbsentTensor.of_parameter(parameter, module_name)
        for name, _ in list(child.named_buffers(recurse=False)):
            delattr(child, name)


def _meta_twin(module: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are on the meta device, made without copying their data."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        meta = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = (
            nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
        )
    return copy.deepcopy(module, memo)


def _parameters_by_identity(root: nn.Module, names: tuple[str, ...]) -> dict[int, str]:
    return {
        id(parameter): f"{name}.{key}"
        for name in names
        for key, parameter in root.get_submodule(name).named_parameters()
    }


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device
    return torch.device("cpu")
