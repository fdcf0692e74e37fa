# SPDX-License-Identifier: Apache-2.0
"""`examples/train_lm.py`: its model, its data, and whole runs of it."""

import csv
from pathlib import Path

import pytest
import torch

from examples.train_lm import ByteLM, DecoderLM, RandomCrops, StandardLibrary, main, sample

SMALL = ["--d-model", "32", "--layers", "2", "--batch-size", "4", "--accelerator", "cpu", "--val-every", "3"]


def last_val_loss(output: Path) -> float:
    with (output / "metrics.csv").open() as file:
        return [float(row["val_loss"]) for row in csv.DictReader(file) if row["val_loss"]][-1]


def test_model_is_causal_and_starts_near_uniform() -> None:
    model = DecoderLM(d_model=32, n_layers=2)
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 16, 256)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])
    loss = torch.nn.functional.cross_entropy(before.flatten(0, 1), tokens.flatten())
    assert 5 < loss < 7  # ln 256 = 5.5
    assert "cos" not in model.state_dict()


def test_crops_depend_on_index_and_seed_alone() -> None:
    text = bytes(range(256)) * 4
    first, again = RandomCrops(text, 16, 100, seed=1)[7], RandomCrops(text, 16, 100, seed=1)[7]
    other = RandomCrops(text, 16, 100, seed=2)[7]
    assert torch.equal(first["tokens"], again["tokens"])
    assert not torch.equal(first["tokens"], other["tokens"])
    assert torch.equal(first["tokens"][1:], first["targets"][:-1])


def test_split_is_by_file() -> None:
    data = StandardLibrary()
    data.setup("fit")
    share = len(data.val_text) / len(data.train_text)
    assert len(data.train_text) > 5_000_000
    assert 0.02 < share < 0.1
    crop = data.val_text[10_000:10_200]
    assert crop not in data.train_text


def test_sample_is_longer_by_what_was_asked() -> None:
    text = sample(DecoderLM(d_model=32, n_layers=1, max_length=8), b"def ", num_bytes=12)
    assert text.startswith(b"def ")
    assert len(text) == 16


def test_step_knows_nothing_of_the_layout() -> None:
    batch = {"tokens": torch.zeros(2, 8, dtype=torch.long), "targets": torch.ones(2, 8, dtype=torch.long)}
    assert ByteLM(d_model=32, n_layers=1).loss(batch).dim() == 0


def test_run_and_resume_on_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that goes on from a checkpoint ends where the uninterrupted one does."""
    arguments = [*SMALL, "--strategy", "auto", "--devices", "1", "--max-steps", "6"]
    main([*arguments, "--output", str(tmp_path / "whole")])
    output = capsys.readouterr().out
    assert "val_perplexity" in output
    assert "of the first" in output
    assert "The model continues 'def ':\ndef " in output
    halfway = tmp_path / "whole" / "checkpoints" / "step3.ckpt"
    main([*arguments, "--output", str(tmp_path / "resumed"), "--resume", str(halfway)])
    assert "step 1/" not in capsys.readouterr().out
    assert last_val_loss(tmp_path / "resumed") == last_val_loss(tmp_path / "whole")
