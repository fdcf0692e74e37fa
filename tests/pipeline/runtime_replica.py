# SPDX-License-Identifier: Apache-2.0
"""A small model, cut into stages and put on a `PipelineRunner`, and the same model in one process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_3d.pipeline.runtime import PipelineRunner, RunReport
from lightning_3d.schedules import Schedule, schedule_for_batch, stage_placement

NUM_BLOCKS, WIDTH, VOCAB, SEQ, NUM_ROWS = 4, 8, 11, 5, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """embedding -> blocks -> norm, head; `keep` cuts it to some blocks without renaming anything."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(NUM_BLOCKS)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def cut(self, stages: list[int], num_stages: int) -> None:
        kept = {str(i) for stage in stages for i in blocks_of(stage, num_stages)}
        for name in list(self.blocks):
            if name not in kept:
                del self.blocks[name]
        if 0 not in stages:
            del self.embedding
        if num_stages - 1 not in stages:
            del self.norm, self.head

    def forward(
        self,
        x: Tensor,
        targets: Tensor,
        blocks: range = range(NUM_BLOCKS),
        first: bool = True,
        last: bool = True,
        hold: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Tokens or hidden state -> hidden state or loss; `hold` is applied between the blocks and what follows."""
        h = self.embedding(x) if first else x
        for i in blocks:
            h = self.blocks[str(i)](h)
        h = h if hold is None else hold(h)
        if not last:
            return h
        return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), targets.flatten())


def blocks_of(stage: int, num_stages: int) -> range:
    per_stage = NUM_BLOCKS // num_stages
    return range(stage * per_stage, (stage + 1) * per_stage)


class StageModule(nn.Module):
    """What the engine hands to the runner: it calls the one root of the rank, which it does not contain."""

    def __init__(self, replica: "Replica", stage: int) -> None:
        super().__init__()
        self._replica, self._stage = replica, stage

    def forward(self, hidden: Tensor, microbatch: int) -> Tensor:
        replica = self._replica
        tokens, targets, num_parts = replica.microbatch(microbatch)
        first, last = self._stage == 0, self._stage == replica.num_stages - 1
        blocks = blocks_of(self._stage, replica.num_stages)
        hold = None if replica.hold is None else partial(replica.hold, self._stage, microbatch)
        output = replica.model(tokens if first else hidden, targets, blocks, first, last, hold)
        if not last:
            return output
        loss = output / num_parts * replica.scale
        replica.evaluated.append(loss.detach())
        return loss


@dataclass
class Replica:
    """One rank's part of a pipeline for the tests."""

    name: str
    v: int | None
    num_microbatches: int
    pp: int = 2
    dp: int = 1
    replicate: int = 1
    reduce_dtype: torch.dtype | None = None
    frozen: bool = False
    reshard_after_forward: bool = True
    reshard_after_backward: bool = False
    exclusive: bool = True
    own_root: bool = False
    num_rows: int = NUM_ROWS
    split: int = 1
    hold: Callable[[int, int, Tensor], Tensor] | None = None
    scale: Tensor | float = 1.0
    mesh: DeviceMesh = field(init=False)

    def __post_init__(self) -> None:
        sizes, names = (self.pp, self.replicate, self.dp), ("pp", "replicate", "dp")
        self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        self.data_rank = self.mesh["replicate"].get_local_rank() * self.dp + self.mesh["dp"].get_local_rank()
        placement = stage_placement(self.name, num_ranks=self.pp, virtual_stages=self.v)
        self.num_stages = len(placement)
        # The last stage of looped placements is on group rank 0, as in the engine.
        self.owners = {stage: self.pp - 1 - rank for stage, rank in enumerate(placement)}
        self.stages = [s for s, owner in self.owners.items() if owner == self.mesh["pp"].get_local_rank()]
        self.model = Model()
        freeze(self.model, self.frozen)
        self.model.cut(self.stages, self.num_stages)
        if self.dp > 1:
            mesh = self.mesh["replicate", "dp"] if self.replicate > 1 else self.mesh["dp"]
            policy = MixedPrecisionPolicy(reduce_dtype=self.reduce_dtype)
            for block in self.model.blocks.values():
                fully_shard(
                    block, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard_after_forward
                )
            fully_shard(self.model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self.start = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.batch: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        modules = {s: StageModule(self, s) for s in self.stages}
        blocks = {s: [self.model.blocks[str(i)] for i in blocks_of(s, self.num_stages)] for s in self.stages}
        self.runner = PipelineRunner(
            stages=modules,
            num_stages=self.num_stages,
            group=self.mesh.get_group("pp"),
            stage_to_group_rank=self.owners,
            device=torch.device("cpu"),
            fsdp_root=None if self.own_root else self.model,
            fsdp_modules=blocks if self.exclusive and not self.own_root else None,
            reshard_after_backward=self.reshard_after_backward,
        )
        if self.own_root:  # the stage module contains the sharded root, as in a pipeline made by hand
            modules[self.stages[0]].inside = self.model

    def reset(self, split: int) -> None:
        """Back to the first weights, for `split` runs per optimizer step."""
        self.split = split
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.start[name])
        self.model.zero_grad()

    def schedule(self, num_microbatches: int | None = None) -> Schedule:
        return schedule_for_batch(
            self.name,
            num_ranks=self.pp,
            num_microbatches=num_microbatches or self.num_microbatches,
            virtual_stages=self.v,
        )

    def microbatch(self, index: int) -> tuple[Tensor, Tensor, int]:
        parts = [t.chunk(self.num_parts)[index] for t in self.batch]
        return parts[0], parts[1], self.num_parts * self.split

    def run(
        self, step: int, *, num_microbatches: int | None = None, seq: int = SEQ, **kwargs: Any
    ) -> RunReport:
        self.num_parts = num_microbatches or self.num_microbatches
        self.evaluated: list[Tensor] = []
        whole = batch_of(step, seq, self.num_rows)
        self.batch = tuple(t.chunk(self.replicate * self.dp)[self.data_rank] for t in whole)  # type: ignore[assignment]
        rows = len(self.batch[0]) // self.num_parts
        return self.runner.run(
            self.schedule(num_microbatches), hidden=((rows, seq, WIDTH), torch.float32), **kwargs
        )


def freeze(model: Model, frozen: bool) -> None:
    if frozen:
        model.embedding.requires_grad_(False)
        model.blocks["0"].requires_grad_(False)
        model.blocks["1"].requires_grad_(False)


def batch_of(step: int, seq: int = SEQ, rows: int = NUM_ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randint(0, VOCAB, (rows, seq), generator=generator) for _ in range(2))  # type: ignore[return-value]


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad] or [nn.Parameter(torch.zeros(1))]
    return torch.optim.SGD(trained, lr=0.1) if kind == "sgd" else torch.optim.AdamW(trained, lr=1e-2)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reference(
    kind: str, accumulate: int, frozen: bool, num_steps: int, rows: int = NUM_ROWS
) -> list[dict[str, Tensor]]:
    """Gradients of the last step and parameters after it, in one process."""
    model = Model()
    freeze(model, frozen)
    optimizer = optimizer_of(kind, model)
    for step in range(num_steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            (model(*batch_of(10 * step + part, rows=rows)) / accumulate).backward()
        optimizer.step()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return [gradients, {n: p.detach() for n, p in model.named_parameters()}]
