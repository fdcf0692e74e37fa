# SPDX-License-Identifier: Apache-2.0
"""What was sent in some steps, beside what the estimates say: as data, as JSON and as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from lightning_3d.profiling.comm_recorder import Transfer
from lightning_3d.units import format_bytes, format_count

VERSION = 1
"""Of the JSON."""


@dataclass(frozen=True, kw_only=True)
class RankComm:
    """What one rank sent in a step: the mean over the traced steps."""

    rank: int
    name: str
    stage: int
    transfers: tuple[Transfer, ...]
    """By axis and collective, of all traced steps together."""
    flops: float
    """Operations of products and attention in all traced steps."""
    num_steps: int
    predicted_bytes: Mapping[str, float]
    """Of a step, by axis; empty where there is no estimate."""

    def bytes_by_axis(self) -> dict[str, float]:
        """Bytes sent in a step."""
        sent: dict[str, float] = {}
        for transfer in self.transfers:
            sent[transfer.axis] = sent.get(transfer.axis, 0.0) + transfer.num_bytes / self.num_steps
        return sent

    @property
    def bytes_per_flop(self) -> float:
        """Communication over computation: bytes sent for each operation."""
        return sum(self.bytes_by_axis().values()) * self.num_steps / self.flops if self.flops else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        sent = self.bytes_by_axis()
        axes: dict[str, Any] = {
            axis: {
                "bytes": sent.get(axis, 0.0),
                "predicted_bytes": self.predicted_bytes.get(axis),
                "collectives": {},
            }
            for axis in dict.fromkeys((*self.predicted_bytes, *sent))
            if sent.get(axis) or self.predicted_bytes.get(axis)
        }
        for transfer in self.transfers:
            axes[transfer.axis]["collectives"][transfer.collective] = {
                "count": transfer.count / self.num_steps,
                "bytes": transfer.num_bytes / self.num_steps,
            }
        return {
            "rank": self.rank,
            "name": self.name,
            "stage": self.stage,
            "flops": self.flops / self.num_steps,
            "bytes_per_flop": self.bytes_per_flop,
            "axes": axes,
        }


@dataclass(frozen=True, kw_only=True)
class CommReport:
    """What all ranks sent."""

    steps: tuple[int, ...]
    """Optimizer steps that were traced."""
    ranks: tuple[RankComm, ...]
    rates: Mapping[str, float]
    """Measured bytes a second of each axis (bus bandwidth), and under `compute` operations a second of a rank;
    empty where nothing was measured."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON: everything, and the totals of each axis."""
        return {
            "version": VERSION,
            "steps": list(self.steps),
            "axes": {axis: asdict(total) for axis, total in self.totals().items()},
            "ranks": [rank.to_dict() for rank in self.ranks],
        }

    def totals(self) -> "dict[str, AxisTotal]":
        """Each axis over all ranks: the mean, the busiest rank, the estimate and the time beside computing."""
        axes = dict.fromkeys(axis for rank in self.ranks for axis in rank.bytes_by_axis())
        return {axis: self._total(axis) for axis in axes}

    def _total(self, axis: str) -> "AxisTotal":
        sent = [rank.bytes_by_axis().get(axis, 0.0) for rank in self.ranks]
        predicted = [rank.predicted_bytes.get(axis) for rank in self.ranks]
        known = [value for value in predicted if value is not None]
        mean = sum(sent) / len(sent)
        flops = sum(rank.flops / rank.num_steps for rank in self.ranks) / len(self.ranks)
        ratio = None
        if axis in self.rates and self.rates.get("compute") and flops:
            ratio = (mean / self.rates[axis]) / (flops / self.rates["compute"])
        return AxisTotal(
            bytes=mean,
            most_bytes=max(sent),
            predicted_bytes=sum(known) / len(known) if len(known) == len(sent) else None,
            bytes_per_flop=mean / flops if flops else 0.0,
            communication_over_compute=ratio,
        )

    def collectives_of(self, axis: str) -> str:
        """How often each collective ran along an axis on a rank in a step: `9 all_gather, 5 reduce_scatter`."""
        counts: dict[str, float] = {}
        for rank in self.ranks:
            for transfer in rank.transfers:
                if transfer.axis == axis:
                    share = transfer.count / rank.num_steps / len(self.ranks)
                    counts[transfer.collective] = counts.get(transfer.collective, 0.0) + share
        return ", ".join(f"{count:g} {name}" for name, count in counts.items())


@dataclass(frozen=True, kw_only=True)
class AxisTotal:
    """One axis, of a step, as the mean over ranks."""

    bytes: float
    most_bytes: float
    """Of the rank that sent most."""
    predicted_bytes: float | None
    bytes_per_flop: float
    communication_over_compute: float | None
    """Time on the wire over time of computing, at the rates that a link check measured."""


def comm_table(report: CommReport) -> Table:
    """One row for each axis."""
    first, last = report.steps[0], report.steps[-1]
    span = f"step {first}" if first == last else f"steps {first} to {last}"
    table = Table(
        title=f"Sent by a rank in a step ({span}, ring terms)", title_justify="left", header_style="bold"
    )
    heads = ("axis", "collectives", "bytes", "most", "predicted", "measured / predicted", "bytes / kFLOP")
    for head in (*heads, "communication / compute"):
        table.add_column(head, justify="left" if head in ("axis", "collectives") else "right")
    for axis, total in report.totals().items():
        predicted = total.predicted_bytes
        ratio = total.communication_over_compute
        table.add_row(
            axis,
            report.collectives_of(axis),
            format_bytes(total.bytes),
            format_bytes(total.most_bytes),
            "-" if predicted is None else format_bytes(predicted),
            f"{total.bytes / predicted:.3f}" if predicted else "-",
            f"{1e3 * total.bytes_per_flop:.3g}",
            "-" if ratio is None else f"{ratio:.2f}",
        )
    flops: Sequence[float] = [rank.flops / rank.num_steps for rank in report.ranks]
    table.caption = f"{format_count(sum(flops) / len(flops))} operations a rank and step"
    return table
