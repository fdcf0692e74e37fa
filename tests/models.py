# SPDX-License-Identifier: Apache-2.0
"""Small models in plain PyTorch, as a user would write them: nothing here knows of any parallelism."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The decoder LM of the trials: 4 layers, width 32, 4 heads, 2 key/value heads, feed-forward 64, vocabulary 64."""

    vocab_size: int = 64
    dim: int = 32
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int = 2
    hidden_dim: int = 64
    dropout: float = 0.0
    attention_dropout: float = 0.0
    bias: bool = False
    qk_norm: bool = False
    tied: bool = False


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = config.n_heads, config.n_kv_heads
        self.head_dim = config.dim // config.n_heads
        self.dropout = config.attention_dropout
        self.wq = nn.Linear(config.dim, config.n_heads * self.head_dim, bias=config.bias)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=config.bias)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=config.bias)
        self.wo = nn.Linear(config.n_heads * self.head_dim, config.dim, bias=config.bias)
        self.q_norm = nn.RMSNorm(self.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.wq(x).view(batch, length, self.n_heads, self.head_dim))
        k = self.k_norm(self.wk(x).view(batch, length, self.n_kv_heads, self.head_dim))
        v = self.wv(x).view(batch, length, self.n_kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, freqs).transpose(1, 2), rotate(k, freqs).transpose(1, 2)
        repeats = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        rate = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        return self.wo(out.transpose(1, 2).reshape(batch, length, self.n_heads * self.head_dim))


class FeedForward(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=config.bias)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=config.bias)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.ffn_norm = nn.LayerNorm(config.dim) if config.bias else nn.RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), freqs))
        return x + self.dropout(self.feed_forward(self.ffn_norm(x)))


class Decoder(nn.Module):
    """ids [B, S] -> logits [B, S, V]."""

    def __init__(self, config: DecoderConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or DecoderConfig()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tok_embeddings(ids)
        freqs = frequencies(ids.shape[1], self.config.dim // self.config.n_heads, ids.device)
        for layer in self.layers:
            hidden = layer(hidden, freqs)
        return self.output(self.norm(hidden))


class MLP(nn.Module):
    """x [..., 16] -> [..., 16]; four equal layers in a list."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def frequencies(length: int, head_dim: int, device: torch.device) -> Tensor:
    """Rotary angles as complex numbers [S, head_dim / 2]."""
    powers = torch.arange(0, head_dim, 2, device=device) / head_dim
    angles = torch.outer(torch.arange(length, device=device), 10000.0**-powers)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, freqs: Tensor) -> Tensor:
    """Rotary embedding of x [B, S, heads, head_dim]."""
    wide = x if x.dtype == torch.float64 else x.float()
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * freqs[None, :, None]).flatten(-2).type_as(x)


def decoder(seed: int = 0, **changes: object) -> Decoder:
    """The decoder with some of its dimensions changed, always with the same weights for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Decoder(DecoderConfig(**changes))  # type: ignore[arg-type]


def tokens(batch: int = 4, length: int = 16, vocab: int = 64, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Token ids and labels, [B, S] each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (batch, length), generator=generator)
    return ids, torch.randint(0, vocab, (batch, length), generator=generator)
