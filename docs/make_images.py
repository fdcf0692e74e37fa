# SPDX-License-Identifier: Apache-2.0
"""The pictures of the README, from a real run of the example on 4 processes and from the schedules' tables.

```
python docs/make_images.py     # or: make docs-images
```
"""

import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightning.pytorch import Trainer, seed_everything

from examples.train_lm import ByteLM, StandardLibrary
from lightning_3d.callbacks import MemoryTrace
from lightning_3d.schedules import build_schedule, draw_png
from lightning_3d.strategies import ThreeDStrategy

IMAGES = Path(__file__).resolve().parent / "images"


def run_of_the_example(folder: Path) -> Trainer:
    """Trains the example's model at pp2 x dp_shard2 for a few steps with its memory traced."""
    warnings.filterwarnings("ignore")
    seed_everything(0, verbose=False)
    trainer = Trainer(
        strategy=ThreeDStrategy(pp=2, dp_shard=2, dp_replicate=1, tp=1, num_microbatches=4),
        accelerator="cpu",
        devices=4,
        max_steps=3,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[MemoryTrace(steps=(1, 2), evaluation=False, dirpath=folder)],
    )
    trainer.fit(ByteLM(n_layers=8), StandardLibrary())
    return trainer


def main() -> None:
    """Writes docs/images."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(
            os.environ.setdefault("LIGHTNING_3D_IMAGES", name)
        )  # the other ranks run this file again
        trainer = run_of_the_example(folder)
        if not trainer.is_global_zero:
            return
        IMAGES.mkdir(exist_ok=True)
        shutil.copy(folder / "memory.png", IMAGES / "memory.png")
    schedule = build_schedule("interleaved", num_ranks=4, num_microbatches=8, virtual_stages=2)
    draw_png(schedule, IMAGES / "interleaved.png")
    print(*sorted(str(path) for path in IMAGES.iterdir()), sep="\n")


if __name__ == "__main__":
    main()
