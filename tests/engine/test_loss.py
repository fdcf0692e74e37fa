# SPDX-License-Identifier: Apache-2.0
"""Loss and gradient scale: accumulation, microbatches and replicas add up to the gradient of the whole batch."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.engine.runs import (
    DP2,
    PP2,
    PP2_DP2,
    PP2_INTERLEAVED,
    TP2,
    Module,
    Run,
    check,
    few_on_many_ranks,
    fit,
    lm,
    mlp,
    name_of,
    norm_of,
    token_batches,
    token_loss,
    vector_batches,
    world_of,
)
from tests.harness import RanksError, RanksTimeoutError, run_ranks

HSDP = {"dp_replicate": 2, "dp_shard": 2}


def accumulation(optimizer: str, window: int, count: int) -> Run:
    """`count` batches in windows of `window`: the last window may be short."""
    return Run(
        module=lambda: mlp(optimizer),
        batches=vector_batches(count),
        options={"accumulate_grad_batches": window, "max_epochs": 2},
    )


ACCUMULATED = {
    "sgd, windows of 2": accumulation("sgd", 2, 4),
    "sgd, windows of 3, last one short": accumulation("sgd", 3, 7),
    "adamw, windows of 2, last one short": accumulation("adamw", 2, 3),
}
GPIPE = {**PP2, "schedule": "gpipe"}


@pytest.mark.parametrize("layout", [PP2, PP2_INTERLEAVED, GPIPE, DP2, HSDP, PP2_DP2], ids=name_of)
def test_accumulated_batches_are_averaged(layout):
    check(layout, few_on_many_ranks(layout, ACCUMULATED, ("sgd, windows of 3, last one short",)))


class TokenWeighted(Module):
    """Says of how many tokens its loss is the mean."""

    def training_step(self, batch, batch_idx):
        loss = token_loss(self.model(batch["ids"]), batch["labels"])
        return {"loss": loss, "num_tokens": (batch["labels"] != -100).sum()}


class MeanByHand(Module):
    """Divides by the number of tokens, whatever it is."""

    def training_step(self, batch, batch_idx):
        labels = batch["labels"].flatten()
        losses = F.cross_entropy(
            self.model(batch["ids"]).flatten(0, 1), labels.clamp(min=0), reduction="none"
        )
        count = (labels != -100).sum()
        return {"loss": (losses * (labels != -100)).sum() / count + 0 * losses.mean(), "num_tokens": count}


class TokenSum(Module):
    """Sums over tokens and counts them."""

    def training_step(self, batch, batch_idx):
        loss = token_loss(self.model(batch["ids"]), batch["labels"], "sum")
        return {"loss": loss, "num_tokens": int((batch["labels"] != -100).sum())}


class Sum(Module):
    """Sums over tokens; the gradient is that of the sum over everything."""

    def training_step(self, batch, batch_idx):
        return 0.01 * token_loss(self.model(batch["ids"]), batch["labels"], "sum")


def padded(count=3):
    """The first microbatch has no valid label, the second has 3; in the second batch the first replica has none."""
    batches = token_batches(count)
    for number, batch in enumerate(batches):
        labels = batch["labels"]
        labels[:2] = -100
        labels[2:4] = -100
        if number != 1:
            labels[2, 3], labels[3, 4:6] = 7, torch.tensor([5, 9])
    return batches


def joined(batches, window):
    """The batches of each window as one."""
    windows = [batches[start : start + window] for start in range(0, len(batches), window)]
    return [{key: torch.cat([batch[key] for batch in group]) for key in group[0]} for group in windows]


@pytest.mark.parametrize("layout", [PP2, DP2, PP2_DP2, TP2], ids=name_of)
def test_tokens_weigh_alike_wherever_they_are(layout):
    whole = {"compare": ("gradients", "parameters")}
    plain = Run(module=lm, batches=padded(), **whole)
    windows = Run(module=lambda: lm("adamw"), batches=joined(padded(), 2), **whole)
    accumulated = {"options": {"accumulate_grad_batches": 2}, "batches": padded(), "reference": windows}
    weighted = Run(module=lambda: lm(cls=TokenWeighted), batches=padded(), reference=plain, **whole)
    total = Run(
        module=lambda: lm(cls=TokenSum),
        batches=padded(),
        reference=plain,
        strategy={"loss_reduction": "sum"},
        **whole,
    )
    check(
        layout,
        {
            "mean": weighted,
            "sum": total,
            "mean by hand": replace(weighted, module=lambda: lm(cls=MeanByHand)),
            "mean, windows of 2": replace(
                weighted, module=lambda: lm("adamw", cls=TokenWeighted), **accumulated
            ),
            "sum, windows of 2": replace(total, module=lambda: lm("adamw", cls=TokenSum), **accumulated),
            "sum without counts, windows of 2": Run(
                module=lambda: lm(cls=Sum),
                strategy={"loss_reduction": "sum"},
                **{**accumulated, "reference": Run(module=lambda: lm(cls=Sum), batches=joined(padded(), 2))},
                **whole,
            ),
            "sum without counts": Run(
                module=lambda: lm(cls=Sum), batches=padded(), strategy={"loss_reduction": "sum"}, **whole
            ),
        },
    )


def test_microbatches_change_neither_norm_nor_update():
    runs = {
        f"{count} microbatches": Run(
            module=lm,
            batches=token_batches(2),
            options={"gradient_clip_val": 0.1},
            strategy={"num_microbatches": count},
        )
        for count in (2, 4, 8)
    }
    one_process = fit(next(iter(runs.values())))
    expected = [norm_of(gradients) for gradients in one_process.gradients]
    for records in check({"pp": 2}, runs).values():
        for record in records:
            assert record.norms == pytest.approx(expected, rel=1e-5)
            assert record.metrics == pytest.approx(one_process.metrics, rel=1e-5)


class CountsSometimes(Module):
    """Counts tokens where `counts(microbatch, dp_rank, batch_idx)` says so."""

    counts = staticmethod(lambda batch, dp_rank, batch_idx: True)

    def training_step(self, batch, batch_idx):
        loss = token_loss(self.model(batch["ids"]), batch["labels"])
        here = type(self).counts(batch, self.trainer.strategy.mesh.dp_rank, batch_idx)
        return {"loss": loss, "num_tokens": batch["labels"].numel()} if here else loss * 0


SOMETIMES = {
    "one replica": (DP2, lambda batch, dp_rank, batch_idx: dp_rank == 0),
    "one replica of stages": (PP2_DP2, lambda batch, dp_rank, batch_idx: dp_rank == 0),
    "some batches": (DP2, lambda batch, dp_rank, batch_idx: batch_idx != 1 or dp_rank == 0),
    "some microbatches": (PP2, lambda batch, dp_rank, batch_idx: 7 not in batch["labels"]),
    "one rank of a tensor": (TP2, lambda batch, dp_rank, batch_idx: dist.get_rank() == 0),
}


@pytest.mark.parametrize("case", SOMETIMES)
def test_tokens_that_are_not_always_counted_end_every_rank(case):
    layout, counts = SOMETIMES[case]
    module = type("Sometimes", (CountsSometimes,), {"counts": staticmethod(counts)})
    run = Run(module=lambda: lm(cls=module), batches=padded())
    with pytest.raises(RanksError) as error:
        run_ranks(world_of(layout), lambda: fit(run, layout), init=False, timeout_s=40)
    assert not isinstance(error.value, RanksTimeoutError), str(error.value)
    assert set(error.value.failures) == set(range(world_of(layout)))
    for failure in error.value.failures.values():
        assert "or num_tokens from none" in f"{failure.message}{failure.output}", failure
