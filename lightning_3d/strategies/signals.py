# SPDX-License-Identifier: Apache-2.0
"""SIGTERM and SLURM's requeue signal, obeyed by all ranks between the same two steps.

Lightning's own handlers talk to the other ranks from inside the signal, which deadlocks when it arrives in the middle
of a collective or reaches one rank only. Here a handler leaves word at the hub (see [Note: how a failure travels]), and
the broadcast that Lightning makes before every batch carries it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_3d.compat_lightning import call_requeue, mark_sigterm_received, on_stop_signals
from lightning_3d.strategies.failure import FailureWatch

if TYPE_CHECKING:
    import lightning.pytorch as pl

SIGTERM, REQUEUE = 1, 2


def stop_together(trainer: "pl.Trainer", watch: FailureWatch, broadcast: Callable[..., Any]) -> None:
    """Makes a Trainer stop on all ranks at the same step.

    Args:
        trainer: whose signal handlers are not registered yet.
        watch: of this run.
        broadcast: `torch.distributed.broadcast`.
    """
    requeued = False

    def obey() -> None:
        nonlocal requeued
        watch.enter("the next batch")
        asked = torch.tensor([watch.stop_requested], device=trainer.strategy.root_device)
        broadcast(asked, 0)
        kind = int(asked)
        if kind == REQUEUE and not requeued:
            requeued = True
            call_requeue(trainer)
        if kind == SIGTERM:
            mark_sigterm_received(trainer)
            raise SIGTERMException

    on_stop_signals(
        trainer,
        sigterm=lambda *_: watch.request_stop(SIGTERM),
        requeue=lambda *_: watch.request_stop(REQUEUE),
        before_batch=obey,
    )
