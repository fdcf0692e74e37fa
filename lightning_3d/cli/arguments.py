# SPDX-License-Identifier: Apache-2.0
"""Arguments of the commands."""

from jsonargparse import ArgumentParser

from lightning_3d.cli.run import RUNS
from lightning_3d.estimator.layout import SCHEDULES, STATE_BYTES

DEGREES = ("pp", "dp-replicate", "dp-shard", "cp", "tp", "ep")


def build_parser() -> ArgumentParser:
    """The parser with all commands."""
    parser = ArgumentParser(
        prog="lightning-3d",
        description="Layouts for 3D-parallel training, before any GPU runs; and the training.",
    )
    commands = parser.add_subcommands(required=True)
    for name in RUNS:
        commands.add_subcommand(
            name, ArgumentParser(), help=f"LightningCLI: {name} what a YAML file describes"
        )
    commands.add_subcommand("plan", _plan(), help="rank the layouts of a model on a cluster")
    commands.add_subcommand("explain", _explain(), help="judge one layout: memory, traffic, time, cautions")
    commands.add_subcommand(
        "models", ArgumentParser(), help="list the models whose dimensions ship with the package"
    )
    commands.add_subcommand("gpus", ArgumentParser(), help="list the known GPUs")
    commands.add_subcommand(
        "convert", _convert(), help="a checkpoint to safetensors, or Hugging Face weights to a checkpoint"
    )
    commands.add_subcommand(
        "check", _check(), help="measure ranks and links, here or under torchrun, and name what is slow"
    )
    return parser


def _check() -> ArgumentParser:
    parser = ArgumentParser()
    for degree in ("pp", "dp-replicate", "dp-shard", "tp"):
        parser.add_argument(f"--{degree}", type=int, default=0, help=f"{degree} of the mesh; as in training")
    parser.add_argument(
        "--world", type=int, default=0, help="processes to start, without a launcher; the GPUs if 0"
    )
    parser.add_argument("--on-slow", type=str, default="warn", help="warn, or end with an error")
    parser.add_argument(
        "--slow-below", type=float, default=0.6, help="share of the peers' median that is slow"
    )
    parser.add_argument("--least-tflops", type=float, default=0.0, help="that every rank must reach")
    parser.add_argument("--least-gb-s", type=float, default=0.0, help="that every link must reach")
    parser.add_argument("--slow-rank", type=int, default=-1, help="to try it out: a rank to slow down")
    parser.add_argument("--slow-times", type=float, default=4.0, help="how many times as long it takes")
    parser.add_argument(
        "--json", type=bool, default=False, nargs="?", const=True, help="print JSON instead of tables"
    )
    return parser


def _convert() -> ArgumentParser:
    parser = ArgumentParser()
    parser.add_argument(
        "source", type=str, help="checkpoint folder, Hugging Face folder, safetensors or torch file"
    )
    parser.add_argument(
        "target",
        type=str,
        help="folder of safetensors or of a checkpoint; NAME.ckpt for a file of Lightning's",
    )
    parser.add_argument(
        "--prefix", type=str, default="model.", help="what the LightningModule puts before the model's names"
    )
    parser.add_argument("--dtype", type=str, default="", help="of the safetensors; as stored if left out")
    parser.add_argument("--max-file-gb", type=float, default=5.0, help="size of a safetensors file")
    parser.add_argument("--config", type=str, default="", help="folder whose config and tokenizer are copied")
    return parser


def _work(parser: ArgumentParser) -> None:
    parser.add_argument("--model", type=str, required=True, help="name, hub name, or config.json")
    parser.add_argument(
        "--cluster", type=str, required=True, help="8xH100, 4x8xA100-80@200, NVL72, a file, `machine`"
    )
    parser.add_argument("--seq", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument(
        "--global-batch", type=int, default=0, help="sequences of a step; 1 M tokens or so if left out"
    )
    parser.add_argument("--precision", type=str, default="bf16", help="bf16, fp16, fp32, fp8, mxfp8 or nvfp4")
    parser.add_argument("--compiled", type=bool, default=False, nargs="?", const=True,
                        help="blocks run compiled or with fused kernels: fewer activations")  # fmt: skip
    parser.add_argument("--states", type=str, default="", help=f"bytes of states: {', '.join(STATE_BYTES)}")
    parser.add_argument(
        "--calibrate", type=str, default="", help="JSON of a measured run: scales time and memory"
    )
    for degree in DEGREES:
        parser.add_argument(f"--{degree}", type=int, default=0, help=f"fix {degree}")
    parser.add_argument(
        "--json", type=bool, default=False, nargs="?", const=True, help="print JSON instead of tables"
    )


def _plan() -> ArgumentParser:
    parser = ArgumentParser()
    _work(parser)
    parser.add_argument("--top", type=int, default=8, help="layouts to show")
    parser.add_argument("--runnable", type=bool, default=False, nargs="?", const=True,
                        help="only layouts that this version of the engine runs")  # fmt: skip
    parser.add_argument(
        "--yaml", type=str, default="", help="write a LightningCLI config of the best runnable layout"
    )
    parser.add_argument(
        "--html", type=str, default="", help="write a page with memory, rank grid and trade-off"
    )
    parser.add_argument(
        "--serve", type=bool, default=False, nargs="?", const=True, help="plan serving instead"
    )
    parser.add_argument(
        "--context", type=int, default=8192, help="--serve: tokens of a request, prompt and answer"
    )
    parser.add_argument(
        "--concurrency", type=int, default=0, help="--serve: requests at once; as many as fit if 0"
    )
    return parser


def _explain() -> ArgumentParser:
    parser = ArgumentParser()
    _work(parser)
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences of a microbatch")
    parser.add_argument("--schedule", type=str, default="1f1b", help=", ".join(SCHEDULES))
    parser.add_argument("--virtual-stages", type=int, default=1, help="stages a rank")
    parser.add_argument(
        "--recompute",
        type=str,
        default="none",
        help="none, attention, selective, full, a share of the blocks (0.5), or what activations may take (2GiB)",
    )
    parser.add_argument(
        "--offload", type=str, default="none", help="none, optimizer, or parameters (a plan's `cpu`)"
    )
    parser.add_argument(
        "--zero-stage", type=int, default=3, help="what is sharded over dp-shard: 0, 1, 2 or 3"
    )
    return parser
