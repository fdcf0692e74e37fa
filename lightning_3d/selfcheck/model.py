# SPDX-License-Identifier: Apache-2.0
"""A small decoder in plain PyTorch and an ordinary LightningModule around it: nothing here knows of parallelism."""

from dataclasses import dataclass

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """Dimensions small enough for a laptop, divisible enough for eight ranks on any axis."""

    vocab_size: int = 64
    dim: int = 32
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 2
    ffn_dim: int = 64
    sequence_length: int = 16
    tied: bool = False


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions: [B, S, D] -> [B, S, D]."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = shape.num_heads, shape.num_kv_heads
        self.head_dim = shape.dim // shape.num_heads
        self.q_proj = nn.Linear(shape.dim, shape.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.dim, shape.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.dim, shape.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * self.head_dim, shape.dim, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [B, S, D]; positions: [S, head_dim / 2] angles."""
        batch, length, _ = x.shape
        q = rotate(self.q_proj(x).view(batch, length, self.num_heads, self.head_dim), positions)
        k = rotate(self.k_proj(x).view(batch, length, self.num_kv_heads, self.head_dim), positions)
        v = self.v_proj(x).view(batch, length, self.num_kv_heads, self.head_dim)
        repeats = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU: [B, S, D] -> [B, S, D]."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.up_proj = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.down_proj = nn.Linear(shape.ffn_dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Pre-norm attention and feed-forward: [B, S, D] -> [B, S, D]."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(shape.dim)
        self.attn = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.dim)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [B, S, D]."""
        x = x + self.attn(self.attn_norm(x), positions)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """ids [B, S] -> logits [B, S, V]."""

    angles: Tensor

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight
        angles = torch.outer(
            torch.arange(shape.sequence_length),
            10000.0 ** -torch.linspace(0, 1, shape.dim // shape.num_heads // 2),
        )
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [B, S]."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.angles[: ids.shape[1]])
        return self.head(self.norm(x))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of x [B, S, heads, head_dim] by angles [S, head_dim / 2]."""
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)


class LanguageModel(pl.LightningModule):
    """Next-token prediction, as anyone would write it."""

    def __init__(self, shape: DecoderShape, optimizer: str) -> None:
        super().__init__()
        self.model = Decoder(shape)
        self._optimizer = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """batch: [B, S + 1] token ids."""
        logits = self.model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD shows every constant factor; AdamW's eps is large enough not to amplify rounding of tiny gradients."""
        if self._optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class Tokens(Dataset[Tensor]):
    """Fixed random token ids: [S + 1] each."""

    def __init__(self, num_samples: int, shape: DecoderShape) -> None:
        generator = torch.Generator().manual_seed(1)
        self._ids = torch.randint(
            0, shape.vocab_size, (num_samples, shape.sequence_length + 1), generator=generator
        )

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Tensor:
        return self._ids[index]


class TokenData(pl.LightningDataModule):
    """Batches of token ids [batch / replicas, S + 1], in a fixed order (Lightning's own sampler would shuffle them)."""

    def __init__(self, num_samples: int, global_batch: int, shape: DecoderShape) -> None:
        super().__init__()
        self._tokens, self._global_batch = Tokens(num_samples, shape), global_batch

    def train_dataloader(self) -> "DataLoader[Tensor]":
        """Every replica reads every n-th sample."""
        assert self.trainer is not None
        where = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler: DistributedSampler[Tensor] = DistributedSampler(self._tokens, shuffle=False, **where)
        return DataLoader(
            self._tokens, batch_size=self._global_batch // where["num_replicas"], sampler=sampler
        )
