# SPDX-License-Identifier: Apache-2.0
"""`CutCheck`: before the first optimizer step, do the stages compute what the whole model computes?

[Note: what a cut could lose]
Only the hidden state crosses from stage to stage. A model that hands on something else (a skip connection over several
blocks, an attribute or a buffer that one block writes and another reads) would train on stand-ins, and nobody would
notice. The first training batch finds it, by two questions that do not depend on the model's kind:

- *Does a stage compute with a stand-in?* In this batch each stage runs forward once more, with NaN instead of zeros in
  place of stand-ins. If it gives NaN only then, it used one. This takes no memory to speak of, at any size.
- *Is the loss that of the whole model?* The ranks of the last stage keep a copy of a model of up to `LIMIT_BYTES`, made
  before the cut, run the first microbatch through it, and compare.

The second is left out where it would not tell: weights that were loaded or changed since the copy, a model that was
made on the meta device, a step that draws random numbers which a rank of its own cannot draw again, or one that raises
when it runs on the copy.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.errors import ModelError
from lightning_3d.mesh import ParallelMesh
from lightning_3d.parallel.random_state import enter_stage, step_random_state
from lightning_3d.pipeline.microbatch import copy_of_batch

LIMIT_BYTES = 256 * 2**20
"""A whole model above this is not kept beside its stages."""

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Relative difference of the loss that rounding may make; several times more than it does."""
_LOW_PRECISION, _ABSOLUTE = 5e-2, 1e-5


