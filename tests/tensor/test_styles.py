# SPDX-License-Identifier: Apache-2.0
"""Which style a module gets, and what is refused, without any process group."""

import pytest
import torch
from torch import nn

from lightning_3d.errors import ModelError
from lightning_3d.parallel.tensor import resolve_tp
from lightning_3d.parallel.tensor.sharding import ShardingPlanner, gather_facts
from lightning_3d.tp_styles import ModuleFacts, TpStyle, resolve_styles
from tests.models import MLP, decoder
from tests.tensor.parity import blocks_of


def plan(model, size, user=None, rank=0):
    blocks = blocks_of(model)
    names = [name for name, _ in model.named_modules()]
    styles = resolve_styles(names, gather_facts(model, blocks), user=user)
    return ShardingPlanner(model, blocks, styles, size, rank).plan()


def linear(num_in, num_out, block="layers.0"):
    return ModuleFacts(layout="linear", num_in=num_in, num_out=num_out, block=block)


def test_sources_in_order():
    facts = {
        "net.layers.0.attn.q_proj": linear(8, 8),
        "net.layers.0.attn.k_proj": linear(8, 8),
        "net.layers.0.attn.o_proj": linear(8, 8),
        "net.layers.0.mlp.mystery": linear(8, 32),
        "net.layers.0.mlp.back": linear(32, 8),
    }
    styles = resolve_styles(
        facts,
        facts,
        user={"*.k_proj": "replicate", "*.mystery": TpStyle(kind="column", role="ffn")},
        config_plan={"layers.*.mlp.back": "rowwise", "layers.*.attn.k_proj": "colwise"},
    )
    got = {name.removeprefix("net.layers.0."): (style.kind, style.source) for name, style in styles.items()}
    assert got == {
        "attn.q_proj": ("column", "table"),
        "attn.k_proj": ("replicate", "user"),
        "attn.o_proj": ("row", "table"),
        "mlp.mystery": ("column", "user"),
        "mlp.back": ("row", "config"),
    }


def test_names_that_do_not_fit_each_other_are_left_alone():
    facts = {
        "layers.0.query": linear(8, 8),
        "layers.0.dense": linear(8, 8),
        "layers.0.mlp.w1": linear(8, 32),
        "layers.0.mlp.w2": linear(8, 32),  # another convention: w2 is the gate's partner
        "layers.0.mlp.w3": linear(32, 8),
    }
    assert resolve_styles(facts, facts) == {}


def test_a_head_needs_as_many_classes_as_the_embedding_has_rows():
    facts = {
        "embed": ModuleFacts(layout="embedding", num_in=100, num_out=8),
        "head": linear(8, 100, block=""),
        "output": linear(8, 3, block=""),
    }
    assert {name: style.kind for name, style in resolve_styles(facts, facts).items()} == {
        "embed": "vocab_embedding",
        "head": "vocab_head",
    }


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ({"*.nothing": "column"}, "matches no module"),
        ({"*.wq": "diagonal"}, "'diagonal' is unknown. Use one of: column, row"),
        ({"*.attention_norm": "column"}, "attention_norm needs a linear or transposed layer"),
        ({"*.wo": "replicate", "*.wq": "column"}, "layers.0.attention has tp styles of one kind only"),
    ],
)
def test_styles_that_cannot_be(user, message):
    with pytest.raises(ModelError, match=message):
        plan(decoder(), 2, user)


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        (
            {"n_heads": 6, "n_kv_heads": 6, "dim": 48},
            4,
            r"tp=4 does not fit n_heads=6 of layers.0.attention .* Use tp=1, 2, 3, 6",
        ),
        ({"n_heads": 6, "n_kv_heads": 2, "dim": 48}, 3, r"tp=3 does not fit n_kv_heads=2 .* Use tp=1, 2, 6"),
        ({"n_heads": 8, "n_kv_heads": 1}, 3, r"tp=3 does not fit n_heads=8"),
        (
            {"hidden_dim": 5},
            2,
            r"feed_forward.w1 has 5 output features, which tp=2 does not divide. Use tp=1, 5",
        ),
        ({"vocab_size": 3}, 4, r"has 3 rows, too few"),
    ],
)
def test_sizes_that_tp_does_not_divide_are_refused(changes, size, message):
    with pytest.raises(ModelError, match=message):
        plan(decoder(**changes), size)


def test_layers_with_unknown_names_are_refused():
    with pytest.raises(ModelError, match="No layer of the blocks has a known name"):
        plan(MLP(width=5), 2)


def test_unknown_head_attributes_are_refused():
    model = decoder()
    for block in model.layers:
        del block.attention.n_heads, block.attention.head_dim
    with pytest.raises(ModelError, match=r"number of attention heads of layers\.0\.attention is unknown"):
        plan(model, 2)


def test_kv_heads_are_shared_or_divided():
    heads = plan(decoder(), 4, rank=3).heads["layers.0.attention"]
    assert heads.shares_kv_heads(4)
    assert heads.kv_features(4, 3) == (8, 16)
    assert not heads.shares_kv_heads(2)
    assert heads.kv_features(2, 1) == (8, 16)


def test_fused_parts():
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.n_heads, self.n_kv_heads = 4, 2
            self.qkv = nn.Linear(32, 64)
            self.proj = nn.Linear(32, 32)

    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"attn": Fused()}) for _ in range(2)])
    sharding = plan(model, 2, rank=1).modules["layers.0.attn.qkv"]
    assert sharding.parts == ((16, 32), (40, 48), (56, 64))
    assert plan(model, 4, rank=1).modules["layers.0.attn.qkv"].parts == ((8, 16), (32, 40), (48, 56))


def test_only_plain_weights_are_sharded():
    model = decoder()
    for block in model.layers:
        block.attention.wq.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ModelError, match="has parameters that tp style 'column' does not know: scale"):
        plan(model, 2)


def test_styles_of_a_whole_model_serve_its_stages():
    """A stage lacks modules that a pattern was meant for, and the embedding that tells a head from a classifier."""
    model = decoder()
    resolved = resolve_tp(model, list(blocks_of(model)), 2, {"output": "replicate"})
    assert "output" in resolved
    assert resolved["tok_embeddings"].kind == "vocab_embedding"
    with pytest.raises(ModelError, match="tp=3 does not fit"):
        resolve_tp(model, list(blocks_of(model)), 3)
