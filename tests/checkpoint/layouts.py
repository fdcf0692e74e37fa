# SPDX-License-Identifier: Apache-2.0
"""A small model in every layout that a checkpoint meets, on hand-made meshes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import SGD, AdamW, Optimizer

VOCAB, WIDTH, HIDDEN, LAYERS = 61, 12, 10, 2
"""Vocabulary and hidden size do not divide evenly over 4 ranks."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))  # has no dim to shard
        self.register_buffer("seen", torch.zeros(3))


class LanguageModel(nn.Module):
    """Never called: gradients are made from names, so that every layout has the same."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@dataclass(frozen=True)
class Layout:
    """Degrees; the world is their product."""

    name: str
    pp: int = 1
    replicate: int = 1
    shard: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.replicate * self.shard * self.tp


LAYOUTS = (
    Layout("one"),
    Layout("dp2", shard=2),
    Layout("tp2", tp=2),
    Layout("pp2", pp=2),
    Layout("hsdp2x2", replicate=2, shard=2),
    Layout("dp2tp2", shard=2, tp=2),
    Layout("tp4", tp=4),
)
TRAINED = ("embed", "blocks", "head")
TP_SHARDS = {"embed.weight": 0, "head.weight": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1}


def build(
    layout: Layout, optimizer: str = "adamw", *, tied: bool = False, seed: int = 0
) -> tuple[nn.Module, list[Optimizer]]:
    """The model of this rank and its optimizers, freshly initialised; needs a process group if world_size > 1."""
    torch.manual_seed(seed)
    model = LanguageModel(tied=tied)
    if layout.world_size > 1:
        mesh = _mesh(layout)
        if layout.pp > 1:
            _cut(model, mesh.get_local_rank("pp"), layout.pp, tied=tied)
        if layout.tp > 1:
            _apply_tp(model, mesh["tp"])
        if layout.shard > 1 or layout.replicate > 1:
            _apply_fsdp(model, mesh["replicate", "shard"] if layout.replicate > 1 else mesh["shard"])
    return model, optimizers_of(model, optimizer)


@lru_cache
def _mesh(layout: Layout) -> DeviceMesh:
    shape = (layout.pp, layout.replicate, layout.shard, layout.tp)
    return init_device_mesh("cpu", shape, mesh_dim_names=("pp", "replicate", "shard", "tp"))


def _cut(model: LanguageModel, stage: int, stages: int, *, tied: bool) -> None:
    """Leaves a stage's own modules, under their names; `unused` is small and lives everywhere."""
    for layer in range(LAYERS):
        if layer * stages // LAYERS != stage:
            del model.blocks._modules[str(layer)]
    if stage != 0 and not tied:
        del model.embed
    if stage != 0 and tied:
        del model.frozen
    if stage != stages - 1:
        del model.head


def _apply_tp(model: nn.Module, mesh: DeviceMesh) -> None:
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            full = f"{module_name}.{name}"
            dim = next((dim for end, dim in TP_SHARDS.items() if full.endswith(end)), None)
            if dim is not None and not isinstance(parameter, DTensor):
                placed = nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(dim)]))
                setattr(module, name, placed)


def _apply_fsdp(model: LanguageModel, mesh: DeviceMesh) -> None:
    scales = {block.scale for block in model.blocks}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, ignored_params=scales)
    fully_shard(model, mesh=mesh, ignored_params=scales)


def optimizers_of(model: nn.Module, kind: str) -> list[Optimizer]:
    """Two groups that cut across stages, and (for `two`) two optimizers; empty groups where a stage has nothing."""
    trained = [(name, p) for name, p in model.named_parameters() if not name.startswith("frozen")]
    matrices = [p for _, p in trained if p.dim() > 1]
    vectors = [p for _, p in trained if p.dim() < 2]
    if kind == "sgd":
        return [SGD([{"params": matrices, "lr": 0.1}, {"params": vectors, "lr": 0.2}], momentum=0.9)]
    if kind == "plain_sgd":
        return [SGD([{"params": matrices, "lr": 0.1}, {"params": vectors, "lr": 0.2}])]
    if kind == "two":
        return [AdamW([{"params": vectors}], lr=0.01), SGD([{"params": matrices}], lr=0.1, momentum=0.9)]
    return [AdamW([{"params": matrices, "lr": 0.01}, {"params": vectors, "lr": 0.02, "weight_decay": 0.0}])]


def train(model: nn.Module, optimizers: Sequence[Optimizer], steps: Sequence[int]) -> None:
    """Steps with gradients that depend on name and step only; `unused` gets none."""
    for step in steps:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name.startswith(TRAINED):
                parameter.grad = like(parameter, _noise(name, parameter.shape, step))
        for name, buffer in model.named_buffers():
            buffer.copy_(_noise(name, buffer.shape, step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _noise(name: str, shape: Sequence[int], step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()) * 1000 + step)
    return torch.randn(tuple(shape), generator=generator)


def like(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The part of a whole tensor that a parameter holds, placed like it."""
    if not isinstance(parameter, DTensor):
        return whole.to(parameter.dtype)
    from lightning_3d.checkpoint.shards import sharded

    local = torch.zeros_like(parameter)
    for piece in sharded("", local).pieces:
        box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.local.shape, strict=True))
        piece.local.copy_(whole[box])
    return local


def whole_state(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Model and optimizer state of all ranks as full plain tensors; collective."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    mine: dict[str, Any] = {f"model.{name}": _pieces(tensor) for name, tensor in model.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = f"optimizer{number}.{names[id(parameter)]}"
                mine[f"{name}.hyper"] = {k: v for k, v in group.items() if k != "params"}
                for key, value in optimizer.state.get(parameter, {}).items():
                    mine[f"{name}.{key}"] = _pieces(value) if isinstance(value, torch.Tensor) else value
    parts: list[dict[str, Any]] = [mine]
    if dist.is_initialized():
        parts = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, mine)
    keys = {key for part in parts for key in part}
    return {key: _joined([part[key] for part in parts if key in part]) for key in sorted(keys)}


def _pieces(tensor: torch.Tensor) -> Any:
    from lightning_3d.checkpoint.shards import sharded

    description = sharded("", tensor)
    return (tuple(tensor.shape), tensor.dtype, [(p.offsets, p.local.clone()) for p in description.pieces])


def _joined(parts: Sequence[Any]) -> Any:
    if not isinstance(parts[0], tuple):
        assert all(part == parts[0] for part in parts)
        return parts[0]
    shape, dtype, _ = parts[0]
    whole = torch.full(shape, float("nan")).to(dtype)
    for _, _, pieces in parts:
        for offsets, local in pieces:
            whole[tuple(slice(o, o + n) for o, n in zip(offsets, local.shape, strict=True))] = local
    return whole


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit equality of two whole states."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype, key
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value, key
