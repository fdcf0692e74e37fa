# SPDX-License-Identifier: Apache-2.0
"""`StragglerFinder`: which rank falls behind the others that do the same work."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lightning_3d.profiling.outliers import Outlier, outliers_above
from lightning_3d.profiling.step_timer import StepTime
from lightning_3d.profiling.topology import Topology, gather_rows
from lightning_3d.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that is slower than its peers."""

    rank: int
    name: str
    busy_s: float
    """Seconds of a step in which it does not wait for others."""
    median_s: float
    """Of its peers."""
    loading_s: float
    """Part of them between steps: loading data, callbacks."""
    peers: str
    """Whom it is compared with."""

    def __str__(self) -> str:
        loading = (
            f", {format_seconds(self.loading_s)} of it between steps"
            if self.loading_s > 0.2 * self.busy_s
            else ""
        )
        return (
            f"{self.name} falls behind: {format_seconds(self.busy_s)} a step{loading},"
            f" {self.busy_s / self.median_s:.1f} times the {format_seconds(self.median_s)} of {self.peers}"
        )


class StragglerFinder:
    """Compares ranks of one pipeline stage; a rank that is alone on its stage with its own best window."""

    def __init__(self, topology: Topology, *, factor: float, least_excess_s: float) -> None:
        """Knows no times yet.

        Args:
            topology: ranks and their stages.
            factor: times the median of its peers, above which a rank is named.
            least_excess_s: seconds a step by which it must exceed the median.
        """
        self._topology, self._factor, self._least_excess_s = topology, factor, least_excess_s
        self._best_s: list[float] = []

    def compare(self, steps: Sequence[StepTime]) -> list[Straggler]:
        """Ranks that fell behind in a window, slowest first; the same on all ranks. One small gather over the world.

        Args:
            steps: times of this rank's steps; their medians are compared, so that one hiccup is no slowness.
        """
        mine = [median(each.busy_s for each in steps), median(each.loading_s for each in steps)]
        rows = gather_rows(mine, self._topology.device)
        busy = [row[0] for row in rows]
        best = self._best_s or busy
        self._best_s = [min(pair) for pair in zip(best, busy, strict=True)]
        found = outliers_above(busy, self._factor, self._topology.stages, least_excess=self._least_excess_s)
        peers = [self._straggler(each, rows, "its peers") for each in found]
        alone = [self._straggler(each, rows, "its best window") for each in self._alone(busy, best)]
        return sorted([*peers, *alone], key=lambda each: each.median_s - each.busy_s)

    def _alone(self, busy: Sequence[float], best: Sequence[float]) -> list[Outlier]:
        stages = self._topology.stages
        return [
            Outlier(rank, now, before)
            for rank, (now, before) in enumerate(zip(busy, best, strict=True))
            if stages.count(stages[rank]) == 1
            and now > self._factor * before
            and now - before > self._least_excess_s
        ]

    def _straggler(self, found: Outlier, rows: Sequence[Sequence[float]], peers: str) -> Straggler:
        stage = self._topology.stages[found.index]
        where = f" on stage {stage}" if max(self._topology.stages) and peers == "its peers" else ""
        return Straggler(
            rank=found.index,
            name=self._topology.names[found.index],
            busy_s=found.value,
            median_s=found.median,
            loading_s=rows[found.index][1],
            peers=peers + where,
        )
