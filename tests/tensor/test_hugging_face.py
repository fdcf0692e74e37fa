# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models, tiny and random, under TP and SP equal one process, with their own loss inside."""

import pytest
import torch

from tests.harness import RanksError, run_ranks
from tests.models import tokens
from tests.tensor.parity import compare, hf_loss, train, train_parallel

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2_SIZES = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


EXTRA = {
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 8, "sliding_window": 8},
    "phi3": {"pad_token_id": 0},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    "bloom": {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def build(kind, **changes):
    """A model of a kind of config, with `changes` to its sizes; no dropout."""
    if kind == "gpt2":
        rates = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
        config = transformers.GPT2Config(**GPT2_SIZES, **rates)
    else:
        extra = EXTRA.get(kind, {})
        config = transformers.AutoConfig.for_model(kind, **{**SIZES, **extra, **changes})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def parity(kind, tp_size, *, world=None, changes=None, sequence_parallel, fsdp=False):
    batch = tokens(vocab=61)
    reference = train(build(kind, **(changes or {})), batch, step=hf_loss, num_steps=2)

    def body():
        model = build(kind, **(changes or {}))
        trace = train_parallel(
            model, batch, tp_size, sequence_parallel=sequence_parallel, fsdp=fsdp, step=hf_loss, num_steps=2
        )
        compare(trace, reference)

    run_ranks(world or tp_size, body)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks(kind, sequence_parallel):
    parity(kind, 2, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_fewer_kv_heads_than_ranks(kind):
    parity(kind, 4, sequence_parallel=True)


def test_tied_with_fsdp():
    parity("llama", 2, world=4, changes={"tie_word_embeddings": True}, sequence_parallel=True, fsdp=True)


@pytest.mark.parametrize("kind", ["gemma2", "phi3", "opt", "bloom", "mixtral", "gpt_oss"])
def test_families(kind):
    """A scaled embedding and logit caps; fused weights; flattened tokens; residuals passed on; experts; sinks."""
    parity(kind, 2, sequence_parallel=True)


def test_norms_over_all_heads_are_refused():
    with pytest.raises(RanksError, match="q_norm normalises over all heads"):
        parity("olmo2", 2, sequence_parallel=False)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padded_batch(attention):
    """The mask is of the whole sequence; so is what the attention sees."""
    ids, labels = tokens(vocab=61, length=15)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[2, :9] = 0
    labels = labels.masked_fill(mask == 0, -100)

    def step(model, ids, labels):
        return model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss

    def make():
        model = build("llama")
        model.set_attn_implementation(attention)
        return model

    reference = train(make(), (ids, labels), step=step, num_steps=2)

    def body():
        compare(
            train_parallel(make(), (ids, labels), 2, sequence_parallel=True, step=step, num_steps=2),
            reference,
        )

    run_ranks(2, body)
