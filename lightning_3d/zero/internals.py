# SPDX-License-Identifier: Apache-2.0
"""Private names of DeepSpeed, and nothing else: where a rank's part of each parameter lives, and how it is reached.

ZeRO lays the parameters of a group one behind the other in a flat fp32 buffer, which the optimizer steps. Stages 1 and
2 cut the buffer of a whole group into one partition a rank, so that a parameter may lie on several ranks or on one.
Stage 3 cuts every parameter into one part a rank, and puts the parts of some parameters (a sub-group) into one buffer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Part:
    """A rank's part of one parameter."""

    shape: torch.Size
    """Of the whole parameter."""
    start: int
    """Position in the flattened parameter."""
    length: int
    """Elements, without padding; may be 0."""
    partition: int
    """Index of the flat buffer that they are in."""
    offset: int
    """Position in that buffer."""


class Partitions(Protocol):
    """The flat buffers of a rank, and which part of which parameter is where."""

    @property
    def flats(self) -> Sequence[Tensor]:
        """Masters, as the optimizer has them; empty while on a disk."""

    def part(self, parameter: Tensor) -> Part | None:
        """The rank's part of a parameter; None for one that is whole on every rank."""

    def on_disk(self, partition: int) -> bool:
        """Whether a buffer and its optimizer state are on a disk between steps."""

    def in_memory(self, partition: int, *, changes: bool) -> Any:
        """A context in which a buffer is in memory; what changed goes back to the disk, and to the parameters."""

    def refresh(self) -> None:
        """Brings the masters to the parameters that the model computes with; collective."""

    def settle(self) -> Any:
        """A context in which no parameter is gathered."""


class Stage12Partitions:
    """Partitions of stages 1 and 2."""

    def __init__(self, zero: Any, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self._zero = zero
        self.flats = [group["params"][0] for group in zero.optimizer.param_groups]
        self._group_of = {id(parameter): number for number, group in enumerate(groups) for parameter in group}

    def part(self, parameter: Tensor) -> Part | None:
        """See `Partitions`."""
        group = self._group_of.get(id(parameter))
        if group is None or not hasattr(parameter, "_hp_mapping"):
            return None
        there = parameter._hp_mapping
        if there is None:
            return Part(shape=parameter.shape, start=0, length=0, partition=group, offset=0)
        whole, flat = there.lp_fragment_address, there.hp_fragment_address
        return Part(
            shape=parameter.shape,
            start=whole.start,
            length=whole.numel,
            partition=there.param_group_index,
            offset=flat.start,
        )

    def on_disk(self, partition: int) -> bool:
        """Never: DeepSpeed has no disk in these stages."""
        return False

    @contextmanager
    def in_memory(self, partition: int, *, changes: bool) -> Iterator[None]:
        """Always."""
        yield

    def refresh(self) -> None:
        """See `Partitions`."""
        self._zero.update_lp_params()

    @contextmanager
    def settle(self) -> Iterator[None]:
        """Nothing is gathered in these stages."""
        yield


class Stage3Partitions:
    """Partitions of stage 3 under an optimizer."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self.flats = list(zero.fp32_partitioned_groups_flat)
        self._trained = {id(parameter) for group in zero.fp16_groups for parameter in group}

    def part(self, parameter: Any) -> Part | None:
        """See `Partitions`."""
        if id(parameter) not in self._trained:
            return None
        partition, offset, length = self._zero.grad_position[self._zero.get_param_id(parameter)]
        return _own_part(parameter, length, partition, offset)

    def on_disk(self, partition: int) -> bool:
        """See `Partitions`."""
        return bool(self._zero._swappable_optimizer_subgroup(partition))

    @contextmanager
    def in_memory(self, partition: int, *, changes: bool) -> Iterator[None]:
        """See `Partitions`."""
        zero = self._zero
        if not self.on_disk(partition):
            yield
            return
        zero._optimizer_states_and_gradient_swap_in(partition)
        yield
        if changes:
            zero._reassign_or_swap_out_partitioned_parameters(partition)
            zero._optimizer_states_and_gradient_swap_out(partition)
        else:
            zero._release_swap_buffers(partition)

    def refresh(self) -> None:
        """See `Partitions`."""
        for partition in range(len(self.flats)):
            if not self.on_disk(partition):
                self._zero._reassign_or_swap_out_partitioned_parameters(partition)

    @contextmanager
    def settle(self) -> Iterator[None]:
        """See `Partitions`."""
        self._zero.checkpoint_event_prologue()
        yield
        self._zero.checkpoint_event_epilogue()


class Stage3Parameters:
    """Partitions of stage 3 without an optimizer: the parameters themselves, in the dtype of the model."""

    def __init__(self, zero: Any, parameters: Sequence[nn.Parameter]) -> None:
        self._zero = zero
        self.flats = [partition_of(parameter) for parameter in parameters]
        self._number = {id(parameter): number for number, parameter in enumerate(parameters)}

    def part(self, parameter: Any) -> Part | None:
        """See `Partitions`."""
        number = self._number[id(parameter)]
        return _own_part(parameter, self.flats[number].numel(), number, 0)

    def on_disk(self, partition: int) -> bool:
        """Never: parameters stay in memory where nothing is trained."""
        return False

    @contextmanager
    def in_memory(self, partition: int, *, changes: bool) -> Iterator[None]:
        """Always."""
        yield

    def refresh(self) -> None:
        """The parameters are what is loaded."""

    @contextmanager
    def settle(self) -> Iterator[None]:
        """See `Partitions`."""
        self._zero.partition_all_parameters()
        yield
        persistent = self._zero.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether stage 3 holds a parameter: its own data may be empty then."""
    return hasattr(parameter, "ds_id")


def partition_of(parameter: Any) -> Tensor:
    """This rank's part of a parameter of stage 3, in the dtype of the model, padding included."""
    return parameter.ds_tensor.data.view(-1)


def own_part(parameter: Any) -> Part:
    """The part of a parameter of stage 3 that no optimizer has (it is frozen)."""
    return _own_part(parameter, partition_of(parameter).numel(), -1, 0)


def _own_part(parameter: Any, length: int, partition: int, offset: int) -> Part:
    start = length * dist.get_rank(parameter.ds_process_group)
    held = max(0, min(length, parameter.ds_numel - start))
    return Part(
        shape=torch.Size(parameter.ds_shape),
        start=min(start, parameter.ds_numel),
        length=held,
        partition=partition,
        offset=offset,
    )


def num_elements(parameter: Any) -> int:
    """Elements of a whole parameter."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def loss_scale_state(zero: Any) -> dict[str, Any]:
    """The state of a dynamic loss scale; empty where there is none."""
    scaler = getattr(zero, "loss_scaler", None)
    if not getattr(scaler, "dynamic", False):
        return {}
    names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    return {name: getattr(scaler, name) for name in names}


def set_loss_scale_state(zero: Any, state: dict[str, Any]) -> None:
    """Puts back what `loss_scale_state` returned."""
    for name, value in state.items():
        setattr(zero.loss_scaler, name, value)