class CutCheck:
    """Compares stages with the whole model in the first training batch. See [Note: what a cut could lose]."""

    def __init__(
        self, module: nn.Module, blocks_name: str, mesh: ParallelMesh, *, low_precision: bool
    ) -> None:
        """Keeps what the check needs of a module that is still whole.

        Args:
            module: the LightningModule, before it is cut.
            blocks_name: name of its list of blocks.
            mesh: the mesh.
            low_precision: whether the stages compute in 16 or 8 bits.
        """
        self._mesh, self._blocks_name, self._low_precision = mesh, blocks_name, low_precision
        self._compares = _is_small(module)
        self._whole = _copy_of(module) if self._compares and mesh.holds_loss else None
        self._digest = 0.0
        self._starts: tuple[int, ...] = ()
        self._seed = 0
        self._leaks: list[str] = []
        self._expected: Tensor | None = None
        self.is_due = True

    def begin(self, module: nn.Module, starts: tuple[int, ...]) -> None:
        """Remembers the values of this rank's part of the model; `starts` has the first block of each stage."""
        self._starts = starts
        self._digest = _digest(module) if self._compares else 0.0

    def add_leak(self, stage: int, blocks: range) -> None:
        """Notes that a stage computed with a stand-in."""
        self._leaks.append(
            f"stage {stage} (blocks {blocks.start} to {blocks.stop - 1}) computes with what only an earlier stage has,"
            " beside the hidden state that it receives"
        )

    def is_unchanged(self, module: nn.Module, device: torch.device) -> bool:
        """Whether a copy was kept and no rank's weights have changed since `begin`; collective over the world."""
        if not self._compares:
            return False
        changed = torch.tensor(int(_digest(module) != self._digest), device=device)
        dist.all_reduce(changed, op=dist.ReduceOp.MAX)
        return not changed.item()

    def compare(
        self,
        module: nn.Module,
        arguments: tuple[Any, ...],
        loss: Tensor | None,
        *,
        step_name: str,
        loss_of: Callable[[Any], Tensor],
        seed: int,
        device: torch.device,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Runs the first microbatch through the whole model, where this rank kept it, and compares the loss.

        Args:
            module: the LightningModule as it is now.
            arguments: of the step, the microbatch first.
            loss: what the stages gave, on the ranks of the last one.
            step_name: name of the step.
            loss_of: reads the loss from what the step returns.
            seed: of the microbatch.
            device: where to compute.
            context: makes the context around a step.
        """
        whole = self._whole
        if whole is None or loss is None:
            return
        _follow(whole, module)
        whole.to(device)
        for stage, start in enumerate(self._starts):
            block = whole.get_submodule(f"{self._blocks_name}.{start}")
            block.register_forward_pre_hook(lambda *_, s=stage: enter_stage(self._seed, s, device))

        def run(run_seed: int) -> Tensor:
            self._seed = run_seed
            with torch.no_grad(), step_random_state(run_seed, device), context():
                return loss_of(getattr(whole, step_name)(*copy_of_batch(arguments))).detach().double()

        self._expected = expected = _runs_alike(run, seed, other_seeds=self._mesh.tp_mesh is not None)
        if expected is None or not torch.isfinite(expected):
            return
        tolerance = _LOW_PRECISION if self._low_precision else _TOLERANCES.get(loss.dtype, _LOW_PRECISION)
        if not (loss.double() - expected).abs() <= _ABSOLUTE + tolerance * expected.abs():
            self._leaks.append(
                f"the first microbatch has a loss of {float(loss):.6g} over the stages, but {float(expected):.6g} in"
                " the whole model"
            )

    def finish(self, device: torch.device) -> None:
        """Ends the check on all ranks alike and frees the copy; collective over the world.

        Raises:
            ModelError: on every rank, if a stage computed with a stand-in or a loss differs.
        """
        self.is_due, self._whole = False, None
        found = torch.tensor(len(self._leaks), device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        if not found.item():
            return
        by_rank: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_rank, self._leaks)
        leaks = "; ".join(dict.fromkeys(leak for leaks in by_rank for leak in leaks[:1]))
        raise ModelError(
            f"The blocks {self._blocks_name!r} cannot be cut into stages: {leaks}. Only the hidden state goes from"
            " block to block. Make what else they need (a skip connection, state that a block writes) part of the"
            " hidden state, name another list with the strategy's blocks=..., a module that runs on both sides in"
            " first_stage_modules and last_stage_modules, or use pp=1."
        )


def _is_small(module: nn.Module) -> bool:
    """Whether a module may be kept whole, and has values; every rank answers alike."""
    tensors = (*module.parameters(), *module.buffers())
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return num_bytes <= LIMIT_BYTES and not any(tensor.is_meta for tensor in tensors)


def _copy_of(module: nn.Module) -> nn.Module | None:
    """A copy that shares nothing but the Trainer with the module and logs nothing; None where there can be none."""
    trainer = module.__dict__.get("_trainer")
    try:
        whole = copy.deepcopy(module, {} if trainer is None else {id(trainer): trainer})
    except Exception:  # what a user keeps on a module need not be copyable
        return None
    whole.__dict__["log"] = lambda *args, **kwargs: None
    return whole


def _follow(whole: nn.Module, module: nn.Module) -> None:
    """Gives the copy the modes of the module, and plain values that hooks have set since."""
    parts = dict(whole.named_modules())
    for name, child in module.named_modules():
        if name in parts:  # hooks may have added some
            parts[name].training = child.training
    for name, value in module.__dict__.items():
        if isinstance(value, bool | int | float | str | None):
            whole.__dict__[name] = value


def _runs_alike(run: Callable[[int], Tensor], seed: int, *, other_seeds: bool) -> Tensor | None:
    """The whole model's loss; None if it is another each time, so that no other process could have the same.

    A step draws from seeded generators, so that only those of its own differ.
    """
    try:
        first = run(seed)
        again = run(seed + 1 if other_seeds else seed)  # under tp, ranks draw for their parts of a tensor
        return first if torch.allclose(first, again, rtol=1e-6, atol=0) else None
    except Exception:  # the copy lacks what a hook gave the module, say
        return None


@torch.no_grad()
def _digest(module: nn.Module) -> float:
    """A number that changes when a weight does; makes no copies."""
    total = 0.0
    for number, tensor in enumerate((*module.parameters(), *module.buffers())):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not local.numel() or local.is_complex():
            continue
        if local.is_floating_point():
            size = torch.linalg.vector_norm(local.detach(), ord=1, dtype=torch.float64)
        else:
            size = local.sum()
        total += (number % 97 + 1) * float(size)
    return total
