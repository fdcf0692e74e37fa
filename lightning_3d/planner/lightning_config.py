# SPDX-License-Identifier: Apache-2.0
"""The chosen layout as the config that runs it: `python train.py fit --config out.yaml` with LightningCLI."""

import json
from pathlib import Path
from typing import Any

from lightning_3d.errors import PlanError
from lightning_3d.planner.rank import PlanReport, RankedPlan

STRATEGY = "lightning_3d.ThreeDStrategy"
LIGHTNING_PRECISION = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true"}


def write_config(report: PlanReport, path: Path) -> RankedPlan:
    """Writes the config of the best layout that this version of the engine runs.

    Returns:
        The layout that was written.

    Raises:
        PlanError: none of the layouts that fit can be run.
    """
    for plan in report.ranked:
        config = trainer_config(report, plan)
        if config is not None:
            path.write_text(as_yaml(config, _comments(report, plan)), encoding="utf-8")
            return plan
    if not report.ranked:
        raise PlanError(f"nothing to write: {report.nothing_fits()}")
    raise PlanError(
        f"none of the {len(report.ranked)} layouts that fit can be run by this version."
        " Plan with --runnable to see those that can, or fix --cp 1 --ep 1."
    )


def trainer_config(report: PlanReport, plan: RankedPlan) -> dict[str, Any] | None:
    """The `trainer` section of a LightningCLI config, or None if the engine does not have the layout."""
    layout = plan.layout
    try:
        parallel = layout.to_plan(report.workload)
    except PlanError:
        return None
    microbatches = layout.microbatches(report.workload)
    accumulate = microbatches if layout.pp == 1 else 1
    return {
        "trainer": {
            "accelerator": "cpu" if report.cluster.gpu.name == "CPU" else "auto",
            "devices": report.cluster.gpus_per_node,
            "num_nodes": report.cluster.num_nodes,
            "precision": LIGHTNING_PRECISION.get(report.workload.matmul, "bf16-mixed"),
            "accumulate_grad_batches": accumulate,
            "strategy": {"class_path": STRATEGY, "init_args": parallel.to_dict()},
        }
    }


def batch_size(report: PlanReport, plan: RankedPlan) -> int:
    """Sequences of the data loader's batch, on each replica."""
    layout = plan.layout
    return layout.microbatch_size if layout.pp == 1 else report.workload.replica_batch(layout.dp)


def _comments(report: PlanReport, plan: RankedPlan) -> list[str]:
    return [
        f"{report.shape.name or 'model'} on {report.cluster.describe()}: {plan.layout.describe()}",
        (
            f"estimate: {plan.memory.device_bytes / 2**30:.1f} GiB, {plan.time.step_s:.2f} s a step,"
            f" {plan.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {plan.time.mfu:.1%}"
        ),
        f"give the data loader batch_size={batch_size(report, plan)} (sequences of each data-parallel replica)",
    ]


def as_yaml(config: dict[str, Any], comments: list[str]) -> str:
    """A config as YAML below lines of comments."""
    lines = [f"# {comment}" for comment in comments]
    return "\n".join([*lines, *_yaml_lines(config, 0)]) + "\n"


def _yaml_lines(values: dict[str, Any], depth: int) -> list[str]:
    """Nested mappings of scalars, which is all that a config of ours holds (JSON scalars are YAML)."""
    lines = []
    for key, value in values.items():
        indent = "  " * depth
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", *_yaml_lines(value, depth + 1)]
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}")
    return lines
