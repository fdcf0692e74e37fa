# SPDX-License-Identifier: Apache-2.0
"""Time of a training step under tensor parallelism: ours against torch's `parallelize_module`, on gloo.

    python benchmarks/tp_overhead.py [--tp 2] [--steps 40] [--dim 64] [--length 64]

The sizes are small, so that what is timed is the work around the matrix products. Both sides run in the same
processes, in turn, and the medians are compared; a ratio below 1 means that ours is faster.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.harness import run_ranks
from tests.models import Decoder, decoder, tokens
from tests.tensor.parity import parallelize

SIZES = {"n_heads": 8, "n_kv_heads": 8, "n_layers": 4, "vocab_size": 256}


def torch_tp(model: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """The plan that torch's own tutorial uses, with a vocab-parallel embedding and loss."""
    outside = Shard(1) if sequence_parallel else Replicate()
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
        "output": ColwiseParallel(input_layouts=outside, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence_parallel:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)
    block_plan: dict[str, object] = {
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
        "attention.wo": RowwiseParallel(output_layouts=outside),
        "feed_forward.w2": RowwiseParallel(output_layouts=outside),
    }
    if sequence_parallel:
        block_plan["attention_norm"] = block_plan["ffn_norm"] = SequenceParallel()
        block_plan["attention"] = PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        )
        block_plan["feed_forward"] = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
    for layer in model.layers:
        parallelize_module(layer, mesh, block_plan)
        layer.attention.n_heads //= mesh.size()
        layer.attention.n_kv_heads //= mesh.size()


def time_steps(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each step; the steps take turns, so that a busy machine slows all of them."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(repeats + 5):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            if index >= 5:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(
    tp_size: int, dim: int, length: int, repeats: int, *, sequence_parallel: bool
) -> dict[str, float]:
    """The body of a rank."""
    ids, labels = tokens(batch=2, length=length, vocab=SIZES["vocab_size"])
    options = {**SIZES, "dim": dim, "hidden_dim": 4 * dim}
    mesh = init_device_mesh("cpu", (tp_size,), mesh_dim_names=("tp",))
    theirs = decoder(**options)
    torch_tp(theirs, mesh, sequence_parallel=sequence_parallel)
    ours = decoder(**options)
    tp, _ = parallelize(ours, tp_size, sequence_parallel=sequence_parallel)

    def run_ours() -> None:
        F.cross_entropy(ours(ids).flatten(0, 1), labels.flatten()).backward()
        tp.sum_partial_gradients()
        ours.zero_grad()

    def run_theirs() -> None:
        with loss_parallel():
            F.cross_entropy(theirs(ids).flatten(0, 1), labels.flatten()).backward()
        theirs.zero_grad()

    return time_steps({"ours": run_ours, "torch": run_theirs}, repeats)


def main() -> None:
    """Prints one line for each way of tensor parallelism."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for sequence_parallel in (False, True):
        results = run_ranks(
            args.tp,
            lambda sp=sequence_parallel: measure(
                args.tp, args.dim, args.length, args.steps, sequence_parallel=sp
            ),
            timeout_s=300,
        )
        ours, theirs = (max(result[name] for result in results) for name in ("ours", "torch"))
        print(
            f"tp={args.tp} sequence_parallel={sequence_parallel!s:5}  ours {ours * 1e3:7.2f} ms"
            f"  torch {theirs * 1e3:7.2f} ms  ratio {ours / theirs:.2f}"
        )


if __name__ == "__main__":
    main()
