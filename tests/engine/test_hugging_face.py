# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama of transformers, with padding masks and position ids, over pipeline stages."""

import pytest
import torch

from tests.engine.runs import DP2, PP2, TP2, Module, Run, check, name_of, seeded, token_batches


class Llama(Module):
    def __init__(self, tied=False):
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=tied,
            attn_implementation="sdpa",
        )
        super().__init__(LlamaForCausalLM(config))

    def training_step(self, batch, batch_idx):
        return self.model(**batch, use_cache=False).loss


class LossOutside(Llama):
    """The loss is made outside the model."""

    def training_step(self, batch, batch_idx):
        labels, inputs = batch["labels"], {key: batch[key] for key in ("input_ids", "attention_mask")}
        logits = self.model(**inputs, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def padded_batches():
    """Each sample has a length of its own, padded on the left, and as many labels as any other."""
    batches = []
    for batch in token_batches(3):
        padding = torch.arange(8)[:, None] % 4 > torch.arange(8)[None]
        mask = (~padding).long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        labels = batch["labels"].clone()
        labels[:, :4] = -100
        batches.append(
            {"input_ids": batch["ids"], "attention_mask": mask, "position_ids": positions, "labels": labels}
        )
    return batches


def without_positions():
    return [{k: v for k, v in batch.items() if k != "position_ids"} for batch in padded_batches()]


RUNS = {
    "mask and positions": Run(module=lambda: seeded(Llama), batches=padded_batches()),
    "tied": Run(module=lambda: seeded(lambda: Llama(tied=True)), batches=without_positions()),
    "loss outside": Run(module=lambda: seeded(LossOutside), batches=padded_batches()),
}


@pytest.mark.parametrize("layout", [PP2, {"pp": 4, "num_microbatches": 4}, DP2, TP2], ids=name_of)
def test_llama(layout):
    check(layout, RUNS)
