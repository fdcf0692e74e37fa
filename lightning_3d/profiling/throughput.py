# SPDX-License-Identifier: Apache-2.0
"""Rates of a run from what its ranks count: tokens, operations, and the time that is lost between them.

Conventions. A token is counted once however many ranks work on it. Model FLOPs are those of
`estimator.flops.model_flops_per_token`: a multiply-add is two, the head counts, the embedding does not, attention
counts half of the square if causal, nothing that is computed twice. MFU divides them by the time of all ranks at their
peak; HFU adds what the backward recomputes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from statistics import median

from lightning_3d.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class RankWindow:
    """What one rank did in a window of steps; numbers only, to be gathered."""

    stage: float
    """Its pipeline stage."""
    samples: float
    tokens: float
    """Of the batches that it read."""
    step_s: float
    """Of its steps."""
    wait_s: float
    """Part of it that it waited for other ranks, for messages between stages too."""
    idle_s: float
    """Part of that which it idled in the pipeline."""
    bubble: float
    """Idle share of a batch's time in the pipeline; negative without stages."""

    def row(self) -> list[float]:
        """As a row to gather."""
        return list(astuple(self))

    @classmethod
    def of_row(cls, row: Sequence[float]) -> "RankWindow":
        """From a gathered row."""
        return cls(**{field.name: value for field, value in zip(fields(cls), row, strict=True)})


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """Operations of a token, and what a rank could do."""

    model: float
    """Forward and backward, each once."""
    recomputed: float = 0.0
    """What the backward repeats."""
    peak_per_s: float | None = None
    """Of one rank; None where nobody knows."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Rates of a window, over all ranks."""

    tokens_per_s: float
    samples_per_s: float
    step_s: float
    world_size: int
    exposed_comm: float | None
    """Share of the steps that a rank waits for collectives, bubble not counted: the mean; None on one rank."""
    bubble: float | None
    """Idle share of a pipeline's time: the mean over ranks; None without stages."""
    stage_tokens_per_s: Mapping[int, float]
    """Of each stage, tokens a second if it never waited: the least sets the pace. Empty without stages."""
    flops: FlopCount | None

    @property
    def tflops_per_rank(self) -> float | None:
        """Model operations a second of a rank, in units of 10^12."""
        if self.flops is None:
            return None
        return self.flops.model * self.tokens_per_s / self.world_size / 1e12

    @property
    def mfu(self) -> float | None:
        """Model operations over what all ranks could do."""
        return self._utilisation(0.0)

    @property
    def hfu(self) -> float | None:
        """The same with what is computed again."""
        return None if self.flops is None else self._utilisation(self.flops.recomputed)

    def _utilisation(self, more: float) -> float | None:
        if self.flops is None or not self.flops.peak_per_s:
            return None
        return (self.flops.model + more) * self.tokens_per_s / (self.world_size * self.flops.peak_per_s)

    def scalars(self) -> dict[str, float]:
        """What is known, by name, for loggers."""
        values = {
            "tokens_per_s": self.tokens_per_s,
            "samples_per_s": self.samples_per_s,
            "tokens_per_s_per_rank": self.tokens_per_s / self.world_size,
            "step_s": self.step_s,
            "tflops_per_rank": self.tflops_per_rank,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "exposed_comm": self.exposed_comm,
            "bubble": self.bubble,
        }
        stages = {f"stage{stage}_tokens_per_s": value for stage, value in self.stage_tokens_per_s.items()}
        return {name: value for name, value in values.items() if value is not None} | stages

    def text(self) -> str:
        """In a line: `1,234 tokens/s  0.52 s  MFU 41.0%  bubble 12%  exposed 5%`."""
        parts = [f"{self.tokens_per_s:,.0f} tokens/s", f"{format_seconds(self.step_s)}/step"]
        if self.mfu is not None and self.hfu is not None:
            parts.append(f"MFU {self.mfu:.1%}" + (f" HFU {self.hfu:.1%}" if self.hfu > self.mfu else ""))
        if self.bubble is not None:
            parts.append(f"bubble {self.bubble:.0%}")
        if self.exposed_comm is not None:
            parts.append(f"exposed {self.exposed_comm:.0%}")
        return "  ".join(parts)


def speed_of(
    windows: Sequence[RankWindow],
    *,
    num_replicas: int,
    num_steps: int,
    seconds: float,
    flops: FlopCount | None,
) -> Speed:
    """Rates of a window.

    Args:
        windows: of every rank.
        num_replicas: how many different batches one step reads; all ranks of a replica count the same one.
        num_steps: optimizer steps of the window.
        seconds: that it took.
        flops: operations of a token, if they are known.
    """
    world = len(windows)
    once = num_replicas / world
    tokens, samples = (sum(getattr(each, name) for each in windows) * once for name in ("tokens", "samples"))
    exposed = [max(0.0, each.wait_s - each.idle_s) / each.step_s for each in windows if each.step_s]
    bubbles = [each.bubble for each in windows if each.bubble >= 0]
    return Speed(
        tokens_per_s=tokens / seconds,
        samples_per_s=samples / seconds,
        step_s=seconds / num_steps,
        world_size=world,
        exposed_comm=sum(exposed) / len(exposed) if world > 1 and exposed else None,
        bubble=sum(bubbles) / world if bubbles else None,
        stage_tokens_per_s=_of_stages(windows, tokens) if bubbles else {},
        flops=flops,
    )


def _of_stages(windows: Sequence[RankWindow], tokens: float) -> dict[int, float]:
    busy: dict[int, list[float]] = {}
    for each in windows:
        busy.setdefault(int(each.stage), []).append(max(1e-9, each.step_s - each.wait_s))
    return {stage: tokens / median(seconds) for stage, seconds in sorted(busy.items())}
