# SPDX-License-Identifier: Apache-2.0
"""Rows of a table of published runs, read as model, work, layout and cluster.

Tables leave out what their authors took for granted (kernels of the time, networks, padding). What is assumed for
them is data below, each with its reason.
"""

import re
from collections.abc import Iterator, Mapping
from csv import DictReader
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_3d.errors import HardwareError, Lightning3DError
from lightning_3d.estimator.flops import model_flops_per_token
from lightning_3d.estimator.layout import (
    LOGITS_BYTES_PLAIN,
    STATE_BYTES,
    Layout,
    Recompute,
    StateBytes,
    Workload,
)
from lightning_3d.estimator.validate.row_shape import degree, number, shape_of_row
from lightning_3d.estimator.validate.work import TimedWork
from lightning_3d.hardware import Cluster, cluster_from_dict
from lightning_3d.shape import ModelShape

NETWORKS_GB_S: tuple[tuple[str, float], ...] = (
    (r"InternEvo", 6.25),
    (r"BigScience|BLOOM|Jean ?Zay|tr\d", 6.25),
    (r"Kempner", 50.0),
)
"""Network of a source for each GPU, where it is not the node's usual one: 4 x 100 Gb/s for 8 GPUs."""

LINKS_GB_S: tuple[tuple[str, float], ...] = (
    (r"slow intra-node link", 16.0),
    (r"(BigScience|BLOOM|tr11).* A100", 100.0),
)
"""Link inside a node, one way, where source, GPU or notes say that it is not the usual one: PCIe 3, and the 4 of 12
NVLinks of Jean Zay's A100 nodes."""
FIRST_ZERO_3_GB_S = 25.0
"""ZeRO-3 of 2021 gathered by broadcasts over one network card: its 768 and 1,536 GPUs ran as long a step, 16 GB/s."""
FIRST_GENERATION = r"SC'21|Korthikanti|vTrain|BigScience|BLOOM|tr\d"
"""Megatron-LM before flash attention: unfused scores, dropout, no overlap of data parallelism."""
EAGER = r"^(?!.*compile).*(torchtitan)"
"""Plain PyTorch without a compiler: every elementwise operation is its own kernel."""
PLAIN_LOSS = r"torchtitan|FSDP2|\(FSDP\)|AutoModel"
"""Trained with PyTorch's own cross entropy."""
LOGITS_BYTES_IN_PLACE = 4
"""llm-foundry's fused cross entropy (its default) overwrites the 16-bit logits with their gradient."""
DEEPSPEED = r"BigScience|DeepSpeed"
"""DeepSpeed's ZeRO-1 reduces gradients through a whole fp32 copy."""
MEGATRON = r"Megatron|NeMo|NVIDIA|vTrain"
"""Keeps fp32 gradients beside 16-bit weights; others keep 16-bit ones."""
BINARY_UNITS = ("GiB", "GiB (source prints MB)", "GiB (source MiB)")
MEMORY_KINDS: tuple[tuple[str, str], ...] = (
    ("max allocated", "last"),
    ("torch peak", "allocated"),
    ("FORMULA", "formula"),
    ("reserved", "reserved"),
    ("smi", "device"),
    ("as printed", "device"),
)
"""What a printed memory is compared with; training logs print the last rank's counters."""
ASSUMED: tuple[tuple[str, Mapping[str, str]], ...] = (
    (r"functional-test", {"vocab": "131073", "dropout": "yes"}),
)
"""What the tables of a source leave out: the vocabulary and the dropout of Megatron-LM's CI (their arguments)."""
DEVICE_CALIBRATION: tuple[tuple[str, str, float, float], ...] = (
    (r"BLOOM|tr11", "fp16", 1.16, 8.8),
    (r"BLOOM|tr11", "bf16", 1.40, 8.1),
)
"""Source, precision, scale, and GiB added, from allocated memory to what nvidia-smi shows on DeepSpeed runs of some
400 GPUs (fits on 70 and 19 BLOOM rows, formulas section 4); elsewhere fragmentation and one context."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row."""

    index: int
    source: str
    shape: ModelShape
    workload: Workload
    layout: Layout
    cluster: Cluster
    printed_parameters_b: str
    step_s: float | None
    memory_bytes: float | None
    memory_kind: str
    out_of_memory: bool
    states_recompute: bool
    """Whether the row says what is recomputed."""
    release: str
    """Software release that the row is of, where a source prints several."""
    identity: str
    """What the row says of model, work, layout and machine: rows that only repeat each other share it."""
    device_calibration: tuple[float, float] | None
    """Scale and GiB from allocated memory to nvidia-smi, where a framework's are known."""
    group: tuple[object, ...]
    """Rows with the same group did the same work on the same machines under different layouts."""

    def timed(self) -> TimedWork | None:
        """The row's step, if it was measured."""
        if self.step_s is None:
            return None
        return TimedWork(
            source=self.source,
            shape=self.shape,
            workload=self.workload,
            layout=self.layout,
            cluster=self.cluster,
            measured_s=self.step_s,
        )


