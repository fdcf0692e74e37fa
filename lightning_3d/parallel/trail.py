# SPDX-License-Identifier: Apache-2.0
"""`Trail`: which sharded modules a rank has gone through, so that ranks that wait for each other can be compared.

[Note: ranks that part]
The weights of a block are gathered by all ranks of a data-parallel group together, and its gradients are reduced
together, in the order in which each rank's step uses the blocks. A step that leaves a block out on one rank, or a layer
inside a block, leaves the ranks in two different collectives: they wait for ever, or the backend ends the process. Each
rank therefore notes what it goes through, which costs a few Python calls a block. Nothing is sent until a rank has
stood still for seconds; then the trails of a group are put side by side, and the first place where they part is the
error. What backends end at once is a layer without a gradient on one rank: that is said when it is first seen.
"""

import time
from collections import deque
from collections.abc import Callable
from functools import partial

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_3d.compat import fsdp_before_reduce

_LENGTH = 64
"""How many of the last places are kept: more than ranks can be apart."""
_NAMED = 4
"""How many parameters a message names."""


class Trail:
    """The last places of this rank, numbered from the beginning."""

    def __init__(self) -> None:
        self.places: deque[tuple[int, str]] = deque(maxlen=_LENGTH)
        self.count = 0
        self.since = time.monotonic()
        """When the last place was reached."""
        self.on_unused: Callable[[str], None] = lambda text: None
        """Called when a module's backward ends without a gradient for other parameters than before."""
        self._unused: dict[str, str] = {}
        self._not_reduced: set[str] = set()

    def follow(self, root: nn.Module) -> None:
        """Notes from now on which sharded modules of `root` run forward, and reduce their gradients."""
        for name, module in root.named_modules():
            if not isinstance(module, FSDPModule):
                continue
            shown = name.removeprefix("module.") or "the step"
            root.get_submodule(name).register_forward_pre_hook(
                lambda *_, shown=shown: self._note_forward(shown)
            )
            fsdp_before_reduce(module, partial(self._note_reduce, shown))

    def note(self, place: str) -> None:
        """Notes a place."""
        self.count += 1
        self.places.append((self.count, place))
        self.since = time.monotonic()

    def _note_forward(self, module: str) -> None:
        self._not_reduced.add(module)
        self.note(f"the forward of {module}")

    def _note_reduce(self, module: str, without: list[str], is_reduced: bool) -> None:
        if module not in self._not_reduced:  # a backward may end more than once
            return
        unused = ", ".join(name.removeprefix("module.") for name in without[:_NAMED])
        unused += f" and {len(without) - _NAMED} more" if len(without) > _NAMED else ""
        if is_reduced:
            self._not_reduced.discard(module)
            self.note(f"the backward of {module}" + (f" without a gradient for {unused}" if unused else ""))
        if unused != self._unused.get(module, ""):
            self._unused[module] = unused
            if unused:
                self.on_unused(f"its backward of {module} had no gradient for {unused}")


def first_parting(mine: list[tuple[int, str]], theirs: list[tuple[int, str]]) -> tuple[str, str] | None:
    """Where two trails first part; None if they agree as far as both go.

    >>> first_parting([(1, "a"), (2, "b")], [(2, "c")])
    ('b', 'c')
    >>> first_parting([(1, "a"), (2, "b")], [(1, "a")]) is None
    True
    """
    others = dict(theirs)
    for number, place in mine:
        if others.get(number, place) != place:
            return place, others[number]
    return None
