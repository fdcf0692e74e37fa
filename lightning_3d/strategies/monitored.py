# SPDX-License-Identifier: Apache-2.0
"""Values that decisions depend on are the same on all ranks, whether or not the user asked for `sync_dist`.

Each data-parallel replica logs its own value. A learning rate that follows such a value would differ between the shards
of one parameter, and nobody would notice; checkpoints would be ranked differently, and ranks would stop apart.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchmetrics import Metric

from lightning_3d.errors import SupportError

if TYPE_CHECKING:
    import lightning.pytorch as pl


class MonitoredLog:
    """Stands in for `self.log` of one module: a value that is monitored is averaged over replicas."""

    def __init__(self, module: "pl.LightningModule") -> None:
        self._module = module
        self._signature = inspect.signature(type(module).log)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """As `LightningModule.log`.

        Raises:
            SupportError: a monitored value is logged with `rank_zero_only`.
        """
        arguments = self._signature.bind(self._module, *args, **kwargs).arguments
        name = arguments["name"]
        if not isinstance(arguments["value"], Metric) and any(
            _is_of(each, name) for each in self._monitors()
        ):
            if arguments.get("rank_zero_only"):
                raise SupportError(
                    f"self.log({name!r}, rank_zero_only=True) is monitored, but only rank 0 has it: ranks would decide"
                    " differently and wait for each other. Log it on all ranks, with sync_dist=True."
                )
            arguments["sync_dist"] = True
        type(self._module).log(**arguments)

    def _monitors(self) -> Iterator[str]:
        trainer = self._module.trainer
        schedulers = trainer.lr_scheduler_configs
        for holder in (*trainer.callbacks, *schedulers):  # type: ignore[attr-defined]
            monitor = getattr(holder, "monitor", None)
            if isinstance(monitor, str):
                yield monitor


def _is_of(monitor: str, name: str) -> bool:
    """Whether a metric logged as `name` may be the one that is monitored: Lightning adds suffixes."""
    rest = monitor.removeprefix(name)
    return monitor.startswith(name) and (rest in ("", "_epoch", "_step") or "/dataloader_idx_" in rest)


@contextmanager
def replaced_log(module: "pl.LightningModule", log: Any) -> Iterator[None]:
    """Puts something in place of a module's `log` inside the context."""
    before = module.__dict__.get("log")
    module.__dict__["log"] = log
    try:
        yield
    finally:
        if before is None:
            module.__dict__.pop("log", None)
        else:
            module.__dict__["log"] = before
