# SPDX-License-Identifier: Apache-2.0
"""`lightning-3d convert`: between checkpoints and files of whole models."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning_3d.errors import CheckpointError

_FILES = (".ckpt", ".pt", ".pth")
"""A target with one of these endings is a file that `load_from_checkpoint` reads."""
_BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)


def convert(options: Any) -> int:
    """Writes a checkpoint's model as safetensors or as Lightning's file, or files of weights as a checkpoint."""
    import torch

    from lightning_3d.checkpoint import (
        export_lightning,
        export_safetensors,
        import_weights,
        is_checkpoint,
    )
    from lightning_3d.checkpoint.places import place_of
    from lightning_3d.checkpoint.weight_files import is_weights

    source, target, prefix = place_of(options.source), place_of(options.target), options.prefix
    dtype = getattr(torch, options.dtype, None) if options.dtype else None
    if options.dtype and not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"--dtype {options.dtype!r} is no dtype of torch. Use bfloat16, float16 or float32."
        )
    if is_checkpoint(source) and target.suffix in _FILES:
        export_lightning(source, target)
    elif is_checkpoint(source):
        export_safetensors(
            source,
            target,
            rename=lambda name: name.removeprefix(prefix),
            dtype=dtype,
            max_file_bytes=int(options.max_file_gb * 1e9),
            copy=_beside(options.config),
        )
    elif is_weights(source):
        metadata = {
            "pytorch-lightning_version": version("lightning"),
            "epoch": 0,
            "global_step": 0,
            "lightning_3d": {"whole": False, "entries": {}},
        }
        import_weights(source, target, rename=lambda name: prefix + name, metadata=metadata)
    else:
        raise CheckpointError(
            f"{source} is neither a whole checkpoint nor a file or folder of weights. Give a checkpoint folder, a "
            "Hugging Face folder, a .safetensors file or a torch file."
        )
    print(f"Wrote {target}")
    return 0


def _beside(config: str) -> list[Path]:
    """The files of a Hugging Face folder that are not weights."""
    if not config:
        return []
    found = [Path(config) / name for name in _BESIDE if (Path(config) / name).exists()]
    if not found:
        raise CheckpointError(f"--config {config} has none of {', '.join(_BESIDE)}.")
    return found
