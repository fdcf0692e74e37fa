# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models in every layout: `python -m lightning_3d.selfcheck --models`.

Tiny random configs of each family, inside an ordinary LightningModule: decoders with padded batches and the loss inside
the model, classifiers with the loss outside.
"""

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_3d.plan import ParallelPlan
from lightning_3d.selfcheck.oracle import GLOBAL_BATCH, NUM_STEPS

VOCAB_SIZE, SEQUENCE_LENGTH, NUM_LABELS, IMAGE_SIZE = 64, 12, 3, 8

_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_NO_DROPOUT = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "residual_dropout": 0.0,
    "embedding_dropout": 0.0,
}

DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama (tied)": {"tie_word_embeddings": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8},
    "phi3": {},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "cohere": {},
    "mixtral": {"num_local_experts": 4},
    "gpt2": {
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
    "gpt_neox": _NO_DROPOUT,
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0},
}
"""Decoders: `model_type` -> what its tiny config has beside the common dimensions."""

CLASSIFIERS: dict[str, dict[str, Any]] = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "vit": {
        "image_size": IMAGE_SIZE,
        "patch_size": 4,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}
"""Encoders with a classification head."""

LAYOUTS = (
    ParallelPlan(pp=1, dp_replicate=1, dp_shard=2, tp=1),
    ParallelPlan(pp=1, dp_replicate=1, dp_shard=1, tp=2),
    ParallelPlan(pp=2, dp_replicate=1, dp_shard=1, tp=1, num_microbatches=4),
    ParallelPlan(pp=2, dp_replicate=1, dp_shard=2, tp=2, num_microbatches=4),
)
"""Each axis alone, tensor parallelism with sequence parallelism, and all three together."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceTask:
    """A task: a tiny model of one family."""

    name: str
    accumulate: int = 1

    @property
    def is_decoder(self) -> bool:
        """Whether it predicts tokens."""
        return self.name in DECODERS

    def make_module(self) -> pl.LightningModule:
        """See `Task`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return _Decoder(make_model(self.name)) if self.is_decoder else _Classifier(make_model(self.name))

    def make_data(self) -> pl.LightningDataModule:
        """See `Task`."""
        return _Data(_PaddedTokens() if self.is_decoder or self.name == "bert" else _Images())


def make_model(name: str) -> Any:
    """A tiny random model of a family, in fp32.

    Raises:
        ImportError: transformers is not installed.
    """
    import transformers

    family = name.partition(" ")[0]
    is_decoder = name in DECODERS
    options = _COMMON | (DECODERS if is_decoder else CLASSIFIERS)[name]
    config = transformers.AutoConfig.for_model(family, **options, num_labels=NUM_LABELS)
    # Grouped matrix products have bf16 kernels only on CPU; eager experts and attention have every dtype.
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    if is_decoder:
        return transformers.AutoModelForCausalLM.from_config(config).float()
    if name == "vit":
        return transformers.AutoModelForImageClassification.from_config(config).float()
    return transformers.AutoModelForSequenceClassification.from_config(config).float()


class _Module(pl.LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class _Decoder(_Module):
    """The loss is computed inside the model."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(
            input_ids=batch["ids"], attention_mask=batch["mask"], labels=batch["labels"]
        ).loss
        self.log("loss", loss)
        return loss


class _Classifier(_Module):
    """The loss is computed outside the model."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if "pixels" in batch:
            logits = self.model(pixel_values=batch["pixels"]).logits
        else:
            logits = self.model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits
        return F.cross_entropy(logits, batch["label"])


class _PaddedTokens(Dataset[dict[str, Tensor]]):
    """Every second sample is padded, and every sample has as many labels, so that parts of a batch weigh alike."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        count = GLOBAL_BATCH * NUM_STEPS
        self._ids = torch.randint(2, VOCAB_SIZE, (count, SEQUENCE_LENGTH), generator=generator)
        self._label = torch.randint(0, NUM_LABELS, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, mask = self._ids[index].clone(), torch.ones(SEQUENCE_LENGTH, dtype=torch.long)
        if index % 2:
            ids[-3:], mask[-3:] = 0, 0
        labels = ids.clone()
        labels[-3:] = -100
        return {"ids": ids, "mask": mask, "labels": labels, "label": self._label[index]}


class _Images(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        count = GLOBAL_BATCH * NUM_STEPS
        self._pixels = torch.randn(count, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
        self._label = torch.randint(0, NUM_LABELS, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixels": self._pixels[index], "label": self._label[index]}


class _Data(pl.LightningDataModule):
    def __init__(self, dataset: Dataset[dict[str, Tensor]]) -> None:
        super().__init__()
        self._dataset = dataset

    def train_dataloader(self) -> "DataLoader[dict[str, Tensor]]":
        assert self.trainer is not None
        where = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler: DistributedSampler[Any] = DistributedSampler(self._dataset, shuffle=False, **where)
        return DataLoader(self._dataset, batch_size=GLOBAL_BATCH // where["num_replicas"], sampler=sampler)
