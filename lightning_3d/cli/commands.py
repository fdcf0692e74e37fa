# SPDX-License-Identifier: Apache-2.0
"""What each command does."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_3d.cli.check import check
from lightning_3d.cli.convert import convert
from lightning_3d.cli.html import write_page
from lightning_3d.cli.plain import plan_dict, report_dict
from lightning_3d.errors import PlanError
from lightning_3d.estimator import STATE_BYTES, Layout
from lightning_3d.estimator.calibration import calibrate_from_file
from lightning_3d.estimator.layout import OFFLOAD_OF_PLAN
from lightning_3d.hardware import Cluster, cluster_of_machine, known_gpus, load_cluster
from lightning_3d.levers import RecomputeChoice, parse_recompute
from lightning_3d.models import known_models, load_shape
from lightning_3d.plan import ParallelPlan
from lightning_3d.planner import PlanReport, SearchSpace, plan_for
from lightning_3d.planner.auto import only_runnable
from lightning_3d.planner.lightning_config import write_config
from lightning_3d.planner.rank import RankedPlan
from lightning_3d.planner.report import memory_table, report_of, time_table, traffic_table
from lightning_3d.serving import plan_serving
from lightning_3d.shape import ModelShape

PIPED_WIDTH = 150
"""Columns of tables where the output is no terminal."""
USUAL_BATCH_TOKENS = 1 << 20
"""Tokens of a step where no batch is given: what mid-sized models are pre-trained with."""


def plan(options: Any) -> int:
    """Ranks layouts; prints them, and writes what was asked for."""
    shape, cluster = load_shape(options.model), _cluster(options.cluster)
    if options.serve:
        return _serve(options, shape, cluster)
    report = _report(
        options, shape, cluster, space=only_runnable(SearchSpace()) if options.runnable else None
    )
    if options.json:
        print(json.dumps(report_dict(report, options.top), indent=2))
    else:
        _console().print(report_of(report, options.top))
    if options.html and report.ranked:
        write_page(report, Path(options.html))
    if options.yaml:
        chosen = write_config(
            _report(options, shape, cluster, space=only_runnable(SearchSpace())), Path(options.yaml)
        )
        if not options.json:
            _console().print(f"Wrote {options.yaml}: {chosen.layout.describe()}")
    return 0 if report.ranked else 1


def explain(options: Any) -> int:
    """Judges one layout."""
    shape, cluster = load_shape(options.model), _cluster(options.cluster)
    report = _report(options, shape, cluster, space=SearchSpace())
    layout = _layout(options, cluster)
    _check(layout, shape, options.seq, report.workload.global_batch)
    judged = report.planner.judge(layout)
    if options.json:
        print(json.dumps(plan_dict(report, judged), indent=2))
        return 0
    console = _console()
    console.print(f"{layout.describe()}: {_verdict(report, judged)}")
    console.print(memory_table(report.stages(layout)), time_table(judged), traffic_table(report, judged))
    for caution in judged.cautions:
        console.print(f"caution: {caution}")
    return 0


def models(options: Any) -> int:
    """Lists known models."""
    print("\n".join(known_models()))
    return 0


def gpus(options: Any) -> int:
    """Lists known GPUs."""
    print("\n".join(known_gpus()))
    return 0


COMMANDS: Mapping[str, Callable[[Any], int]] = {
    "plan": plan,
    "explain": explain,
    "models": models,
    "gpus": gpus,
    "convert": convert,
    "check": check,
}
"""Commands by name."""


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)


def _cluster(name: str) -> Cluster:
    return cluster_of_machine() if name == "machine" else load_cluster(name)


def _fixed(options: Any) -> dict[str, int]:
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    return {name: options[name] for name in names if options[name]}


def _report(
    options: Any, shape: ModelShape, cluster: Cluster, space: SearchSpace | None = None
) -> PlanReport:
    if options.states and options.states not in STATE_BYTES:
        raise PlanError(f"--states {options.states!r} is unknown. Use one of {', '.join(STATE_BYTES)}.")
    if options.calibrate:
        cluster = calibrate_from_file(shape, cluster, Path(options.calibrate))
    return plan_for(
        shape,
        cluster,
        seq_len=options.seq,
        global_batch=options.global_batch or _usual_batch(options.seq, cluster),
        precision=options.precision,
        compiled=options.compiled,
        states=STATE_BYTES[options.states] if options.states else None,
        fixed=None if "micro_batch" in options else _fixed(options),
        space=space,
    )


def _usual_batch(seq_len: int, cluster: Cluster) -> int:
    """A multiple of the ranks, of about `USUAL_BATCH_TOKENS` tokens."""
    world = cluster.world_size
    return max(1, USUAL_BATCH_TOKENS // seq_len // world) * world


def _layout(options: Any, cluster: Cluster) -> Layout:
    degrees = {"pp": 1, "cp": 1, "tp": 1, "ep": 1, "dp_replicate": 1, **_fixed(options)}
    taken = degrees["pp"] * degrees["cp"] * degrees["tp"] * degrees["dp_replicate"]
    degrees.setdefault("dp_shard", max(1, cluster.world_size // taken))
    only_estimated = options.recompute == "attention"
    again = RecomputeChoice(mode="full") if only_estimated else parse_recompute(options.recompute)
    offload = OFFLOAD_OF_PLAN.get(options.offload, options.offload)
    if offload not in ("none", "optimizer", "parameters"):
        raise PlanError(
            f"--offload {offload!r} is unknown. Use none, optimizer, or parameters (a plan's cpu)."
        )
    layout = Layout(
        pp=degrees["pp"],
        dp_replicate=degrees["dp_replicate"],
        dp_shard=degrees["dp_shard"],
        cp=degrees["cp"],
        tp=degrees["tp"],
        ep=degrees["ep"],
        microbatch_size=options.micro_batch,
        schedule=options.schedule,
        virtual_stages=options.virtual_stages,
        recompute="attention" if only_estimated else again.mode,
        recompute_fraction=again.fraction,
        recompute_budget_bytes=again.budget_bytes or 0.0,
        offload=offload,
        zero_stage=options.zero_stage,
        reshard_after_forward=degrees["pp"] == 1 or offload == "parameters",
    )
    if layout.world_size != cluster.world_size:
        raise PlanError(
            f"{layout.describe()} has {layout.world_size} ranks, but {cluster.describe()} has {cluster.world_size}."
            " Change a degree, or leave dp-shard out to take the rest."
        )
    return replace(layout, zero_stage=layout.zero_stage if layout.shard_group > 1 else 0)


def _check(layout: Layout, shape: ModelShape, seq_len: int, global_batch: int) -> None:
    """Refuses a layout that could not be built, in the words of the plan."""
    plan = ParallelPlan(
        pp=layout.pp,
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        tp=layout.tp,
        schedule="interleaved" if layout.virtual_stages > 1 else "1f1b",
        virtual_stages=layout.virtual_stages,
    )
    plan.check_model(shape, seq_len)
    if shape.experts is not None and shape.experts.num_experts % layout.ep:
        raise PlanError(
            f"ep={layout.ep} does not divide num_experts={shape.experts.num_experts}. Use a divisor of it."
        )
    if global_batch % (layout.dp * layout.microbatch_size):
        raise PlanError(
            f"{layout.dp} replicas with microbatches of {layout.microbatch_size} do not divide the global batch of"
            f" {global_batch}. Use a multiple of {layout.dp * layout.microbatch_size}."
        )


def _verdict(report: PlanReport, judged: RankedPlan) -> str:
    needed, budget = judged.memory.device_bytes / 2**30, report.planner.budget_bytes / 2**30
    fits = (
        f"fits ({needed:.1f} of {budget:.1f} GiB)"
        if judged.fits
        else f"does not fit: {needed:.1f} of {budget:.1f} GiB"
    )
    speed = f"{judged.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {judged.time.mfu:.1%}"
    if not report.ranked:
        return f"{fits}; {speed}"
    loss = 1 - judged.tokens_per_s_per_gpu / report.best.tokens_per_s_per_gpu
    return f"{fits}; {speed}, {loss:.0%} below the best layout ({report.best.layout.describe()})"


def _serve(options: Any, shape: ModelShape, cluster: Cluster) -> int:
    advice = plan_serving(shape, cluster, context=options.context, concurrency=options.concurrency)
    print(json.dumps(advice.to_dict(), indent=2) if options.json else advice.text())
    return 0
