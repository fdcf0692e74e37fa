# SPDX-License-Identifier: Apache-2.0
"""The shape of a real module: parameters counted on it, dimensions read from its config or from its layers.

Nothing here imports torch: modules are read through `named_modules`, `parameters` and `shape`, on any device, the
meta device included.
"""

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

from lightning_3d.errors import ModelError
from lightning_3d.models.config import shape_from_config
from lightning_3d.models.parameters import total_parameters
from lightning_3d.shape import ModelShape

_HEAD_NAMES = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead")
_KV_HEAD_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


def shape_of_module(module: Any) -> ModelShape:
    """The shape of an `nn.Module` or LightningModule, with its parameters counted exactly.

    A Hugging Face config found on the module or on one of its children gives the dimensions; without one they are
    read from the layers. Parameters that the dimensions do not explain are kept as `other_parameters` (or corrected
    per block), so that `total_parameters` of the result is the module's own count.

    Raises:
        ModelError: the module has no list of blocks.
    """
    blocks = _longest_module_list(module)
    config = _config(module)
    shape = shape_from_config(config) if config is not None else _shape_of_layers(module, blocks)
    if shape.num_layers != len(blocks):
        shape = replace(shape, num_layers=len(blocks))
    shape = replace(shape, tied_embeddings=_is_tied(module, blocks, shape))
    count = sum(prod(parameter.shape) for parameter in module.parameters())
    if config is None:
        shape = replace(shape, block_parameters=_count(blocks) // len(blocks))
    return replace(shape, other_parameters=shape.other_parameters + count - total_parameters(shape))


def readable_shape(module: Any) -> ModelShape | None:
    """The shape of a module, or None where it cannot be read."""
    try:
        return shape_of_module(module)
    except ModelError:
        return None


def _config(module: Any) -> Any:
    for _, child in module.named_modules():
        config = getattr(child, "config", None)
        if hasattr(config, "to_dict") and hasattr(config, "hidden_size"):
            return config
    return None


def _longest_module_list(module: Any) -> Any:
    lists = [child for _, child in module.named_modules() if _is_a(child, "ModuleList")]
    if not lists:
        raise ModelError(
            f"{type(module).__name__} has no ModuleList of blocks, which stages and estimates are made of."
            " Keep the repeated layers in one nn.ModuleList, or give a ModelShape."
        )
    return max(lists, key=len)


def _is_a(module: Any, class_name: str) -> bool:
    return any(base.__name__ == class_name for base in type(module).__mro__)


def _count(module: Any) -> int:
    return sum(prod(parameter.shape) for parameter in module.parameters())


def _shape_of_layers(module: Any, blocks: Any) -> ModelShape:
    """Dimensions read from the layers of a module without a config."""
    linears = [child for child in blocks[0].modules() if _is_a(child, "Linear") or _is_a(child, "Conv1D")]
    sides = Counter(side for linear in linears for side in linear.weight.shape)
    embeddings = [child for _, child in module.named_modules() if _is_a(child, "Embedding")]
    largest = max(embeddings, key=lambda child: child.weight.shape[0], default=None)
    vocab, hidden = largest.weight.shape if largest is not None else (0, 0)
    hidden = hidden or (sides.most_common(1)[0][0] if sides else 0)
    if not hidden:
        raise ModelError(
            f"the blocks of {type(module).__name__} have no linear layers to read a width from. Give a ModelShape."
        )
    heads = _attribute(blocks[0], _HEAD_NAMES) or 1
    return ModelShape(
        num_layers=len(blocks),
        hidden_size=int(hidden),
        num_attention_heads=heads,
        num_key_value_heads=_attribute(blocks[0], _KV_HEAD_NAMES) or heads,
        head_dim=max(1, int(hidden) // heads),
        intermediate_size=int(max(sides, default=hidden)),
        vocab_size=int(vocab),
        name=type(module).__name__,
    )


def _attribute(block: Any, names: tuple[str, ...]) -> int:
    for child in block.modules():
        for name in names:
            value = getattr(child, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return 0


def _is_tied(module: Any, blocks: Any, shape: ModelShape) -> bool:
    """Whether there are fewer vocabulary-sized matrices outside the blocks than an embedding and a head need."""
    sizes = ((shape.vocab_size, shape.hidden_size), (shape.hidden_size, shape.vocab_size))
    in_blocks = {id(parameter) for parameter in blocks.parameters()}
    tables = {id(table) for table in module.parameters() if tuple(table.shape) in sizes}
    return len(tables - in_blocks) < 2
