# SPDX-License-Identifier: Apache-2.0
"""What memory a run really took, as data: one `MemoryTrace` a rank, one `SpanTrace` a traced step."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_3d.errors import TraceError

CATEGORIES = ("parameters", "gradients", "optimizer", "gathered", "activations", "temporary", "buffers")
"""Kinds of memory: the model's states; what FSDP holds unsharded; what the backward waits for; what lives within one
phase only; batches, receive buffers and the model's buffers."""
PHASES = ("forward", "backward", "optimizer", "evaluation", "checkpoint", "other")
OUTSIDE = "outside blocks"
"""The block of what is in no block: embeddings, head, loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Bytes alive at one point of a step."""

    phase: str
    block: str
    """The block that was running, or where between blocks."""
    num_bytes: tuple[int, ...]
    """By category, in the order of `CATEGORIES`."""

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.num_bytes)

    def by_category(self) -> dict[str, float]:
        """Bytes by name of category."""
        return dict(zip(CATEGORIES, map(float, self.num_bytes), strict=True))

    def of(self, category: str) -> int:
        """Bytes of one category."""
        return self.num_bytes[CATEGORIES.index(category)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanTrace:
    """One traced step, or one traced evaluation or checkpoint."""

    name: str
    """`step 3`, `validation 0`, `checkpoint`."""
    timeline: tuple[Moment, ...]
    """In order of time; of a long step, the highest moments of equal slices."""
    peak: Moment
    peak_of_phase: Mapping[str, Moment]
    blocks_at_peak: Mapping[str, Mapping[str, int]]
    """Bytes at the peak by block in which they were made (parameters: that they belong to) and category."""
    allocator_peak_bytes: int | None = None
    """Peak of the device's allocator in this step; None where there is none to ask (CPU)."""
    allocator_reserved_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTrace:
    """What one rank's memory was used for."""

    rank: int
    stage: int
    """Pipeline stage, 0 without."""
    device: str
    spans: tuple[SpanTrace, ...]
    estimate: Mapping[str, float] = field(default_factory=dict)
    """What the estimator expects of this rank's stage, by its categories; empty for models that it cannot read."""

    @property
    def fullest(self) -> SpanTrace:
        """The span with the highest peak.

        Raises:
            TraceError: nothing was traced.
        """
        if not self.spans:
            raise TraceError(f"rank {self.rank} traced no step. Trace one of the steps that are run.")
        return max(self.spans, key=lambda span: span.peak.total)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "rank": self.rank,
            "stage": self.stage,
            "device": self.device,
            "categories": list(CATEGORIES),
            "spans": [_span_to_dict(span) for span in self.spans],
            "estimate": dict(self.estimate),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "MemoryTrace":
        """The inverse of `to_dict`.

        Raises:
            TraceError: the values are no trace.
        """
        try:
            return cls(
                rank=values["rank"],
                stage=values["stage"],
                device=values["device"],
                spans=tuple(_span_from_dict(span) for span in values["spans"]),
                estimate=values.get("estimate", {}),
            )
        except (KeyError, TypeError) as error:
            raise TraceError(
                f"not a memory trace ({error!r}). Give a file that MemoryTrace wrote."
            ) from error

    def write(self, path: Path) -> None:
        """Writes the trace as JSON."""
        path.write_text(json.dumps(self.to_dict()), encoding="utf-8")


def read_trace(path: Path) -> MemoryTrace:
    """Reads what `MemoryTrace.write` wrote.

    Raises:
        TraceError: the file is no trace.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TraceError(f"{path} does not read ({error}). Give a file that MemoryTrace wrote.") from error
    return MemoryTrace.from_dict(values)


def thinned(moments: Iterable[Moment], most: int) -> tuple[Moment, ...]:
    """At most `most` moments: the highest of each of as many equal slices, so that the peak stays."""
    every = tuple(moments)
    if len(every) <= most:
        return every
    cuts = [len(every) * index // most for index in range(most + 1)]
    return tuple(max(every[start:end], key=lambda moment: moment.total) for start, end in pairwise(cuts))


def _span_to_dict(span: SpanTrace) -> dict[str, Any]:
    return {
        "name": span.name,
        "timeline": [_moment_to_list(moment) for moment in span.timeline],
        "peak": _moment_to_list(span.peak),
        "peak_of_phase": {phase: _moment_to_list(moment) for phase, moment in span.peak_of_phase.items()},
        "blocks_at_peak": {block: dict(values) for block, values in span.blocks_at_peak.items()},
        "allocator_peak_bytes": span.allocator_peak_bytes,
        "allocator_reserved_bytes": span.allocator_reserved_bytes,
    }


def _span_from_dict(values: Mapping[str, Any]) -> SpanTrace:
    return SpanTrace(
        name=values["name"],
        timeline=tuple(map(_moment_from_list, values["timeline"])),
        peak=_moment_from_list(values["peak"]),
        peak_of_phase={phase: _moment_from_list(item) for phase, item in values["peak_of_phase"].items()},
        blocks_at_peak=values["blocks_at_peak"],
        allocator_peak_bytes=values["allocator_peak_bytes"],
        allocator_reserved_bytes=values["allocator_reserved_bytes"],
    )


def _moment_to_list(moment: Moment) -> list[Any]:
    return [moment.phase, moment.block, *moment.num_bytes]


def _moment_from_list(values: list[Any]) -> Moment:
    return Moment(phase=values[0], block=values[1], num_bytes=tuple(values[2:]))
