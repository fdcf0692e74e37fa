# SPDX-License-Identifier: Apache-2.0
"""What a check of ranks and links found: as data, as JSON, as tables, with what is slow named."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.table import Table

from lightning_3d.profiling.link_rates import (
    COLLECTIVES,
    LATENCY,
    LINK,
    MATMUL,
    NEXT_STAGE,
    Rates,
    bus_factor,
)
from lightning_3d.profiling.outliers import outliers_below

VERSION = 1
"""Of the JSON."""
TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a rank or link is called slow."""

    slow_below: float = 0.6
    """Share of the median of its peers."""
    least_tflops: float = 0.0
    """Operations a second, in units of 10^12, that every rank must reach."""
    least_gb_s: float = 0.0
    """10^9 bytes a second that every link and the bus bandwidth of every axis must reach."""


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A rank, a link or a group that is slower than its peers, or than it must be."""

    what: str
    """`rank 5 on host b`, or `tp of ranks 4-7: all_gather`."""
    value: float
    unit: str
    """`TFLOP/s` or `GB/s`."""
    median: float | None
    """Of its peers; None where a least value was missed."""
    ranks: tuple[int, ...]

    @property
    def share(self) -> float:
        """Of the median of its peers."""
        return self.value / self.median if self.median else 1.0

    def __str__(self) -> str:
        than = "below the least that was asked for" if self.median is None else f"median {self.median:.3g}"
        return f"{self.what}: {self.value:.3g} {self.unit}, {than}"


@dataclass(frozen=True, kw_only=True)
class LinkReport:
    """Rates of all ranks."""

    names: tuple[str, ...]
    stages: tuple[int, ...]
    rates: tuple[Rates, ...]
    """Of each rank; see `link_rates.Rates`."""
    groups: tuple[Mapping[str, tuple[int, ...]], ...]
    """Of each rank: axis -> ranks of its group."""
    limits: Limits
    seconds: float
    """That the check took."""

    @property
    def slow(self) -> list[Slow]:
        """What is slow: ranks first, then links and groups that no slow rank explains."""
        ranks = list(self._slow_ranks())
        named = {rank for each in ranks for rank in each.ranks}
        others = (*self._slow_stage_links(), *self._slow_groups())
        return ranks + [each for each in others if not named & set(each.ranks)]

    def matmul_flops(self) -> float:
        """Operations a second of a rank: the median."""
        return median(rate[MATMUL] for rate in self.rates)

    def medians(self) -> dict[str, float]:
        """Operations a second of a rank under `compute`, bus bytes a second of each axis: medians over groups."""
        found = {"compute": self.matmul_flops()}
        for axis in self._axes():
            found[axis] = median(value for value, _ in self._of_groups(axis, "all_gather"))
        sends = [rate[NEXT_STAGE] for rate in self.rates if NEXT_STAGE in rate]
        return found | ({"pp": median(sends)} if sends else {})

    def scalars(self) -> dict[str, float]:
        """For loggers: medians, in TFLOP/s and GB/s, and how much is slow."""
        values = {f"links/{axis}_gb_s": value / GIGA for axis, value in self.medians().items()}
        values["links/matmul_tflops"] = values.pop("links/compute_gb_s") * GIGA / TERA
        return values | {"links/num_slow": float(len(self.slow))}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "version": VERSION,
            "seconds": self.seconds,
            "slow": [{**asdict(each), "text": str(each)} for each in self.slow],
            "axes": {axis: self._axis_dict(axis) for axis in self._axes()},
            "ranks": [
                {"rank": rank, "name": name, "stage": stage, **_rank_dict(rates)}
                for rank, (name, stage, rates) in enumerate(
                    zip(self.names, self.stages, self.rates, strict=True)
                )
            ],
        }

    def _axis_dict(self, axis: str) -> dict[str, Any]:
        rows = []
        for ranks in self._groups_of(axis):
            rates = self.rates[ranks[0]]
            row: dict[str, Any] = {"ranks": list(ranks), "latency_s": rates[f"{axis}/{LATENCY}"]}
            for name in COLLECTIVES:
                algorithm = rates[f"{axis}/{name}"] / GIGA
                row[name] = {
                    "algorithm_gb_s": algorithm,
                    "bus_gb_s": algorithm * bus_factor(name, len(ranks)),
                }
            rows.append(row)
        return {"size": len(rows[0]["ranks"]), "groups": rows}

    def _axes(self) -> list[str]:
        return list(self.groups[0])

    def _groups_of(self, axis: str) -> list[tuple[int, ...]]:
        return list(dict.fromkeys(groups[axis] for groups in self.groups))

    def _of_groups(self, axis: str, collective: str) -> list[tuple[float, tuple[int, ...]]]:
        """Bus bandwidth of each group, as its slowest rank saw it."""
        return [
            (
                min(self.rates[rank][f"{axis}/{collective}"] for rank in ranks)
                * bus_factor(collective, len(ranks)),
                ranks,
            )
            for ranks in self._groups_of(axis)
        ]

    def _slow_ranks(self) -> Iterator[Slow]:
        """By products, and by the better of the links to its neighbours: a slow neighbour is not its fault."""
        for name, unit, scale, least in (
            (MATMUL, "TFLOP/s", TERA, self.limits.least_tflops),
            (LINK, "GB/s", GIGA, self.limits.least_gb_s),
        ):
            values = [rates[name] / scale for rates in self.rates if name in rates]
            for index, value, middle in self._found(values, least):
                yield Slow(what=self.names[index], value=value, unit=unit, median=middle, ranks=(index,))

    def _slow_groups(self) -> Iterator[Slow]:
        """Of a group that is slow in several collectives, the one in which it is slowest beside its peers."""
        for axis in self._axes():
            worst: dict[tuple[int, ...], Slow] = {}
            for collective in COLLECTIVES:
                rows = self._of_groups(axis, collective)
                values = [value / GIGA for value, _ in rows]
                for index, value, middle in self._found(values, self.limits.least_gb_s):
                    ranks = rows[index][1]
                    what = f"{axis} of ranks {_span(ranks)}: {collective}"
                    found = Slow(what=what, value=value, unit="GB/s", median=middle, ranks=ranks)
                    if ranks not in worst or found.share < worst[ranks].share:
                        worst[ranks] = found
            yield from worst.values()

    def _slow_stage_links(self) -> Iterator[Slow]:
        senders = [rank for rank, rates in enumerate(self.rates) if NEXT_STAGE in rates]
        values = [self.rates[rank][NEXT_STAGE] / GIGA for rank in senders]
        for index, value, middle in self._found(values, self.limits.least_gb_s):
            rank = senders[index]
            what = f"{self.names[rank]} to stage {self.stages[rank] + 1}"
            yield Slow(what=what, value=value, unit="GB/s", median=middle, ranks=(rank,))

    def _found(self, values: Sequence[float], least: float) -> list[tuple[int, float, float | None]]:
        outliers = {each.index: each for each in outliers_below(values, self.limits.slow_below)}
        return [
            (index, value, outliers[index].median if index in outliers else None)
            for index, value in enumerate(values)
            if index in outliers or value < least
        ]


def _rank_dict(rates: Rates) -> dict[str, float]:
    values = {"matmul_tflops": rates[MATMUL] / TERA}
    for name in (LINK, NEXT_STAGE):
        if name in rates:
            values[f"{name}_gb_s"] = rates[name] / GIGA
    return values


def _span(ranks: Sequence[int]) -> str:
    """`4-7`, `0, 2, 4`."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


