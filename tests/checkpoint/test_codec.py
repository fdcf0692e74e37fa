# SPDX-License-Identifier: Apache-2.0
"""Lightning's dict without pickle: what comes back, what is dropped, what is refused."""

import datetime
import enum
import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_3d.checkpoint import read_metadata, read_rank_metadata, save_checkpoint
from lightning_3d.checkpoint.codec import decode, encode, inline_tensor, outline_tensor
from lightning_3d.errors import CheckpointError
from tests.harness import run_ranks


class _Stage(enum.IntEnum):
    FIT = 3


VALUES: list[Any] = [
    {"a": [1, 2.5, None, True, "text"], "b": {}},
    (1, (2, [3])),
    {1: "int key", (1, 2): "tuple key"},
    {"$": "looks like a tag", "v": 1},
    {1, 2},
    frozenset({"x"}),
    OrderedDict(b=1, a=2),
    torch.Size([2, 3]),
    b"\x00\xff",
    Path("run/last.ckpt"),
    datetime.timedelta(seconds=3.5),
    datetime.datetime(2026, 1, 2, 3, 4),
    torch.bfloat16,
    torch.device("cuda", 1),
    1 + 2j,
    float("inf"),
    10**30,
    0.1 + 0.2,
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_round_trip(value: Any) -> None:
    document = json.loads(json.dumps(encode(value, "value", inline_tensor)))
    back = decode(document, outline_tensor)
    assert back == value
    assert type(back) is type(value)


def test_tensors_and_arrays(tmp_path: Path) -> None:
    metadata = {
        "score": torch.tensor(0.25, dtype=torch.float64),
        "view": torch.arange(1000)[10:12],
        "array": numpy.arange(3, dtype=numpy.uint32),
        "number": numpy.float32(0.5),
        "nan": float("nan"),
        "enum": _Stage.FIT,
    }
    save_checkpoint(tmp_path / "a.ckpt", model=nn.Linear(2, 2), metadata=metadata)
    back = read_metadata(tmp_path / "a.ckpt")
    assert torch.equal(back["score"], metadata["score"])
    assert back["score"].dtype == torch.float64
    assert back["view"].tolist() == [10, 11]
    assert back["array"].dtype == numpy.uint32
    assert back["number"] == 0.5
    assert back["enum"] == 3
    assert math.isnan(back["nan"])
    assert (tmp_path / "a.ckpt" / "metadata.pt").stat().st_size < 4000  # of a view, what it shows


def test_hyperparameters_that_need_pickle_are_dropped_by_name(tmp_path: Path) -> None:
    hyper_parameters = {"lr": 0.1, "activation": nn.GELU, "nested": {"fn": len}}
    with pytest.warns(
        UserWarning, match=r"leaves out hyper_parameters.activation .*, hyper_parameters.nested.fn"
    ):
        save_checkpoint(
            tmp_path / "a.ckpt", model=nn.Linear(2, 2), metadata={"hyper_parameters": hyper_parameters}
        )
    assert read_metadata(tmp_path / "a.ckpt") == {"hyper_parameters": {"lr": 0.1}}


def test_everything_else_that_needs_pickle_is_refused_by_name(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    metadata = {
        "callbacks": {"Mine": {"model": nn.Linear(1, 1), "ok": 1}},
        "loop": loop,
        "s": numpy.array(["a"]),
    }
    with pytest.raises(CheckpointError) as error:
        save_checkpoint(tmp_path / "a.ckpt", model=nn.Linear(2, 2), metadata=metadata)
    for part in (
        "callbacks.Mine.model (a torch.nn",
        "loop[0] (contains itself)",
        "s (a numpy",
        "state_dict()",
    ):
        assert part in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_unknown_kinds_are_refused() -> None:
    for document in ({"$": "eval", "v": "1"}, {"$": "dtype", "v": "load"}, {"$": "tuple", "v": 1}):
        with pytest.raises(CheckpointError, match="does not read"):
            decode(document, outline_tensor)


def _with_random_state(path: Path) -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank // 2)
    own = {f"rng.dp{rank // 2}": {"torch": torch.get_rng_state(), "numpy": numpy.random.get_state()}}
    save_checkpoint(path, model=nn.Linear(2, 2), metadata={}, rank_metadata=own)


def test_what_single_ranks_add(tmp_path: Path) -> None:
    """Two replicas of two ranks: one state for each replica, whatever the layout that reads it."""
    run_ranks(4, _with_random_state, tmp_path / "a.ckpt")
    states = read_rank_metadata(tmp_path / "a.ckpt")
    assert set(states) == {"rng.dp0", "rng.dp1"}
    torch.set_rng_state(states["rng.dp1"]["torch"])
    numpy.random.set_state(states["rng.dp1"]["numpy"])
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))
    assert read_metadata(tmp_path / "a.ckpt") == {}
    save_checkpoint(tmp_path / "b.ckpt", model=nn.Linear(2, 2), metadata={})
    assert read_rank_metadata(tmp_path / "b.ckpt") == {}
