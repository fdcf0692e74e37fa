# SPDX-License-Identifier: Apache-2.0
"""Advice as people read it: a table, a line for an error, and the config that fits."""

from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_3d.advisor.advise import Advice
from lightning_3d.advisor.levers import NO_HELP
from lightning_3d.errors import PlanError
from lightning_3d.planner.lightning_config import STRATEGY, as_yaml
from lightning_3d.units import format_bytes

_SHOWN = ("parameters", "gradients", "optimizer", "gathered", "activations", "temporary")


def advice_table(advice: Advice, width: int = 130) -> str:
    """The decision order as a table, with what was on already, what saves nothing, and the first set that fits."""
    table = Table(title=headline(advice), title_justify="left", caption=NO_HELP, caption_justify="left")
    for column in ("", "lever", "set", "saves", "costs"):
        table.add_column(column, justify="right" if column == "saves" else "left", overflow="fold")
    for item in advice.advised:
        mark = "[fits]" if item.in_set and advice.fitting is not None else "[do]" if item.in_set else ""
        saves = f"{format_bytes(item.saving_bytes)}" if item.saving_bytes > 0 else "-"
        costs = item.cost if item.helps else item.refusal
        table.add_row(
            str(item.lever.group),
            item.lever.name,
            item.setting or "-",
            saves,
            f"{costs} {mark}".strip(),
            style="bold" if item.in_set else "",
        )
    console = Console(width=width, color_system=None, force_terminal=False, markup=False)
    with console.capture() as capture:
        console.print(table)
        console.print(outcome(advice))
    return capture.get()


def headline(advice: Advice) -> str:
    """What happened, where, and why."""
    needed = (
        f"the fullest rank needs about {format_bytes(advice.needed_bytes)} of {format_bytes(advice.limit_bytes)}:"
        f" {advice.bound_share:.0%} are {advice.bound}"
    )
    failure = advice.failure
    if failure is None:
        return f"This run will not fit: {needed}."
    alive = ", ".join(
        f"{name} {format_bytes(failure.num_bytes[name])}" for name in _SHOWN if failure.num_bytes.get(name)
    )
    return (
        f"Out of memory on rank {failure.rank} in {failure.phase} of {failure.block}"
        + (f", with {alive} alive" if alive else "")
        + f"; {needed}."
    )


def outcome(advice: Advice) -> str:
    """The set in a sentence."""
    names = " + ".join(item.lever.name for item in advice.advised if item.in_set)
    if not names:
        return "Nothing here makes it fit: take more devices, or a smaller model."
    verb = "fits" if advice.fitting is not None else "comes closest, and does not fit"
    needed, saved = format_bytes(advice.best.needed_bytes()), format_bytes(advice.saving_bytes)
    return f"{names} {verb}: about {needed}, {saved} less."


def note_of(advice: Advice, config: str | None) -> str:
    """The advice in a line, for the error; it reaches the other ranks with it."""
    first = advice.first
    start = f"First: {first.lever.name} ({first.setting})." if first is not None else ""
    return " ".join(part for part in (headline(advice), start, outcome(advice), config) if part)


def config_of(advice: Advice) -> dict[str, Any] | None:
    """The `trainer` (and `data`) section of the set, for LightningCLI; None if the engine does not have it."""
    run = advice.best
    try:
        plan = run.layout.to_plan(run.workload)
    except PlanError:
        return None
    config: dict[str, Any] = {
        "trainer": {
            "devices": min(run.layout.world_size, run.ranks_per_node),
            "num_nodes": max(1, run.layout.world_size // run.ranks_per_node),
            "precision": run.precision,
            "accumulate_grad_batches": run.accumulate,
            "strategy": {"class_path": STRATEGY, "init_args": plan.to_dict()},
        }
    }
    if run.datamodule_has_batch_size:
        config["data"] = {"batch_size": run.batch_size}
    return config


def yaml_of(advice: Advice) -> str | None:
    """The config as YAML, with its reasons as comments; None if the engine does not have it."""
    config = config_of(advice)
    if config is None:
        return None
    run = advice.best
    comments = [headline(advice), outcome(advice)]
    if not run.datamodule_has_batch_size and run.batch_size != advice.run.batch_size:
        comments.append(f"Give the data loader batch_size={run.batch_size}.")
    return as_yaml(config, comments)
