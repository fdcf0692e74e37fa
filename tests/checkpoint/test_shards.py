# SPDX-License-Identifier: Apache-2.0
"""Which rows a rank holds: against tensors that are really cut, uneven and interleaved ones included."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lightning_3d.boxes import local_part, local_runs
from lightning_3d.checkpoint import load_checkpoint, load_full_state_dict, save_checkpoint
from lightning_3d.checkpoint.shards import sharded
from lightning_3d.compat import StridedShard
from lightning_3d.errors import CheckpointError
from tests.harness import run_ranks


def _rows(runs: list[tuple[int, int]]) -> list[int]:
    return [row for start, length in runs for row in range(start, start + length)]


def _chunk(rows: torch.Tensor, parts: int, index: int) -> torch.Tensor:
    chunks = rows.chunk(parts)
    return chunks[index] if index < len(chunks) else rows[:0]


@pytest.mark.parametrize("size", [1, 5, 16, 61, 64])
@pytest.mark.parametrize(("dp", "tp"), [(2, 4), (3, 2), (4, 4)])
def test_fsdp_over_tensor_parallel(size: int, dp: int, tp: int) -> None:
    """FSDP cuts what tp left, though it comes first on the mesh."""
    seen: list[int] = []
    for i, j in itertools.product(range(dp), range(tp)):
        expected = _chunk(_chunk(torch.arange(size), tp, j), dp, i).tolist()
        (runs,) = local_runs([size], [dp, tp], [i, j], [StridedShard(0, split_factor=tp), Shard(0)])
        assert _rows(runs) == expected
        seen += expected
    assert sorted(seen) == list(range(size))


def test_interleaved_shard_of_a_fused_weight() -> None:
    """A rank has its part of each of the fused weights; FSDP cuts this local tensor."""
    placements = [StridedShard(0, split_factor=2), StridedShard(0, split_factor=2)]
    held = {(i, j): _rows(local_runs([16], [2, 2], [i, j], placements)[0]) for i in (0, 1) for j in (0, 1)}
    assert held == {
        (0, 0): [0, 1, 2, 3],
        (1, 0): [8, 9, 10, 11],
        (0, 1): [4, 5, 6, 7],
        (1, 1): [12, 13, 14, 15],
    }


def test_replicas_and_dims() -> None:
    runs = local_runs([6, 10], [2, 2, 2], [1, 0, 1], [Replicate(), Shard(1), Shard(0)])
    assert runs == [[(3, 3)], [(0, 5)]]


class _Fused(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(weight)


def _save_fused(path: Path) -> None:
    tp, rank = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), dist.get_rank()
    gate, up = torch.arange(24.0).reshape(6, 4), torch.arange(100.0, 124.0).reshape(6, 4)
    local = torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
    weight = DTensor.from_local(local, tp, [StridedShard(0, split_factor=2)], shape=(12, 4), stride=(4, 1))
    save_checkpoint(path, model=_Fused(weight), metadata={})
    back = _Fused(
        DTensor.from_local(torch.zeros_like(local), tp, weight.placements, shape=(12, 4), stride=(4, 1))
    )
    load_checkpoint(path, model=back)
    assert torch.equal(back.gate_up.to_local(), local)


def test_fused_weight_keeps_its_order(tmp_path: Path) -> None:
    run_ranks(2, _save_fused, tmp_path / "fused.ckpt")
    expected = torch.cat([torch.arange(24.0).reshape(6, 4), torch.arange(100.0, 124.0).reshape(6, 4)])
    assert torch.equal(load_full_state_dict(tmp_path / "fused.ckpt")["gate_up"], expected)


def _save_more_ranks_than_rows(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(3.0)
    local = _chunk(whole, 2, mesh.get_local_rank("tp")).clone()
    model = _Fused(DTensor.from_local(local, mesh["tp"], [Shard(0)], shape=(3,), stride=(1,)))
    fully_shard(model, mesh=mesh["dp"])
    save_checkpoint(path, model=model, metadata={})
    with torch.no_grad():
        model.gate_up.to_local().zero_()
    load_checkpoint(path, model=model)
    assert model.gate_up.to_local().sum() == sum(
        whole[start : start + n].sum() for start, n in _held(model.gate_up)
    )


def _parts_of_uneven_rows(size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(3.0 * size).reshape(size, 3)
    local = whole.chunk(2)[mesh.get_local_rank("tp")].clone()
    model = _Fused(DTensor.from_local(local, mesh["tp"], [Shard(0)], shape=(size, 3), stride=(3, 1)))
    fully_shard(model, mesh=mesh["dp"])
    assert torch.equal(local_part(whole, model.gate_up), model.gate_up.to_local())


@pytest.mark.parametrize("size", [5, 61])
def test_the_own_part_of_a_whole_tensor(size: int) -> None:
    run_ranks(4, _parts_of_uneven_rows, size)


def _held(tensor: DTensor) -> list[tuple[int, int]]:
    return local_runs(
        tensor.shape, tensor.device_mesh.shape, tensor.device_mesh.get_coordinate(), tensor.placements
    )[0]


def test_empty_shards(tmp_path: Path) -> None:
    """An empty shard's offset is another rank's first row: it must not take its place."""
    run_ranks(4, _save_more_ranks_than_rows, tmp_path / "small.ckpt")
    assert load_full_state_dict(tmp_path / "small.ckpt")["gate_up"].tolist() == [0, 1, 2]


def _refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    pending = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    wrong = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], shape=(9,), stride=(1,))
    texts = []
    for tensor in (pending, wrong, torch.empty(2, device="meta")):
        with pytest.raises(CheckpointError) as error:
            sharded("weight", tensor)
        texts.append(str(error.value))
    return texts


def test_refuses_what_does_not_add_up() -> None:
    pending, wrong, meta = run_ranks(2, _refusals)[0]
    assert "sum over ranks is pending" in pending
    assert "should have a shard of (5,)" in wrong
    assert "meta device" in meta
