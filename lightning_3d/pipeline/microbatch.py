# SPDX-License-Identifier: Apache-2.0
"""Splitting a batch of any nesting into equal microbatches along its leading dimension."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import BatchError


def batch_size_of(batch: Any) -> int:
    """Samples in a batch: the leading size that most of its tensors share (the first one's in a tie).

    Args:
        batch: tensors in any nesting of mappings, sequences and dataclasses.

    Raises:
        BatchError: the batch holds no tensor with a dimension.
    """
    sizes = [tensor.shape[0] for tensor in tensors_of(batch) if tensor.ndim]
    if not sizes:
        raise BatchError(
            f"A batch of type {type(batch).__name__} holds no tensor with a batch dimension, so it cannot be split into"
            " microbatches. Return tensors whose first dimension is the batch, or use pp=1."
        )
    return max(sizes, key=sizes.count)


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Splits a batch into equal parts.

    Tensors, and lists with one entry a sample, are sliced if their leading size is the batch size; everything else
    (scalars, masks of leading size 1, strings, offsets of another length) is passed whole to each microbatch.

    Args:
        batch: a batch of `n` samples, `n` divisible by `num_microbatches`.
        num_microbatches: parts to make.

    Raises:
        BatchError: the samples cannot be split evenly.
    """
    size = batch_size_of(batch)
    if num_microbatches < 1 or size % num_microbatches:
        raise BatchError(
            f"A batch of {size} samples cannot be split into {num_microbatches} equal microbatches."
            " Use a batch size that is a multiple of num_microbatches."
        )
    if num_microbatches == 1:
        return [batch]
    step = size // num_microbatches
    return [_slice(batch, start, start + step, size) for start in range(0, size, step)]


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch, depth first."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping) or (hasattr(batch, "items") and hasattr(batch, "keys")):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from tensors_of(value)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from tensors_of(getattr(batch, field.name))


def signature_of(batch: Any) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    """Shapes and dtypes of a batch: two batches of one signature give hidden states of one shape."""
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors_of(batch))


def copy_of_batch(batch: Any) -> Any:
    """A batch with containers and tensors of its own, for a step that may change its batch in place."""
    return _rebuilt(batch, lambda value: value.clone() if isinstance(value, Tensor) else None)


def _slice(batch: Any, start: int, stop: int, size: int) -> Any:
    def part_of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[start:stop] if value.ndim and value.shape[0] == size else value
        is_sequence = isinstance(value, tuple | list) and not hasattr(value, "_fields")
        if is_sequence and len(value) == size and not any(_has_batch(item, size) for item in value):
            return type(value)(value[start:stop])  # one entry a sample: names, captions, ragged tensors
        return None

    return _rebuilt(batch, part_of)


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nesting of containers with what `change` makes of its parts, or of their items where that is None."""
    changed = change(value)
    if changed is not None:
        return changed
    if isinstance(value, Mapping) or (hasattr(value, "items") and hasattr(value, "keys")):
        return _rebuild_mapping(value, {key: _rebuilt(item, change) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_rebuilt(item, change) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(_rebuilt(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: _rebuilt(getattr(value, f.name), change) for f in fields(value) if f.init}
        )
    return value


def _has_batch(value: Any, size: int) -> bool:
    return any(tensor.ndim and tensor.shape[0] == size for tensor in tensors_of(value))


def _rebuild_mapping(original: Any, items: dict[Any, Any]) -> Any:
    """A mapping of the same type; types that cannot be built from a dict (default dicts) become copies."""
    if type(original) is dict:
        return items
    rebuilt = original.copy() if hasattr(original, "copy") else type(original)(items)
    for key, item in items.items():
        rebuilt[key] = item
    return rebuilt