def rank_table(report: LinkReport) -> Table:
    """Rates that belong to one rank: least, median and most, and whose the least is."""
    table = Table(title="Ranks", title_justify="left", header_style="bold")
    for head in ("rate", "unit", "least", "median", "most", "least is of"):
        table.add_column(head, justify="left" if head in ("rate", "unit", "least is of") else "right")
    for name, text, unit, scale in (
        (MATMUL, "matrix product", "TFLOP/s", TERA),
        (LINK, "better link to a neighbour", "GB/s", GIGA),
        (NEXT_STAGE, "to the next stage", "GB/s", GIGA),
    ):
        values = {rank: rates[name] / scale for rank, rates in enumerate(report.rates) if name in rates}
        if not values:
            continue
        least = min(values, key=lambda rank: values[rank])
        numbers = (values[least], median(values.values()), max(values.values()))
        table.add_row(text, unit, *(f"{number:.3g}" for number in numbers), report.names[least])
    return table


def axis_table(report: LinkReport) -> Table:
    """Bandwidths of each axis: algorithm / bus, GB/s, medians over its groups; the slowest group; the latency."""
    table = Table(title="Axes, GB/s: algorithm / bus", title_justify="left", header_style="bold")
    for head in ("axis", "ranks", *COLLECTIVES, "slowest group", "small message"):
        table.add_column(head, justify="left" if head in ("axis", "slowest group") else "right")
    for axis, content in report.to_dict()["axes"].items():
        groups = content["groups"]
        cells = []
        for name in COLLECTIVES:
            pairs = [(row[name]["algorithm_gb_s"], row[name]["bus_gb_s"]) for row in groups]
            cells.append(" / ".join(f"{median(column):.3g}" for column in zip(*pairs, strict=True)))
        slowest = min(groups, key=lambda row: row["all_reduce"]["bus_gb_s"])
        text = (
            f"{_span(slowest['ranks'])}: {slowest['all_reduce']['bus_gb_s']:.3g}" if len(groups) > 1 else "-"
        )
        latency = median(row["latency_s"] for row in groups)
        table.add_row(axis, str(content["size"]), *cells, text, f"{latency * 1e6:.0f} µs")
    return table
