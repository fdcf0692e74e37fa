# SPDX-License-Identifier: Apache-2.0
"""Models written in other ways: fused weights, torch's own layers, LoRA, parallel residuals, encoders, vision."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import run_ranks
from tests.models import decoder, tokens
from tests.tensor.parity import compare, parallelize, train, train_parallel

DIM, HEADS, VOCAB = 32, 4, 64


class NanoAttention(nn.Module):
    """As in the best-known small GPT: the width of the heads is that of the input."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.n_head, self.n_embd = HEADS, DIM

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class NanoBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = NanoAttention()
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(DIM, 4 * DIM), "c_proj": nn.Linear(4 * DIM, DIM)})

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class VisionAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, DIM // HEADS
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class VisionBlock(nn.Module):
    """With a scale that the block itself owns."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attn = nn.LayerNorm(DIM), nn.LayerNorm(DIM), VisionAttention()
        self.fc1, self.fc2 = nn.Linear(DIM, 64), nn.Linear(64, DIM)
        self.gamma = nn.Parameter(torch.full((DIM,), 0.5))

    def forward(self, x):
        x = x + self.gamma * self.attn(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class FlatBlock(nn.Module):
    """Attention and feed-forward side by side, all layers directly in the block."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM) for _ in range(4))
        self.qn = nn.RMSNorm(DIM // HEADS)
        self.gate_up_proj, self.down_proj = nn.Linear(DIM, 128), nn.Linear(64, DIM)
        self.n_heads = HEADS

    def forward(self, hidden_states):
        x = self.norm(hidden_states)
        q, k, v = (
            w(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(self.qn(q), k, v, is_causal=True).transpose(1, 2).flatten(2)
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return hidden_states + self.wo(y) + self.down_proj(F.silu(gate) * up)


class NumberedBlock(nn.Module):
    """Feed-forward as a sequence."""

    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(DIM), NanoAttention()
        self.mlp = nn.Sequential(
            nn.LayerNorm(DIM), nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))
        )

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class TorchBlock(nn.TransformerEncoderLayer):
    """torch's own layer: its attention is not sharded, its feed-forward is."""

    def __init__(self):
        super().__init__(DIM, HEADS, 64, dropout=0.0, batch_first=True, norm_first=True)


class ConvBlock(nn.Module):
    """Mixes tokens by a convolution, which nothing shards but which needs the whole sequence."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.mixer = ConvMixer()
        self.fc1, self.fc2 = nn.Linear(DIM, 64), nn.Linear(64, DIM)

    def forward(self, x):
        x = x + self.mixer(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ConvMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=2)

    def forward(self, x):
        return self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class LoraLinear(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, 2, bias=False)
        self.lora_b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x))


class Model(nn.Module):
    """Positions owned by the root, blocks of one kind, a norm and a head."""

    def __init__(self, block):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.positions = nn.Parameter(torch.randn(1, 16, DIM) / math.sqrt(DIM))
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids) + self.positions[:, : ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(block):
    torch.manual_seed(0)
    return Model(block)


def lora_decoder():
    model = decoder(n_layers=2).requires_grad_(False)
    for index, block in enumerate(model.layers):
        torch.manual_seed(index)
        block.attention.wq, block.attention.wv = (
            LoraLinear(block.attention.wq),
            LoraLinear(block.attention.wv),
        )
    return model


def parity(make, tp_size=2, *, world=None, sequence_parallel, tolerance=1e-5, **options):
    batch = tokens()
    reference = train(make(), batch, num_steps=2)

    def body():
        trace = train_parallel(
            make(), batch, tp_size, sequence_parallel=sequence_parallel, num_steps=2, **options
        )
        compare(trace, reference, tolerance)

    run_ranks(world or tp_size, body)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("block", [NanoBlock, VisionBlock, FlatBlock, NumberedBlock, TorchBlock, ConvBlock])
def test_blocks(block, sequence_parallel):
    parity(lambda: build(block), sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("block", [NanoBlock, TorchBlock])
def test_with_fsdp(block):
    parity(lambda: build(block), world=4, sequence_parallel=True, fsdp=True)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_lora(sequence_parallel):
    styles = {"*.wq.base": "column", "*.wv.base": "column", "*.lora_b": "column"}

    def body():
        model = lora_decoder()
        before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
        trace = train_parallel(
            model,
            batch,
            2,
            sequence_parallel=sequence_parallel,
            num_steps=2,
            styles=styles,
            head_attributes=["n_heads", "n_kv_heads"],
        )
        compare(trace, reference)
        assert all(torch.equal(trace.params[name], value) for name, value in before.items())

    batch = tokens()
    reference = train(lora_decoder(), batch, num_steps=2)
    run_ranks(2, body)


def test_evaluation_takes_no_fast_path_around_the_shards():
    def body():
        model, ids = build(TorchBlock).eval(), tokens()[0]
        with torch.no_grad():
            want = model(ids)
            parallelize(model, 2, sequence_parallel=True)
            torch.testing.assert_close(model(ids) * 1.0 + want * 0, want)

    run_ranks(2, body)


def test_a_copy_of_the_model_is_a_model():
    def body():
        model, ids = decoder(n_layers=2), tokens()[0]
        want = model(ids)
        parallelize(model, 2, sequence_parallel=False)
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            torch.testing.assert_close(other(ids).full_logits(), want)

    run_ranks(2, body)
