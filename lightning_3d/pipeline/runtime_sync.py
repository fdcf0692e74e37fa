# SPDX-License-Identifier: Apache-2.0
"""When sharded parameters are gathered, freed and their gradients reduced during a pipeline step."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_3d.compat import fsdp_finish_backward, fsdp_forget_forwards, fsdp_reduce_pending
from lightning_3d.schedules import Schedule


class GradientSync:
    """Defers the reduction of gradients to the last backward that adds to them, over microbatches and over runs.

    [Note: who owns a sharded module]
    A sharded module belongs to every stage whose forward may use it: a block to one stage, a root (embedding, norms)
    to all stages of the rank. Until the last backward among its owners its gradients are accumulated whole; in that
    backward FSDP's own hooks reduce them, so that communication overlaps computation. What no hook reached (a module
    that the last microbatch did not use, a backward split in two) is reduced right after. So each parameter group is
    reduced exactly once a run, or not at all in a run that defers.

    Between runs every module is sharded: an optimizer step, or anything else that writes to the shards, is seen by the
    next forward.
    """

    def __init__(
        self,
        owned: Mapping[int, Iterable[nn.Module]],
        *,
        reshard_after_backward: bool = False,
    ) -> None:
        """Changes no module yet.

        Args:
            owned: for each local stage, the modules that its forward may use; those that are not sharded are ignored.
            reshard_after_backward: free gathered blocks after each microbatch's backward, not only after the last one:
                less memory, one more gather. Modules that contain other sharded modules stay gathered.
        """
        self._owned = {
            stage: [m for m in modules if isinstance(m, FSDPModule)] for stage, modules in owned.items()
        }
        unique = {id(module): module for modules in self._owned.values() for module in modules}
        self._modules: list[Any] = list(unique.values())
        self._outer = {id(module) for module in self._modules if _contains_sharded(module)}
        self._reshard_after_backward = reshard_after_backward
        self._due: dict[int, list[Any]] = {}
        self._final_stage: int | None = None
        self._reduce = False

    @contextmanager
    def run(self, schedule: Schedule, rank: int, *, backward: bool, reduce: bool) -> Iterator[None]:
        """Around one run of a schedule.

        Args:
            schedule: what is run.
            rank: this rank's row in it.
            backward: whether its backward is run.
            reduce: whether gradients are reduced in this run.
        """
        self._reduce = reduce
        self._plan(schedule, rank)
        for module in self._modules:
            module.set_is_last_backward(False)
            module.set_requires_gradient_sync(False, recurse=False)
            free = (
                self._reshard_after_backward
                and id(module) not in self._outer
                and not schedule.splits_backward
            )
            module.set_reshard_after_backward(free, recurse=False)
            if (
                backward and schedule.splits_backward
            ):  # the second half of a backward gathers nothing by itself
                module.set_reshard_after_forward(False, recurse=False)
        try:
            yield
            fsdp_forget_forwards(self._modules)
            for module in self._modules:
                module.reshard()
        finally:
            for module in self._modules:
                module.set_is_last_backward(True)
                module.set_requires_gradient_sync(True, recurse=False)
                module.set_reshard_after_backward(True, recurse=False)

    @contextmanager
    def last_backward(self, stage: int, is_last: bool) -> Iterator[None]:
        """Around one backward; when it is the stage's last, reduces what no later backward adds to."""
        if not is_last or not self._modules:
            yield
            return
        is_final = stage == self._final_stage
        due = self._due.get(stage, [])
        for module in due:
            module.set_requires_gradient_sync(self._reduce, recurse=False)
            module.set_reshard_after_backward(True, recurse=False)
        for module in self._modules if is_final else []:
            module.set_is_last_backward(True)
        yield
        if self._reduce:
            fsdp_reduce_pending(due)
        for module in due:
            module.set_requires_gradient_sync(False, recurse=False)
        if is_final:
            fsdp_finish_backward(self._modules)

    def _plan(self, schedule: Schedule, rank: int) -> None:
        """Find the stage in whose last backward each module is due."""
        last_at = {
            a.stage: at for at, a in enumerate(schedule.actions[rank]) if a and a.kind.frees_activations
        }
        self._due = {stage: [] for stage in last_at}
        self._final_stage = max(last_at, key=lambda stage: last_at[stage], default=None)
        for module in self._modules if last_at else []:
            owners = [stage for stage, modules in self._owned.items() if any(m is module for m in modules)]
            self._due[max(owners, key=lambda stage: last_at[stage])].append(module)


def _contains_sharded(module: nn.Module) -> bool:
    return any(isinstance(child, FSDPModule) for child in module.modules() if child is not module)
