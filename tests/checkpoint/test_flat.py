# SPDX-License-Identifier: Apache-2.0
"""Runs of flattened tensors: their boxes cover them exactly, and they pass through checkpoints of other layouts."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_3d.checkpoint import load_checkpoint, load_full_state_dict, save_checkpoint
from lightning_3d.checkpoint.flat import FlatShard, flat_boxes
from tests.harness import run_ranks


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 3, 4), (1, 5, 1, 2), (0, 3)])
def test_boxes_cover_a_run_in_order(shape):
    count = math.prod(shape)
    whole = torch.arange(count).reshape(shape)
    for begin, end in itertools.combinations_with_replacement(range(count + 1), 2):
        boxes = list(flat_boxes(shape, begin, end))
        values = []
        for offsets, sizes in boxes:
            box = whole
            for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                box = box.narrow(dim, offset, size)
            assert box.shape == sizes
            values += box.reshape(-1).tolist()
        assert values == list(range(begin, end))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


class Flat(nn.Module):
    """A model whose parameters are runs."""

    def __init__(self, shards):
        super().__init__()
        self.shards = shards

    def state_dict(self, *args, **kwargs):
        return dict(self.shards)

    def named_parameters(self, *args, **kwargs):
        return iter(self.shards.items())

    def parameters(self, recurse=True):
        return iter(self.shards.values())


def test_passes_through_a_checkpoint(tmp_path):
    """Two ranks write runs that meet within a row; one process reads the whole, and three ranks read other runs."""
    values = {"a": torch.randn(5, 7, 3), "b": torch.randn(11), "c": torch.tensor(3.0)}

    def shards(world_size, rank, fill):
        found = {}
        for name, value in values.items():
            size = -(-value.numel() // world_size)
            begin = min(rank * size, value.numel())
            run = value.reshape(-1)[begin : begin + size].clone()
            found[name] = FlatShard.of(value.shape, run if fill else torch.zeros_like(run), begin)
        return found

    def save():
        save_checkpoint(
            tmp_path / "flat.ckpt",
            model=Flat(shards(2, dist.get_rank(), True)),
            metadata={},
            process_group=dist.group.WORLD,
        )

    def load():
        model = Flat(shards(3, dist.get_rank(), False))
        load_checkpoint(tmp_path / "flat.ckpt", model=model, process_group=dist.group.WORLD)
        return {name: shard.run for name, shard in model.shards.items()}

    run_ranks(2, save)
    whole = load_full_state_dict(tmp_path / "flat.ckpt")
    for name, value in values.items():
        assert torch.equal(whole[name], value), name
    parts = run_ranks(3, load)
    for name, value in values.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), value.reshape(-1)), name
