# SPDX-License-Identifier: Apache-2.0
"""Measured steps of small GPT models on one node of A100 (vTrain, MICRO 2024), read as model, work and layout."""

from collections.abc import Iterator
from csv import DictReader
from dataclasses import dataclass
from pathlib import Path

from lightning_3d.estimator.layout import STATE_BYTES, Layout, Workload
from lightning_3d.estimator.validate.work import TimedWork
from lightning_3d.hardware import load_cluster
from lightning_3d.shape import ModelShape

GPT2_VOCABULARY = 50257


@dataclass(frozen=True, kw_only=True)
class SingleNodeRun:
    """One measured step."""

    identity: str
    group: tuple[str, ...]
    """Rows with the same group did the same work on as many GPUs."""
    work: TimedWork
    """What was run, and how long it took."""


def read_single_node(path: Path) -> Iterator[SingleNodeRun]:
    """Rows of `vtrain_single_node.csv`: Megatron-LM of 2021, unfused attention, no recomputation, no overlap."""
    with path.open(encoding="utf-8", newline="") as file:
        for row in DictReader(file):
            numbers = {name: int(row[name]) for name in row if row[name].isdigit()}
            shape = ModelShape(
                num_layers=numbers["layers"],
                hidden_size=numbers["hidden"],
                num_attention_heads=numbers["heads"],
                num_key_value_heads=numbers["heads"],
                intermediate_size=4 * numbers["hidden"],
                vocab_size=GPT2_VOCABULARY,
                tied_embeddings=True,
                gated_mlp=False,
                rms_norm=False,
            )
            workload = Workload(
                seq_len=numbers["seq"],
                global_batch=numbers["global_batch"],
                states=STATE_BYTES["megatron-fp16"],
                matmul="fp16",
                attention="unfused",
                dropout=True,
                overlap=False,
            )
            layout = Layout(
                pp=numbers["pp"],
                dp_shard=numbers["dp"],
                tp=numbers["tp"],
                zero_stage=0,
                microbatch_size=numbers["micro_batch"],
                sequence_parallel=False,
            )
            keys = ("n_gpus", "hidden", "heads", "layers", "seq", "global_batch")
            yield SingleNodeRun(
                identity=",".join(row.values()),
                group=tuple(row[name] for name in keys),
                work=TimedWork(
                    source="vTrain single node",
                    shape=shape,
                    workload=workload,
                    layout=layout,
                    cluster=load_cluster(f"{numbers['n_gpus']}xA100-80"),
                    measured_s=float(row["iter_time_s"]),
                ),
            )
