# SPDX-License-Identifier: Apache-2.0
"""Every legal layout of a number of ranks, and the cases that each is checked on."""

from collections.abc import Iterator
from itertools import product

from lightning_3d.errors import PlanError
from lightning_3d.plan import ParallelPlan, ScheduleName
from lightning_3d.selfcheck.oracle import GLOBAL_BATCH, Case
from lightning_3d.shape import ModelShape

ALL_CASES = tuple(
    Case(tied=tied, optimizer=optimizer, accumulate=accumulate)
    for tied, optimizer, accumulate in product((False, True), ("sgd", "adamw"), (1, 2))
)
"""Plain and tied decoder x SGD and AdamW x accumulation 1 and 2."""

QUICK_CASES = (Case(tied=True, optimizer="sgd", accumulate=2), Case(optimizer="adamw"))
"""Two of them that together have every option once."""


def legal_layouts(world_size: int) -> Iterator[ParallelPlan]:
    """All plans over `world_size` ranks that fit the selfcheck's decoder, one schedule after the other."""
    shape = Case().shape
    model = ModelShape(
        num_layers=shape.num_layers,
        hidden_size=shape.dim,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        intermediate_size=shape.ffn_dim,
        vocab_size=shape.vocab_size,
    )
    for pp, replicate, shard, tp in _factorizations(world_size, 4):
        for schedule, virtual_stages in _schedules(pp):
            plan = ParallelPlan(
                pp=pp,
                dp_replicate=replicate,
                dp_shard=shard,
                tp=tp,
                schedule=schedule,
                virtual_stages=virtual_stages,
                num_microbatches="auto",
            )
            try:
                plan.check_model(model, shape.sequence_length)
            except PlanError:
                continue
            if GLOBAL_BATCH % plan.dp == 0:
                yield plan


def _schedules(pp: int) -> Iterator[tuple[ScheduleName, int]]:
    yield "1f1b", 1
    if pp > 1:
        yield "gpipe", 1
        yield "interleaved", 2


def _factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (number,)
        return
    for factor in range(1, number + 1):
        if number % factor == 0:
            for rest in _factorizations(number // factor, parts - 1):
                yield (factor, *rest)
