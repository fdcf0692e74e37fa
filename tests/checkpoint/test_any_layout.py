# SPDX-License-Identifier: Apache-2.0
"""Saved in each layout, loaded in each: model and optimizers bit-equal, and so is the step after."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_3d.checkpoint import load_checkpoint, load_full_state_dict, save_checkpoint
from tests.checkpoint.layouts import LAYOUTS, Layout, assert_same, build, train, whole_state
from tests.harness import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*had no gradient")

ALL = tuple(layout.name for layout in LAYOUTS)
CASES = {
    "adamw": (ALL, ALL),
    "sgd": (("one", "pp2", "dp2tp2"), ("one", "dp2", "pp2", "dp2tp2")),
    "two": (("pp2", "dp2tp2"), ("one", "pp2", "hsdp2x2")),
    "plain_sgd": (("dp2tp2",), ("pp2",)),
}
"""Optimizer: layouts that save, layouts that load all of these."""


def _on(layout: Layout, body: Any, *args: Any) -> Any:
    """In this process where one rank is enough: nothing needs a process group then."""
    return body(*args) if layout.world_size == 1 else run_ranks(layout.world_size, body, *args)[0]


def _save(layout: Layout, folder: Path) -> None:
    for kind, (savers, _) in CASES.items():
        if layout.name not in savers:
            continue
        model, optimizers = build(layout, kind)
        train(model, optimizers, [0])
        for group in optimizers[0].param_groups:
            group["lr"] *= 0.7  # as a scheduler does
        name = f"{kind}-{layout.name}"
        save_checkpoint(folder / f"{name}.ckpt", model=model, optimizers=optimizers, metadata={"name": name})
        now = whole_state(model, optimizers)
        train(model, optimizers, [1])
        later = whole_state(model, optimizers)
        if not dist.is_initialized() or dist.get_rank() == 0:
            (folder / f"{name}.pkl").write_bytes(pickle.dumps((now, later)))


def _load_all(layout: Layout, folder: Path) -> int:
    count = 0
    for kind, (savers, loaders) in CASES.items():
        for name in (f"{kind}-{saver}" for saver in savers if layout.name in loaders):
            model, optimizers = build(layout, kind, seed=1)
            metadata = load_checkpoint(folder / f"{name}.ckpt", model=model, optimizers=optimizers)
            assert metadata == {"name": name}
            now, later = pickle.loads((folder / f"{name}.pkl").read_bytes())
            assert_same(whole_state(model, optimizers), now)
            train(model, optimizers, [1])
            assert_same(whole_state(model, optimizers), later)
            count += 1
    return count


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for layout in LAYOUTS:
        _on(layout, _save, layout, folder)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_loads_from_every_layout(saved: Path, layout: Layout) -> None:
    assert _on(layout, _load_all, layout, saved) >= len(LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_whole_model_in_one_process(saved: Path, layout: Layout) -> None:
    now, _ = pickle.loads((saved / f"adamw-{layout.name}.pkl").read_bytes())
    whole = load_full_state_dict(saved / f"adamw-{layout.name}.ckpt")
    assert_same(
        whole, {key.removeprefix("model."): value for key, value in now.items() if key.startswith("model.")}
    )
