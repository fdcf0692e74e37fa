# SPDX-License-Identifier: Apache-2.0
"""A language model on the source text of Python's own standard library, trained in 3D parallel.

The model is a byte-level decoder in the style of Llama, in plain PyTorch; the LightningModule and the data module
are ordinary. None of them knows how many processes there are: that is the Trainer's `strategy`, in `main`.

```
python examples/train_lm.py --devices 8 --pp 2 --dp-shard 2 --tp 2    # this machine, 8 processes
torchrun --nproc-per-node 8 examples/train_lm.py --devices 8 --tp 2   # under torchrun
python examples/train_lm.py --strategy auto --devices 1               # one process, Lightning alone
python examples/train_lm.py fit --config examples/three_d.yaml        # LightningCLI
```
"""

import argparse
import math
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_3d.callbacks import ThroughputMonitor

VOCAB_SIZE = 256  # a token is a byte
Batch = dict[str, Tensor]


# --- the model


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding. x: [B, S, H, head_dim]; cos, sin: [S, head_dim / 2]."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Attention(nn.Module):
    """Causal attention in which several query heads share a key and value head."""

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.head_dim = d_model // n_heads
        self.q_proj = nn.Linear(d_model, n_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(d_model, n_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(d_model, n_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(n_heads * self.head_dim, d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.n_heads, self.head_dim)
        k = self.k_proj(x).view(batch, length, self.n_kv_heads, self.head_dim)
        v = self.v_proj(x).view(batch, length, self.n_kv_heads, self.head_dim)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, H, S, head_dim]
        groups = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, self.n_heads * self.head_dim))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int, d_ff: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(d_model)
        self.attention = Attention(d_model, n_heads, n_kv_heads)
        self.mlp_norm = nn.RMSNorm(d_model)
        self.mlp = FeedForward(d_model, d_ff)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class DecoderLM(nn.Module):
    """Tokens in, logits out. tokens: [B, S] of bytes; result: [B, S, 256]."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        d_model: int = 128,
        n_layers: int = 4,
        n_heads: int = 4,
        n_kv_heads: int = 2,
        max_length: int = 128,
    ) -> None:
        super().__init__()
        d_ff = 32 * math.ceil(d_model * 8 / 3 / 32)
        self.embed = nn.Embedding(VOCAB_SIZE, d_model)
        self.layers = nn.ModuleList(Block(d_model, n_heads, n_kv_heads, d_ff) for _ in range(n_layers))
        self.norm = nn.RMSNorm(d_model)
        self.head = nn.Linear(d_model, VOCAB_SIZE, bias=False)
        half = d_model // n_heads // 2
        angles = torch.outer(torch.arange(max_length), 10_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)  # [max_length, head_dim / 2]
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=1.0 if name == "embed.weight" else parameter.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):  # what is added to the residual stream
                nn.init.normal_(parameter, std=(2 * n_layers * parameter.shape[1]) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


class ByteLM(LightningModule):
    """Next-byte prediction with AdamW, a warm-up and a cosine."""

    def __init__(
        self,
        d_model: int = 128,
        n_layers: int = 4,
        n_heads: int = 4,
        n_kv_heads: int = 2,
        max_length: int = 128,
        lr: float = 5e-3,
        warmup_steps: int = 20,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = DecoderLM(d_model, n_layers, n_heads, n_kv_heads, max_length)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)
        self.log("val_perplexity", loss.exp(), sync_dist=True)

    def loss(self, batch: Batch) -> Tensor:
        logits = self.model(batch["tokens"])  # [B, S, 256]
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.hparams["lr"], betas=(0.9, 0.95), weight_decay=0.1
        )
        warmup, total = self.hparams["warmup_steps"], self.trainer.max_steps

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


# --- the data


class RandomCrops(Dataset[Batch]):
    """Crop number i of a text begins at a place that only i and the seed decide."""

    def __init__(self, text: bytes, length: int, num_crops: int, seed: int) -> None:
        self.text = numpy.frombuffer(text, dtype=numpy.uint8)
        self.length = length
        self.num_crops = num_crops
        self.seed = seed

    def __len__(self) -> int:
        return self.num_crops

    def __getitem__(self, index: int) -> Batch:
        start = numpy.random.default_rng((self.seed, index)).integers(len(self.text) - self.length)
        crop = torch.from_numpy(self.text[start : start + self.length + 1].astype(numpy.int64))
        return {"tokens": crop[:-1], "targets": crop[1:]}


class StandardLibrary(LightningDataModule):
    """The source of Python's standard library; about every twentieth file is for validation.

    The crops of each epoch are new and depend on the epoch's number alone, so a resumed run goes on with the
    batches that it would have had. It wants `Trainer(reload_dataloaders_every_n_epochs=1)`.
    """

    def __init__(self, length: int = 128, batch_size: int = 16, num_val_crops: int = 256) -> None:
        super().__init__()
        self.length = length
        self.batch_size = batch_size
        self.num_val_crops = num_val_crops

    def setup(self, stage: str) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
        texts: dict[bool, list[bytes]] = {True: [], False: []}
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root)
            if not skipped.intersection(name.parts):
                texts[zlib.crc32(name.as_posix().encode()) % 20 == 0].append(path.read_bytes())
        self.val_text, self.train_text = (b"\n".join(texts[is_val]) for is_val in (True, False))

    def train_dataloader(self) -> DataLoader[Batch]:
        epoch = self.trainer.current_epoch if self.trainer else 0
        crops = RandomCrops(self.train_text, self.length, num_crops=1 << 20, seed=epoch)
        return DataLoader(crops, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Batch]:
        crops = RandomCrops(self.val_text, self.length, self.num_val_crops, seed=0)
        return DataLoader(crops, batch_size=self.batch_size)


# --- the run


@torch.no_grad()
def sample(model: DecoderLM, prompt: bytes, num_bytes: int, temperature: float = 0.6) -> bytes:
    """Continue a prompt by `num_bytes` bytes, one process, no cache."""
    generator = torch.Generator().manual_seed(0)
    text = list(prompt)
    for _ in range(num_bytes):
        logits = model(torch.tensor([text[-len(model.cos) :]]))[0, -1]
        text.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
    return bytes(text)


def load_weights(path: Path) -> dict[str, Tensor]:
    """The whole model's weights from a checkpoint of any layout, or from Lightning's own single file."""
    if path.is_dir():
        from lightning_3d.checkpoint import load_full_state_dict

        return load_full_state_dict(path)
    weights: dict[str, Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return weights


def build_strategy(args: argparse.Namespace) -> Any:
    """The only lines of this file that are about parallelism."""
    if args.strategy != "3d":
        return args.strategy
    from lightning_3d.strategies import ThreeDStrategy

    return ThreeDStrategy(
        pp=args.pp,
        dp_replicate=args.dp_replicate,
        dp_shard=args.dp_shard,
        tp=args.tp,
        schedule=args.schedule,
        num_microbatches=args.num_microbatches,
        recompute=args.recompute,
        offload=args.offload,
    )


def degree(text: str) -> int | str:
    """A number, or `auto`."""
    return text if text == "auto" else int(text)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", default="3d", help="3d, or any strategy of Lightning (auto, ddp, fsdp)")
    parser.add_argument("--pp", type=degree, default="auto", help="pipeline stages")
    parser.add_argument("--dp-replicate", type=degree, default="auto", help="replicas of the sharded model")
    parser.add_argument("--dp-shard", type=degree, default="auto", help="shards of parameters and optimizer")
    parser.add_argument("--tp", type=degree, default="auto", help="parts of every matrix")
    parser.add_argument("--schedule", default="1f1b", help="pipeline schedule")
    parser.add_argument(
        "--num-microbatches", type=degree, default="auto", help="parts of a batch in the pipeline"
    )
    parser.add_argument("--recompute", default="none", help="none, selective, full, 0.5 (of blocks), 2GiB")
    parser.add_argument("--offload", default="none", help="cpu: all state in the host's memory")
    parser.add_argument("--devices", type=degree, default="auto", help="processes on this machine")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--val-every", type=int, default=50, help="steps between validations and checkpoints")
    parser.add_argument(
        "--batch-size", type=int, default=16, help="sequences per step and data-parallel replica"
    )
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument(
        "--output", type=Path, default=Path("runs/train_lm"), help="checkpoints and metrics.csv"
    )
    parser.add_argument(
        "--resume", help="a checkpoint to go on from, or `last` for the newest one in --output"
    )
    parser.add_argument("--prompt", default="def ", help="text that the trained model continues at the end")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    args = parse_arguments(argv)
    seed_everything(0, verbose=False)
    lm = ByteLM(d_model=args.d_model, n_layers=args.layers, lr=args.lr)
    checkpoints = args.output / "checkpoints"
    trainer = Trainer(
        strategy=build_strategy(args),
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.num_nodes,
        max_epochs=-1,
        max_steps=args.max_steps,
        limit_train_batches=args.val_every,  # an epoch is what lies between two validations
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=CSVLogger(args.output, name="", version=""),
        callbacks=[
            ModelCheckpoint(
                checkpoints,
                "step{step}",
                monitor="val_loss",
                save_top_k=2,
                save_last=True,
                save_on_train_epoch_end=False,  # after an epoch's end, Lightning 2.6 resumes with another shuffle
                auto_insert_metric_name=False,
            ),
            ThroughputMonitor(every_n_steps=10, print_lines=True),
        ],
    )
    if trainer.is_global_zero:
        print(f"{sum(p.numel() for p in lm.parameters()):,} parameters", flush=True)
    trainer.fit(lm, datamodule=StandardLibrary(batch_size=args.batch_size), ckpt_path=args.resume)
    final = checkpoints / "final.ckpt"
    trainer.save_checkpoint(final, weights_only=False)
    if trainer.is_global_zero:
        weights = load_weights(final)
        model = DecoderLM(d_model=args.d_model, n_layers=args.layers)
        model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
        text = sample(model.eval(), args.prompt.encode(), num_bytes=200)
        print(f"\nThe model continues {args.prompt!r}:\n{text.decode(errors='replace')}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ("fit", "validate", "test", "predict"):
        LightningCLI(ByteLM, StandardLibrary)
    else:
        main(sys.argv[1:])
