# SPDX-License-Identifier: Apache-2.0
"""Short runs of a small decoder with memory callbacks."""

import logging
import warnings

import lightning.pytorch as pl

from lightning_3d.selfcheck.model import DecoderShape, LanguageModel, TokenData
from lightning_3d.strategies import ThreeDStrategy

SHAPE = DecoderShape(
    vocab_size=256, dim=64, num_layers=4, num_heads=8, num_kv_heads=8, ffn_dim=192, sequence_length=64
)
BATCH = 8


def strategy_of(layout):
    return ThreeDStrategy(**{"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1, **layout})


def world_of(layout):
    world = 1
    for axis in ("pp", "dp_replicate", "dp_shard", "tp"):
        world *= layout.get(axis, 1)
    return world


def fit(callbacks, strategy="auto", devices=1, replicas=1, data=None, module=None, hush=True, **options):
    """Trains for `max_steps` (2) and returns the Trainer."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if hush:
        warnings.filterwarnings("ignore")
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        callbacks=callbacks,
        **{"max_steps": 2, **quiet, **options},
    )
    module = module or LanguageModel(SHAPE, "adamw")
    trainer.fit(module, data or TokenData(8 * BATCH * replicas, BATCH * replicas, SHAPE))
    return trainer
