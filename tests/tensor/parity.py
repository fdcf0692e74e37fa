# SPDX-License-Identifier: Apache-2.0
"""Training a model on one process and under tensor parallelism, and comparing everything that comes out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_3d.parallel.tensor import TensorParallel, apply_tp

Step = Callable[[nn.Module, Tensor, Tensor], Tensor]
NUM_STEPS = 3


def token_loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def hf_loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return model(input_ids=ids, labels=labels, use_cache=False).loss


@dataclass
class Trace:
    """What training gave."""

    losses: list[float] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    """After the first backward."""
    params: dict[str, Tensor] = field(default_factory=dict)
    """After the last step."""


def full(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    *,
    optimizer: str = "sgd",
    step: Step = token_loss,
    tp: TensorParallel | None = None,
    dp_group: dist.ProcessGroup | None = None,
    num_steps: int = NUM_STEPS,
) -> Trace:
    """A few steps on one batch."""
    optim, trace = make_optimizer(optimizer, model), Trace()
    for index in range(num_steps):
        loss = step(model, *batch)
        loss.backward()
        if tp is not None:
            tp.sum_partial_gradients()
        value = loss.detach().clone()
        if dp_group is not None:
            dist.all_reduce(value, group=dp_group)
            value /= dp_group.size()
        trace.losses.append(float(value))
        if index == 0:
            trace.grads = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        optim.step()
        optim.zero_grad()
    trace.params = {name: full(p) for name, p in model.named_parameters()}
    return trace


def gate_blocks(blocks: Mapping[str, nn.Module], tp: TensorParallel) -> None:
    """Crosses the border of the blocks, as the gates of the engine do."""
    first, *_, last = list(blocks.values())

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (tp.enter_blocks(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": tp.enter_blocks(kwargs["hidden_states"])}

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (tp.exit_blocks(output[0]), *output[1:])
        return tp.exit_blocks(output)

    first.register_forward_pre_hook(enter, with_kwargs=True)
    last.register_forward_hook(leave)


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The longest list of modules, with names."""
    name, found = max(
        ((n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList)),
        key=lambda item: len(item[1]),
    )
    return {f"{name}.{index}": block for index, block in enumerate(found)}


def parallelize(
    model: nn.Module, tp_size: int, *, sequence_parallel: bool, fsdp: bool = False, **options: Any
) -> tuple[TensorParallel, DeviceMesh]:
    """Applies TP over the innermost ranks, and FSDP2 over the others if asked for."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp_size, tp_size), mesh_dim_names=("dp", "tp"))
    blocks = blocks_of(model)
    tp = apply_tp(model, blocks, mesh["tp"], sequence_parallel=sequence_parallel, **options)
    gate_blocks(blocks, tp)
    if fsdp:
        for block in blocks.values():
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return tp, mesh


def train_parallel(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    tp_size: int,
    *,
    sequence_parallel: bool,
    fsdp: bool = False,
    optimizer: str = "sgd",
    step: Step = token_loss,
    num_steps: int = NUM_STEPS,
    **options: Any,
) -> Trace:
    """The body of a rank: shard, then train on this rank's share of the batch."""
    tp, mesh = parallelize(model, tp_size, sequence_parallel=sequence_parallel, fsdp=fsdp, **options)
    group = None
    if fsdp:
        group, (rank, size) = mesh["dp"].get_group(), (mesh["dp"].get_local_rank(), mesh["dp"].size())
        batch = (batch[0].chunk(size)[rank], batch[1].chunk(size)[rank])
    return train(model, batch, optimizer=optimizer, step=step, tp=tp, dp_group=group, num_steps=num_steps)


def compare(trace: Trace, reference: Trace, tolerance: float = 1e-5) -> None:
    """Losses, gradients and parameters agree, each relative to the largest value of its tensor."""
    for got, want in zip(trace.losses, reference.losses, strict=True):
        assert abs(got - want) <= tolerance * max(1.0, abs(want)), (trace.losses, reference.losses)
    _compare_tensors("grad", trace.grads, reference.grads, tolerance)
    _compare_tensors("param", trace.params, reference.params, tolerance)


def _compare_tensors(what: str, got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    errors = {name: _error(got[name], want[name]) for name in got}
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"{what}s differ: {wrong}"


def _error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-3))
