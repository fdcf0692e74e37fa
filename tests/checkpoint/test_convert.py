# SPDX-License-Identifier: Apache-2.0
"""Weights of others in, into any layout, and out, for `from_pretrained`; never more in memory than is needed."""

import ctypes
import json
import os
import struct
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_3d.checkpoint import (
    export_safetensors,
    load_full_state_dict,
    load_weights,
    save_checkpoint,
)
from lightning_3d.checkpoint.weight_files import open_safetensors
from lightning_3d.errors import CheckpointError
from tests.checkpoint.layouts import LAYOUTS, Layout, assert_same, build, whole_state
from tests.harness import run_ranks


def _into_layout(layout: Layout, path: Path) -> dict[str, torch.Tensor]:
    model, _ = build(layout, seed=5)
    load_weights(path, model=model)
    return whole_state(model, [])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("exported")
    model, _ = build(LAYOUTS[0])
    save_checkpoint(folder / "a.ckpt", model=model, metadata={})
    export_safetensors(folder / "a.ckpt", folder / "hf", max_file_bytes=3000)
    torch.save({"state_dict": model.state_dict(), "epoch": 1}, folder / "lightning.ckpt")
    torch.save(model.state_dict(), folder / "plain.pt")
    return folder, whole_state(model, [])


@pytest.mark.parametrize(
    "layout", [layout for layout in LAYOUTS if layout.world_size > 1], ids=lambda x: x.name
)
def test_into_every_layout(exported: tuple[Path, dict[str, torch.Tensor]], layout: Layout) -> None:
    folder, expected = exported
    assert_same(run_ranks(layout.world_size, _into_layout, layout, folder / "hf")[0], expected)


@pytest.mark.parametrize("name", ["hf", "lightning.ckpt", "plain.pt"])
def test_into_one_process(exported: tuple[Path, dict[str, torch.Tensor]], name: str) -> None:
    folder, expected = exported
    assert_same(_into_layout(LAYOUTS[0], folder / name), expected)


def test_files_of_a_sharded_export(exported: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, expected = exported
    index = json.loads((folder / "hf" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {key.removeprefix("model.") for key in expected}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    files = sorted(set(index["weight_map"].values()))
    assert files[0].startswith("model-00001-of-0000")
    safetensors = pytest.importorskip("safetensors.torch")
    for file in files:
        for name, tensor in safetensors.load_file(folder / "hf" / file).items():
            assert torch.equal(tensor, expected[f"model.{name}"])


def test_names_and_mismatches(exported: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, expected = exported
    wrapped = nn.ModuleDict({"net": build(LAYOUTS[0], seed=6)[0]})
    with pytest.raises(CheckpointError, match="nothing of this model"):
        load_weights(folder / "hf", model=wrapped)
    load_weights(folder / "hf", model=wrapped, rename=lambda name: f"net.{name}")
    assert torch.equal(wrapped["net"].embed.weight, expected["model.embed.weight"])
    with pytest.raises(CheckpointError, match=r"Missing in the checkpoint \(1\): net.embed.weight"):
        load_weights(
            folder / "hf", model=wrapped, rename=lambda name: None if "embed" in name else f"net.{name}"
        )


def test_export_renames_leaves_out_and_casts(tmp_path: Path) -> None:
    model, _ = build(LAYOUTS[0], tied=True)
    save_checkpoint(tmp_path / "a.ckpt", model=nn.ModuleDict({"model": model}), metadata={})
    (tmp_path / "config.json").write_text("{}")
    for _ in range(2):  # the second replaces the first
        export_safetensors(
            tmp_path / "a.ckpt",
            tmp_path / "hf",
            rename=lambda name: None if "unused" in name else name.removeprefix("model."),
            dtype=torch.bfloat16,
            copy=[tmp_path / "config.json"],
        )
    assert sorted(os.listdir(tmp_path / "hf")) == ["config.json", "model.safetensors"]
    tensors = open_safetensors(tmp_path / "hf" / "model.safetensors")
    assert "embed.weight" in tensors
    assert "head.weight" not in tensors  # tied
    assert not any("unused" in name for name in tensors)
    assert torch.equal(tensors["embed.weight"], model.embed.weight.bfloat16())
    with pytest.raises(CheckpointError, match="is no export of safetensors"):
        export_safetensors(tmp_path / "a.ckpt", tmp_path)
    with pytest.raises(CheckpointError, match="would both be called x"):
        export_safetensors(tmp_path / "a.ckpt", tmp_path / "new", rename=lambda name: "x")
    assert not (tmp_path / "new").exists()


def test_a_hugging_face_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "in", max_shard_size="5KB")
    module = nn.ModuleDict({"net": transformers.LlamaForCausalLM(config)})
    load_weights(tmp_path / "in", model=module, rename=lambda name: f"net.{name}")
    save_checkpoint(tmp_path / "a.ckpt", model=module, metadata={})
    export_safetensors(
        tmp_path / "a.ckpt",
        tmp_path / "out",
        rename=lambda name: name.removeprefix("net."),
        max_file_bytes=5000,
        copy=[tmp_path / "in" / "config.json"],
    )
    back = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(8)[None]
    assert torch.equal(back(ids).logits, model(ids).logits)


def _damaged(path: Path, header: dict[str, object], length: int | None = None) -> Path:
    content = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content) if length is None else length) + content + b"\0" * 8)
    return path


def test_damaged_and_unknown_files(tmp_path: Path) -> None:
    model = nn.Linear(1, 2)
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    cases = [
        (_damaged(tmp_path / "a.safetensors", {}, length=10**6), "does not fit into"),
        (
            _damaged(tmp_path / "b.safetensors", {"bias": {**entry, "data_offsets": [0, 12]}}),
            "does not lie where",
        ),
        (
            _damaged(tmp_path / "c.safetensors", {"bias": {**entry, "data_offsets": [4, 12]}}),
            "does not lie where",
        ),
        (_damaged(tmp_path / "d.safetensors", {"bias": {**entry, "dtype": "X9"}}), "has dtype X9"),
        (tmp_path / "none.pt", "FileNotFoundError"),
        (tmp_path, "has neither model.safetensors.index.json nor"),
    ]
    for path, text in cases:
        with pytest.raises(CheckpointError, match=text):
            load_weights(path, model=model)
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="holds a list"):
        load_weights(tmp_path / "list.pt", model=model)


MIB = 2**20


def _anonymous_mib() -> float:
    """Memory of the process without mapped files, whose pages come and go."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def _export_large(folder: Path) -> float:
    ctypes.CDLL(None).mallopt(
        -3, MIB
    )  # M_MMAP_THRESHOLD: what is freed is given back, so that only what is held counts
    model = nn.ModuleList(nn.Linear(2048, 1024, bias=False) for _ in range(12))  # 12 x 8 MiB
    save_checkpoint(folder / "a.ckpt", model=model, metadata={})
    before, peak, done = _anonymous_mib(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], _anonymous_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    export_safetensors(folder / "a.ckpt", folder / "hf", max_file_bytes=32 * MIB)
    done.set()
    watcher.join()
    return peak[0] - before


def test_export_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    (growth_mib,) = run_ranks(1, _export_large, tmp_path)
    assert growth_mib < 2 * 8 + 6  # the tensor, and what it is read from
    assert load_full_state_dict(tmp_path / "a.ckpt").keys() == {f"{i}.weight" for i in range(12)}
