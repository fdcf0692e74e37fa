# SPDX-License-Identifier: Apache-2.0
"""Reports as plain data, for `--json`."""

from dataclasses import asdict
from typing import Any

from lightning_3d.estimator.rank_traffic import rank_traffic
from lightning_3d.models.parameters import active_parameters, total_parameters
from lightning_3d.planner import PlanReport
from lightning_3d.planner.auto import runs
from lightning_3d.planner.rank import RankedPlan


def report_dict(report: PlanReport, top: int) -> dict[str, Any]:
    """The report: model, cluster, layouts, refusals."""
    return {
        "model": report.shape.name,
        "parameters": total_parameters(report.shape),
        "active_parameters": active_parameters(report.shape),
        "cluster": report.cluster.describe(),
        "world_size": report.cluster.world_size,
        "seq_len": report.workload.seq_len,
        "global_batch": report.workload.global_batch,
        "layouts_estimated": report.num_layouts,
        "layouts": [plan_dict(report, plan) for plan in report.ranked[:top]],
        "refusals": [{"kind": refusal.kind, "reason": refusal.reason} for refusal in report.refusals],
    }


def plan_dict(report: PlanReport, plan: RankedPlan) -> dict[str, Any]:
    """One layout: degrees, memory of each stage, time by cause, traffic by axis."""
    layout = plan.layout
    microbatches = layout.microbatches(report.workload)
    moved = rank_traffic(report.shape, report.workload, layout, layout.pp // 2)
    return {
        "layout": {**asdict(layout), "num_microbatches": microbatches},
        "runs_on_this_version": runs(layout, report.workload),
        "fits": plan.fits,
        "memory_bytes": [stage.to_dict() for stage in report.stages(layout)],
        "time": plan.time.to_dict(),
        "bubble_fraction": plan.time.bubble_fraction,
        "traffic_bytes": {axis: round(value) for axis, value in moved.items() if value},
        "cautions": list(plan.cautions),
    }
