# SPDX-License-Identifier: Apache-2.0
"""`LinkCheck`: ranks and links are measured before training, and what is slow is named."""

import json
from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console
from typing_extensions import override

from lightning_3d.callbacks.context import log_scalars, output_folder, topology_of
from lightning_3d.errors import LinkError
from lightning_3d.profiling.link_check import OnSlow, check_links, refuse_slow
from lightning_3d.profiling.link_report import Limits, LinkReport, axis_table, rank_table


class LinkCheck(Callback):
    """Measures, before training, the matrix products of every rank and the links along every mesh axis.

    Takes a second or two: all-reduce, all-gather and reduce-scatter of each axis (algorithm and bus bandwidth), transfers
    between neighbours and between pipeline stages, latency of small messages. Each rank, link and group is compared
    with the median of its peers; what is slow is named on rank 0 (`rank 5 on b: 48 GB/s, median 386`). Works with every
    strategy and backend. Rank 0 prints two tables, writes `link_check.json` and logs the medians.

    Args:
        on_slow: `warn` of what is slow, or end the run with an `error`, on all ranks.
        slow_below: What is below this share of the median of its peers is slow.
        least_tflops: A rank below this many TFLOP/s is slow, whatever its peers reach.
        least_gb_s: A link, or the bus bandwidth of an axis, below this many GB/s is slow.
        dirpath: Where the JSON goes; beside the logs if None.
        print_tables: Whether rank 0 prints the tables.
        slowed_ranks: To see what a slow rank looks like: rank -> how many times as long everything takes there.

    Attributes:
        report: What was measured, the same on every rank; None before.
    """

    def __init__(
        self,
        on_slow: OnSlow = "warn",
        slow_below: float = 0.6,
        least_tflops: float = 0.0,
        least_gb_s: float = 0.0,
        dirpath: str | Path | None = None,
        print_tables: bool = True,
        slowed_ranks: Mapping[int, float] | None = None,
    ) -> None:
        if on_slow not in ("warn", "error"):
            raise LinkError(f"on_slow={on_slow!r} is unknown. Use 'warn' or 'error'.")
        if not 0 <= slow_below < 1:
            raise LinkError(f"slow_below={slow_below} is no share of a median. Use a number from 0 to below 1.")
        self.on_slow: OnSlow = on_slow
        self.limits = Limits(slow_below=slow_below, least_tflops=least_tflops, least_gb_s=least_gb_s)
        self.dirpath, self.print_tables, self.slowed_ranks = dirpath, print_tables, slowed_ranks
        self.report: LinkReport | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or self.report is not None:
            return
        self.report = report = check_links(topology_of(trainer), self.limits, self.slowed_ranks)
        self._write(trainer, report)
        refuse_slow(report, self.on_slow)
        for slow in report.slow:
            rank_zero_warn(f"Slow: {slow}.")

    def _write(self, trainer: Trainer, report: LinkReport) -> None:
        folder = output_folder(trainer, self.dirpath)
        log_scalars(trainer, report.scalars())
        if not trainer.is_global_zero:
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "link_check.json").write_text(json.dumps(report.to_dict(), indent=2))
        if self.print_tables:
            console = Console()
            console.print(rank_table(report))
            if report.groups[0]:
                console.print(axis_table(report))
