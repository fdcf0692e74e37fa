# SPDX-License-Identifier: Apache-2.0
"""Measured memory of Megatron-LM's own CI runs, read as model, work and layout.

The runs state every argument, so nothing is assumed but the size of a job (8 GPUs, or one node where the case says
so). Cases with features that this package does not estimate are left out by name.
"""

import json
from collections.abc import Iterator, Mapping
from csv import DictReader
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_3d.estimator.layout import STATE_BYTES, Layout, Workload
from lightning_3d.estimator.memory import MemoryModel
from lightning_3d.shape import ExpertShape, ModelShape

FAMILIES = ("gpt", "moe")
LEFT_OUT = (
    "--multi-latent-attention",
    "--mtp-num-layers",
    "--fp8-format",
    "--perform-rl-step",
    "--export-kd-teacher-load",
    "--rerun-mode",
    "--cross-entropy-loss-fusion",
    "--num-distributed-optimizer-instances",
    "--decoder-first-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--defer-embedding-wgrad-compute",
)
"""Arguments whose cases are not estimated: other attention, extra heads, quantized weights, other losses, uneven
pipelines, optimizers sharded over a part of the ranks."""
VOCABULARIES = {"nemotron_2_256k": 256000, "multiMixV8": 131072, "Llama2Tokenizer": 32000}
"""Rows of the tokenizers that the arguments name; GPT-2's otherwise."""
GPT2_VOCABULARY = 50257
OLD_CONTAINERS = "dracooci"
"""Result files of an older container, in which attention was unfused by default (its rows match that to 0.1 %)."""
JOB_SIZE, GB200_NODE = 8, 4
BYTES_PER_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class GoldenRun:
    """One measured case."""

    case: str
    predicted_bytes: float
    measured_bytes: float


def read_golden(path: Path) -> Iterator[GoldenRun]:
    """Cases of a table of golden values that this package estimates: memory of the last pipeline stage."""
    with path.open(encoding="utf-8", newline="") as file:
        for row in DictReader(file):
            arguments = json.loads(row["model_args_json"])
            if not _is_estimated(row, arguments):
                continue
            shape, workload, layout = _shape(row, arguments), _workload(row, arguments), _layout(row)
            estimate = MemoryModel(shape, workload, vocab_multiple=128).stage(layout, layout.pp - 1)
            yield GoldenRun(
                case=f"{row['case']} {row['file']}",
                predicted_bytes=estimate.allocated_bytes,
                measured_bytes=float(row["max_alloc_bytes"]),
            )


def _is_estimated(row: Mapping[str, str], arguments: Mapping[str, Any]) -> bool:
    known = (
        row["family"] in FAMILIES and row["fsdp"] != "True" and bool(row["layers"] and row["global_batch"])
    )
    return known and bool(row["max_alloc_bytes"]) and not any(name in arguments for name in LEFT_OUT)


def _integer(text: str, default: int = 0) -> int:
    return int(float(text)) if text else default


def _vocabulary(arguments: Mapping[str, Any]) -> int:
    if "--vocab-size" in arguments:
        return int(arguments["--vocab-size"])
    text = f"{arguments.get('--tokenizer-model')} {arguments.get('--tokenizer-type')}"
    return next((size for name, size in VOCABULARIES.items() if name in text), GPT2_VOCABULARY)


def _shape(row: Mapping[str, str], arguments: Mapping[str, Any]) -> ModelShape:
    hidden, heads = _integer(row["hidden"]), _integer(row["heads"])
    width = _integer(row["ffn"], 4 * hidden)
    bias = "--disable-bias-linear" not in arguments
    learned = arguments.get("--position-embedding-type") != "rope"
    head_dim = int(arguments.get("--kv-channels", hidden // heads))
    return ModelShape(
        num_layers=_integer(row["layers"]),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=_integer(row["kv_heads"], heads),
        head_dim=head_dim,
        intermediate_size=width,
        vocab_size=_vocabulary(arguments),
        tied_embeddings=row["untied"] != "True",
        gated_mlp=row["swiglu"] == "True",
        rms_norm=arguments.get("--normalization") == "RMSNorm",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        qk_norm_size=2 * head_dim if "--qk-layernorm" in arguments else 0,
        learned_positions=int(arguments["--max-position-embeddings"]) if learned else 0,
        experts=_experts(row, arguments, width),
    )


def _experts(row: Mapping[str, str], arguments: Mapping[str, Any], width: int) -> ExpertShape | None:
    if not row["experts"]:
        return None
    return ExpertShape(
        num_experts=_integer(row["experts"]),
        experts_per_token=_integer(row["topk"], 1),
        intermediate_size=_integer(row["moe_ffn"], width),
        shared_intermediate_size=int(arguments.get("--moe-shared-expert-intermediate-size", 0)),
        expert_bias="--disable-bias-linear" not in arguments,
    )


def _workload(row: Mapping[str, str], arguments: Mapping[str, Any]) -> Workload:
    backend = arguments.get("--attention-backend", "auto")
    unfused = backend == "unfused" or row["transformer_impl"] == "local"
    unfused = unfused or (backend == "auto" and OLD_CONTAINERS in row["file"])
    states = {"bf16": "megatron-bf16", "fp16": "megatron-fp16"}.get(row["precision"], "fp32")
    return Workload(
        seq_len=_integer(row["seq"], int(arguments["--max-position-embeddings"])),
        global_batch=_integer(row["global_batch"]),
        states=STATE_BYTES[states],
        attention="unfused" if unfused and "--use-flash-attn" not in arguments else "flash",
        dropout=float(arguments.get("--hidden-dropout", 0.1)) > 0,
    )


def _layout(row: Mapping[str, str]) -> Layout:
    tp, pp, cp = (_integer(row[name], 1) for name in ("tp", "pp", "cp"))
    world = GB200_NODE if row["gpu"] == "GB200" and "1node" in row["case"] else JOB_SIZE
    chunk = _integer(row["vp_layers"])
    virtual = _integer(row["layers"]) // pp // chunk if chunk else 1
    recompute = row["recompute"]
    return Layout(
        pp=pp,
        dp_shard=max(1, world // (tp * pp * cp)),
        cp=cp,
        tp=tp,
        ep=_integer(row["ep"], 1),
        expert_tp=_integer(row["etp"], tp) if row["experts"] else 1,
        zero_stage=1 if row["dist_opt"] == "True" else 0,
        microbatch_size=_integer(row["micro_batch"], 1),
        schedule="interleaved" if virtual > 1 else "1f1b",
        virtual_stages=virtual,
        sequence_parallel=row["sp"] == "True",
        recompute="none" if not recompute else "attention" if recompute == "selective" else "full",
    )
