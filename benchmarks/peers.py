# SPDX-License-Identifier: Apache-2.0
"""The same training steps written by hand on torch's own APIs: what an expert would write without this package."""

from collections.abc import Iterator

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from lightning_3d.selfcheck.model import Decoder, DecoderShape

LEARNING_RATE = 1e-3


def make_decoder(shape: DecoderShape) -> Decoder:
    """The model, with the same weights on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Decoder(shape)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """What both sides use."""
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)


def language_loss(logits: Tensor, batch: Tensor) -> Tensor:
    """Cross-entropy of the next token. logits: [B, S, V]; batch: [B, S + 1]."""
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def fsdp_steps(shape: DecoderShape, batches: list[Tensor]) -> Iterator[float]:
    """FSDP2 over all ranks, per block and root. Yields the loss of each step."""
    model = make_decoder(shape)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    _shard(model, mesh)
    yield from _plain_loop(model, batches)


def tp_steps(shape: DecoderShape, batches: list[Tensor]) -> Iterator[float]:
    """Tensor and sequence parallel over 2 ranks, FSDP2 over the rest. Yields the loss of each step."""
    model = make_decoder(shape)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    split_tensors(model, mesh["tp"])
    _shard(model, mesh["dp"])
    with loss_parallel():
        yield from _plain_loop(model, batches)


def split_tensors(model: Decoder, mesh: DeviceMesh) -> None:
    """Torch's own tensor and sequence parallel styles, in place."""
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for block in model.layers:
        assert isinstance(block, nn.Module)
        parallelize_module(
            block,
            mesh,
            {
                "attn_norm": SequenceParallel(),
                "attn": PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                "attn.q_proj": ColwiseParallel(),
                "attn.k_proj": ColwiseParallel(),
                "attn.v_proj": ColwiseParallel(),
                "attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
                "mlp_norm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
        block.attn.num_heads //= mesh.size()  # type: ignore[union-attr, operator]
        block.attn.num_kv_heads //= mesh.size()  # type: ignore[union-attr, operator]


class HalfDecoder(nn.Module):
    """One of two stages of a decoder."""

    def __init__(self, model: Decoder, stage: int) -> None:
        super().__init__()
        half = len(model.layers) // 2
        self.embed = model.embed if stage == 0 else None
        self.layers = model.layers[:half] if stage == 0 else model.layers[half:]
        self.norm, self.head = (model.norm, model.head) if stage == 1 else (None, None)
        self.angles = model.angles

    def forward(self, x: Tensor) -> Tensor:
        """x: ids [B, S] on the first stage, hidden state [B, S, D] on the second."""
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x, self.angles[: x.shape[1]])
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def pipeline_steps(shape: DecoderShape, batches: list[Tensor], num_microbatches: int) -> Iterator[float]:
    """1F1B over 2 stages, FSDP2 over the rest. Yields the loss of each step where the loss is."""
    world_size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("pp", "dp"))
    stage_index = mesh.get_local_rank("pp")
    model = HalfDecoder(make_decoder(shape), stage_index)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    microbatch = batches[0].shape[0] // num_microbatches
    ids = torch.empty(microbatch, shape.sequence_length, dtype=torch.long, device="meta")
    hidden = torch.empty(microbatch, shape.sequence_length, shape.dim, device="meta", requires_grad=True)
    logits = torch.empty(
        microbatch, shape.sequence_length, shape.vocab_size, device="meta", requires_grad=True
    )
    stage = PipelineStage(
        model,
        stage_index,
        2,
        torch.device("cpu"),
        input_args=ids if stage_index == 0 else hidden,
        output_args=hidden if stage_index == 0 else logits,
        group=mesh["pp"].get_group(),
    )
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=language_loss, scale_grads=False)
    optimizer = optimizer_of(model)
    for batch in batches:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if stage_index == 0:
            schedule.step(batch[:, :-1])
        else:
            schedule.step(target=batch, losses=losses)
        optimizer.step()
        yield float(torch.stack(losses).mean()) if losses else 0.0


def _shard(model: Decoder, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _plain_loop(model: nn.Module, batches: list[Tensor]) -> Iterator[float]:
    optimizer = optimizer_of(model)
    for batch in batches:
        optimizer.zero_grad()
        loss = language_loss(model(batch[:, :-1]), batch)
        loss.backward()
        optimizer.step()
        yield float(loss)


class PlainModule(pl.LightningModule):
    """The LightningModule that our side trains, unmodified in every layout."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.model = make_decoder(shape)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """batch: [B, S + 1]."""
        return language_loss(self.model(batch[:, :-1]), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return optimizer_of(self)


class HandParallelModule(PlainModule):
    """What Lightning's ModelParallelStrategy asks of its users: parallelism written into `configure_model`."""

    def configure_model(self) -> None:
        """Tensor parallel, then FSDP2."""
        mesh = self.device_mesh
        assert mesh is not None
        split_tensors(self.model, mesh["tensor_parallel"])
        _shard(self.model, mesh["data_parallel"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """batch: [B, S + 1]."""
        with loss_parallel():
            return language_loss(self.model(batch[:, :-1]), batch)

    def backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        """The sharded loss needs its context in the backward too."""
        with loss_parallel():
            loss.backward()