def read_runs(path: Path) -> Iterator[Run]:
    """Rows that name a model's dimensions and a layout; others, and those that contradict themselves, are skipped."""
    with path.open(encoding="utf-8", newline="") as file:
        for index, row in enumerate(DictReader(file)):
            try:
                run = _run(index, row)
            except Lightning3DError:
                continue
            if run is not None:
                yield run


def _run(index: int, row: Mapping[str, str]) -> Run | None:
    for pattern, values in ASSUMED:
        if re.search(pattern, row["source"]):
            row = {**row, **{name: row.get(name) or value for name, value in values.items()}}
    shape = shape_of_row(row)
    gpus, seq_len = number(row, "n_gpus"), number(row, "seq")
    if shape is None or gpus is None or seq_len is None:
        return None
    cluster, layout = _cluster(row, int(gpus)), _layout(row, int(gpus))
    if cluster is None or layout is None:
        return None
    batch = int(number(row, "global_batch") or layout.dp * layout.microbatch_size)
    if batch < layout.dp:
        return None  # the source contradicts itself
    workload = _workload(row, int(seq_len), batch)
    unit = 2**30 if row.get("mem_unit") in BINARY_UNITS else 1e9
    printed = number(row, "peak_mem_gb")
    kind = next((kind for text, kind in MEMORY_KINDS if text in row.get("mem_kind", "")), "")
    model = (row["model"].split(" LoRA")[0], shape.num_layers, shape.hidden_size, shape.num_attention_heads)
    return Run(
        index=index,
        source=row["source"],
        shape=shape,
        workload=workload,
        layout=layout,
        cluster=cluster,
        printed_parameters_b=row.get("params_b", ""),
        step_s=_step_s(row, shape, workload, gpus)
        if row.get("micro_batch") or row.get("global_batch")
        else None,
        memory_bytes=printed * unit if printed and row.get("micro_batch") else None,
        memory_kind=kind,
        out_of_memory=row.get("outcome", "ok") != "ok",
        states_recompute=row.get("recompute", "") in ("none", "full")
        or "selective" in row.get("recompute", ""),
        release=_container(row),
        device_calibration=_device_calibration(row),
        identity=f"{row['source']}|{row['model']}|{shape.hidden_size}|{seq_len}|{row['gpu']}|{gpus}|{batch}|{layout}",
        group=(
            row["source"],
            *model,
            seq_len,
            row["gpu"],
            gpus,
            batch,
            row.get("precision"),
            _container(row),
        ),
    )


def _container(row: Mapping[str, str]) -> str:
    """NVIDIA's tables repeat a run for each software release."""
    found = re.search(r"\d\d\.\d\d(\.\d\d)? NeMo", row.get("notes", ""))
    return found[0] if found else ""


def _layout(row: Mapping[str, str], gpus: int) -> Layout | None:
    tp, pp, cp = degree(row, "tp"), degree(row, "pp"), degree(row, "cp")
    if not row.get("tp") or gpus % (tp * pp * cp):
        return None
    dp = gpus // (tp * pp * cp)
    stage, shard = _sharding(row.get("sharding", ""), dp, degree(row, "gpus_per_node"), tp)
    virtual, microbatch = degree(row, "interleave_v"), degree(row, "micro_batch")
    batch = int(number(row, "global_batch") or dp * microbatch)
    if pp > 1 and batch <= dp * microbatch:
        microbatch = max(
            1, batch // dp // pp
        )  # torchtitan prints a replica's batch; its pipeline cuts it in pp parts
    experts = degree(row, "ep")
    recompute = row.get("recompute", "")
    return Layout(
        pp=pp,
        dp_replicate=dp // shard,
        dp_shard=shard,
        cp=cp,
        tp=tp,
        ep=experts,
        zero_stage=stage,
        microbatch_size=microbatch,
        schedule="interleaved" if virtual > 1 and pp > 1 else "1f1b",
        virtual_stages=virtual if pp > 1 else 1,
        sequence_parallel=row.get("sp") != "no",
        recompute=_recompute(recompute),
        reshard_after_forward=pp == 1,
    )


def _recompute(text: str) -> Recompute:
    """`selective (per-op SAC)` is torchtitan's; `selective (core attention)` frees the scores."""
    if text == "full":
        return "full"
    return "selective" if "per-op" in text else "attention" if "att" in text else "none"


