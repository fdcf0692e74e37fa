# SPDX-License-Identifier: Apache-2.0
"""Which modules run before the blocks: seen in a trial run on the meta device that ends at the first block."""

import copy
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lightning_3d.parallel.blocks import Blocks


class _ReachedBlocks(Exception):  # noqa: N818  (the good end of a trial run)
    """Ends the trial run."""


class _BlockMark(nn.Module):
    """Stands in a block's place, knows its attributes, and ends the trial run when called."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.__dict__["_marked"] = block

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_marked"], name)

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Whatever the block takes."""
        raise _ReachedBlocks


def modules_before_blocks(root: nn.Module, blocks: Blocks, names: Iterable[str]) -> set[str] | None:
    """Runs the model up to its first block on a made-up batch of token ids, without memory for its parameters.

    Args:
        root: the LightningModule.
        blocks: its blocks, inside one of its children.
        names: names of modules outside the blocks.

    Returns:
        The names of those that ran; None where the model does not run on token ids alone, or the blocks are on the
        LightningModule itself, whose forward need not be what its steps call.
    """
    child_name, _, inside = blocks.name.partition(".")
    if not inside:
        return None
    model = root.get_submodule(child_name)
    memo: dict[int, Any] = {id(block): _BlockMark(block) for block in blocks.modules}
    for tensor in (*model.parameters(), *model.buffers()):
        meta = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = (
            nn.Parameter(meta, requires_grad=False) if isinstance(tensor, nn.Parameter) else meta
        )
    seen: set[str] = set()
    try:
        trial = copy.deepcopy(model, memo)
        for name in names:
            if name.startswith(f"{child_name}."):
                module = trial.get_submodule(name.removeprefix(f"{child_name}."))
                module.register_forward_pre_hook(lambda *_, name=name: seen.add(name))
        with torch.no_grad():
            trial(**_token_ids(trial))
    except _ReachedBlocks:
        return seen
    except Exception:  # any model may refuse made-up ids; definition order then decides
        return None
    return None


def _token_ids(model: nn.Module) -> dict[str, torch.Tensor]:
    """Two sequences of four ids, under the name of the model's first parameter or `input_ids`."""
    parameters = list(inspect.signature(model.forward).parameters)
    name = "input_ids" if "input_ids" in parameters else parameters[0]
    return {name: torch.zeros(2, 4, dtype=torch.long, device="meta")}
