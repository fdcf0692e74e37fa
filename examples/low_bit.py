# SPDX-License-Identifier: Apache-2.0
"""The language model of `train_lm.py` with optimizer state in 8 bits: two bytes a parameter instead of eight.

The optimizer is torchao's, chosen where any optimizer is; it is sharded with the parameters, and a checkpoint of it
loads in any layout, and into a 32-bit AdamW. Needs `pip install 'lightning-3d[fp8]'`.

```
python examples/low_bit.py --devices 2                              # sharded over two processes
python examples/low_bit.py --devices 4 --tp 2 --offload cpu         # and split, and kept in the host's memory
```
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor
from torch.distributed.tensor import DTensor

from examples.train_lm import ByteLM, StandardLibrary
from lightning_3d.strategies import ThreeDStrategy


class LowBitLM(ByteLM):
    """Only the optimizer is another."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        from torchao.optim import AdamW8bit

        optimizer: torch.optim.Optimizer = AdamW8bit(
            self.parameters(), lr=self.hparams["lr"], betas=(0.9, 0.95), weight_decay=0.1
        )
        return optimizer


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the moments that this rank holds."""
    moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    return sum(part.numel() * part.element_size() for moment in moments for part in _parts(moment))


def _parts(moment: Tensor) -> list[Tensor]:
    local: Any = moment.to_local() if isinstance(moment, DTensor) else moment
    return [local.codes, local.scale] if hasattr(local, "codes") else [local]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=2, help="processes on this machine")
    parser.add_argument("--tp", type=int, default=1, help="parts of every matrix")
    parser.add_argument("--offload", default="none", help="cpu: all state in the host's memory")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--max-steps", type=int, default=50)
    parser.add_argument("--d-model", type=int, default=128)
    args = parser.parse_args(argv)
    seed_everything(0, verbose=False)
    if not torch.cuda.is_available():
        torch.compiler.set_stance("force_eager")  # torchao compiles its update, which takes a CPU a minute
    trainer = Trainer(
        strategy=ThreeDStrategy(tp=args.tp, offload=args.offload),
        accelerator=args.accelerator,
        devices=args.devices,
        max_steps=args.max_steps,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = LowBitLM(d_model=args.d_model)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    trainer.fit(model, datamodule=StandardLibrary(batch_size=8))
    if trainer.is_global_zero:
        held = state_bytes(trainer.optimizers[0])
        print(f"loss {float(trainer.callback_metrics['train_loss']):.3f}")
        print(f"{held * args.devices / num_parameters:.2f} bytes of optimizer state a parameter; AdamW has 8")


if __name__ == "__main__":
    main(sys.argv[1:])