def _sharding(text: str, dp: int, gpus_per_node: int, tp: int) -> tuple[int, int]:
    """ZeRO stage and shard group of a printed sharding."""
    found = re.search(r"ZeRO-(\d)", text)
    stage = int(found[1]) if found else 3 if "FSDP" in text or "HSDP" in text else 1 if "opt" in text else 0
    named = re.search(r"(?:group|FSDP2) (\d+)", text)
    shard = int(named[1]) if named else max(1, gpus_per_node // tp) if "HSDP" in text else dp
    shard = min(shard, dp)
    return stage, shard if dp % shard == 0 else dp


def _workload(row: Mapping[str, str], seq_len: int, batch: int) -> Workload:
    source, precision = row["source"], row.get("precision", "").lower()
    first = re.search(FIRST_GENERATION, source) is not None or precision.startswith("fp16")
    selective = "selective" in row.get("recompute", "")
    matmul = (
        "nvfp4"
        if "nvfp4" in precision
        else "mxfp8"
        if "mx" in precision
        else "fp8"
        if "fp8" in precision
        else "bf16"
    )
    flash = not first or (selective and "Korthikanti" not in source)
    eager = re.search(EAGER, f"{precision} {source}") is not None
    return Workload(
        seq_len=seq_len,
        global_batch=batch,
        states=_states(row, precision),
        matmul=matmul,  # type: ignore[arg-type]
        attention="flash" if flash else "unfused",
        dropout=first or row.get("dropout") == "yes",
        fused=not eager,
        logits_bytes=_logits_bytes(source, row.get("sharding", ""), precision),
        overlap=not first,
        expert_overlap=not first,  # no table says; of Megatron-Bridge's recipes most do where exchanges are long
    )


def _logits_bytes(source: str, sharding: str, precision: str) -> float:
    """Bytes of a logit at the loss: overwritten in place, as plain PyTorch keeps them, or as Megatron does."""
    if "fsdp mp" in precision:
        return LOGITS_BYTES_IN_PLACE
    return LOGITS_BYTES_PLAIN if re.search(PLAIN_LOSS, f"{source} {sharding}") else 6


def _states(row: Mapping[str, str], precision: str) -> StateBytes:
    sharding = row.get("sharding", "")
    if "Korthikanti" in row["source"]:
        return STATE_BYTES["zero"]
    if "LoRA" in sharding or "LoRA" in row["model"]:
        return STATE_BYTES["frozen"]
    if "pure" in precision:
        return STATE_BYTES["bf16"]
    if "FSDP" in sharding or "HSDP" in sharding or "ZeRO-3" in sharding or "ZeRO-2" in sharding:
        return STATE_BYTES["fsdp2-mixed"]
    if "Bridge" in row["source"] and (degree(row, "ep") > 1 or "fp" in precision):
        # Its recipes reduce gradients in bf16, and those of experts keep bf16 moments (precision-aware optimizer).
        return replace(
            STATE_BYTES["megatron-bf16"], gradients=2, optimizer=8 if degree(row, "ep") > 1 else 12
        )
    if precision.startswith("fp16"):
        copy = 4 if re.search(DEEPSPEED, row["source"]) and _device_calibration(row) is None else 0
        return replace(STATE_BYTES["megatron-fp16"], gradients=2 + copy)
    return STATE_BYTES["megatron-bf16" if re.search(MEGATRON, row["source"]) else "zero"]


def _device_calibration(row: Mapping[str, str]) -> tuple[float, float] | None:
    for pattern, precision, scale, gib in DEVICE_CALIBRATION:
        if re.search(pattern, row["source"]) and row.get("precision", "").lower().startswith(precision):
            return scale, gib
    return None


def _cluster(row: Mapping[str, str], gpus: int) -> Cluster | None:
    per_node = min(degree(row, "gpus_per_node") if row.get("gpus_per_node") else 8, gpus)
    memory = int(number(row, "gpu_mem_gb") or 0)
    values: dict[str, object] = {
        "gpu": row["gpu"],
        "gpus_per_node": per_node,
        "num_nodes": max(1, gpus // per_node),
    }
    for pattern, rate in NETWORKS_GB_S:
        if re.search(pattern, row["source"]):
            values["network_gb_s"] = rate
            break
    for pattern, rate in LINKS_GB_S:
        if re.search(pattern, f"{row['source']} {row['gpu']} {row.get('notes')}"):
            values["link_gb_s"] = rate
            break
    if re.search(FIRST_GENERATION, row["source"]) and "ZeRO-3" in row.get("sharding", ""):
        values["network_gb_s"] = FIRST_ZERO_3_GB_S / per_node
    if (row["gpu"] == "A100" and memory == 40) or (row["gpu"] == "V100" and memory == 16):
        values["gpu"] = f"{row['gpu']}-{memory}"
    elif "96GB" in row.get("notes", "") or "94GB" in row.get("notes", ""):
        values["gpu"] = f"{row['gpu']}-96"
    try:
        return cluster_from_dict(values)
    except HardwareError:
        return None


def _step_s(row: Mapping[str, str], shape: ModelShape, workload: Workload, gpus: float) -> float | None:
    """The printed step, or what tokens/s or TFLOP/s say it was."""
    if number(row, "iter_time_s"):
        return number(row, "iter_time_s")
    tokens = workload.global_batch * workload.seq_len / gpus
    rate = number(row, "tokens_per_s_per_gpu")
    if rate:
        return tokens / rate
    teraflops = number(row, "tflops_per_gpu")
    if not teraflops or "hardware" in row.get("flops_kind", ""):
        return None
    causal = "NeMo" not in row["source"]
    return tokens * model_flops_per_token(shape, workload.seq_len, causal=causal) / (teraflops * 1e12)
