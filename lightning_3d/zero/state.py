# SPDX-License-Identifier: Apache-2.0
"""A model and its optimizer as ZeRO holds them, in the form that checkpoints take: each rank's part of every tensor.

[Note: stand-ins]
Checkpoints read a module and its optimizers, shard by shard. Under ZeRO the fp32 masters are the weights, and they and
their optimizer state lie in flat buffers. So a checkpoint gets stand-ins for both, whose parameters are `FlatShard`s:
views of those buffers, which are written and filled where they are. Nothing is gathered; what is on a disk goes through
a mapped file, one buffer at a time.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.checkpoint.agreement import Ranks
from lightning_3d.checkpoint.flat import FlatShard
from lightning_3d.errors import CheckpointError
from lightning_3d.zero.internals import Part, Partitions, is_partitioned, own_part, partition_of
from lightning_3d.zero.optimizer import is_cpu_adam, stored_type


@dataclass(frozen=True, kw_only=True)
class ZeroState:
    """What a checkpoint needs to know of a run under ZeRO."""

    module: nn.Module
    partitions: Partitions
    optimizer: Optimizer | None
    """That DeepSpeed steps, on flat buffers."""
    groups: Sequence[Sequence[nn.Parameter]]
    """The parameters of its groups, as the user gave them."""
    folder: str | None
    """On a disk, for what does not stay in memory."""

    @contextmanager
    def saved(self) -> Iterator["StandIns"]:
        """Stand-ins of the present state; use them inside the context only."""
        with self.partitions.settle():
            buffers = _Buffers(self)
            buffers.read()
            yield _stand_ins(self, buffers, with_state=True)

    @contextmanager
    def loaded(self, *, with_state: bool, ranks: Ranks) -> Iterator["StandIns"]:
        """Stand-ins to fill; what they hold at the end of the context becomes the state. Collective.

        Args:
            with_state: whether optimizer state is filled too.
            ranks: all of them.
        """
        with self.partitions.settle():
            buffers = _Buffers(self)
            buffers.read()
            stand_ins = _stand_ins(self, buffers, with_state=False)
            yield stand_ins
            if with_state:
                ranks.together("restoring the optimizer", lambda: _take_over(self, buffers, stand_ins))
            buffers.write()
            self.partitions.refresh()

    def parts(self) -> dict[int, Part]:
        """Parts of all partitioned parameters, by the parameter's id."""
        found = ((id(p), self.partitions.part(p)) for p in self.module.parameters())
        return {key: part for key, part in found if part is not None}


@dataclass(frozen=True, kw_only=True)
class StandIns:
    """See [Note: stand-ins]."""

    model: "StandInModule"
    optimizers: list[Optimizer]


class StandInModule(nn.Module):
    """A module whose parameters are the parts that this rank holds."""

    def __init__(self, module: nn.Module, shards: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._hidden = (module, dict(shards))  # in a tuple, so that it does not count as a child

    @property
    def _whole(self) -> nn.Module:
        return self._hidden[0]

    def shard(self, value: Any) -> Any:
        """What stands in for a parameter; anything else stands for itself."""
        return self._hidden[1].get(id(value), value)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's, with shards for parameters."""
        state = self._whole.state_dict(*args, **{**options, "keep_vars": True})
        return {key: self.shard(value) for key, value in state.items()}

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, Any]]:
        """The module's, as shards."""
        return ((name, self.shard(p)) for name, p in self._whole.named_parameters(*args, **options))

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """The module's, as shards."""
        return (shard for _, shard in self.named_parameters(recurse=recurse))

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        """The module's."""
        return self._whole.named_buffers(*args, **options)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The module's."""
        return self._whole.named_children()

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Whole tensors for shards go where the shards are; the rest goes to the module."""
        own = self.state_dict()
        rest = {}
        for key, value in state_dict.items():
            shard = own.get(key)
            if isinstance(shard, FlatShard) and not isinstance(value, FlatShard):
                shard.run.copy_(value.reshape(-1).narrow(0, shard.start, shard.run.numel()))
            elif not isinstance(shard, FlatShard):
                rest[key] = value
        return self._whole.load_state_dict(rest, strict=False)


@dataclass(kw_only=True)
class _Copies:
    """Of one buffer that is on a disk."""

    tensors: dict[str | None, Tensor] = field(default_factory=dict)
    """State by key; the masters have the key None."""
    plain: dict[str, Any] = field(default_factory=dict)


class _Buffers:
    """Masters and optimizer state by partition and key, as flat tensors that shards are views of."""

    def __init__(self, state: ZeroState) -> None:
        self._state = state
        self._partitions = state.partitions
        self._copies: dict[int, _Copies] = {}
        self._lengths: dict[int, int] = {}
        for part in state.parts().values():
            end = part.offset + part.length
            self._lengths[part.partition] = max(end, self._lengths.get(part.partition, 0))

    def live_state(self, partition: int) -> dict[str, Any]:
        """The optimizer's state of a buffer."""
        optimizer = self._state.optimizer
        if optimizer is None:
            return {}
        state: dict[str, Any] = optimizer.state.get(self._partitions.flats[partition], {})
        return state

    def read(self) -> None:
        """Copies what is on a disk."""
        for partition, flat in enumerate(self._partitions.flats):
            if not self._partitions.on_disk(partition):
                continue
            with self._partitions.in_memory(partition, changes=False):
                copies = self._copies[partition] = _Copies()
                copies.tensors[None] = self._copied(flat)
                for key, value in self.live_state(partition).items():
                    if _is_like(value, flat):
                        copies.tensors[key] = self._copied(value)
                    else:
                        copies.plain[key] = value

    def write(self) -> None:
        """Puts copies back on the disk."""
        for partition, copies in self._copies.items():
            with self._partitions.in_memory(partition, changes=True):
                flat = self._partitions.flats[partition]
                for key, source in copies.tensors.items():
                    if key is None:
                        flat.data[: source.numel()].copy_(source)
                        continue
                    target = self._live(partition, key, source.dtype)
                    target[: source.numel()].copy_(source)

    def tensor(self, partition: int, key: str | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """The masters (no key) or the state of a buffer; made where it is not there."""
        if self._partitions.on_disk(partition):
            copies = self._copies.setdefault(partition, _Copies())
            if key not in copies.tensors:
                copies.tensors[key] = self._room(self._lengths[partition], dtype)
            return copies.tensors[key]
        return (
            self._partitions.flats[partition].detach() if key is None else self._live(partition, key, dtype)
        )

    def _live(self, partition: int, key: str, dtype: torch.dtype) -> Tensor:
        optimizer, flat = self._state.optimizer, self._partitions.flats[partition]
        assert optimizer is not None
        state = optimizer.state[flat]
        if not isinstance(state.get(key), Tensor):
            state[key] = torch.zeros_like(flat.data, dtype=dtype)
        value: Tensor = state[key]
        return value

    def entries(self, partition: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """State that has an element for each of the masters', and the rest, of a buffer that was read."""
        if self._partitions.on_disk(partition):
            copies = self._copies[partition]
            return {key: value for key, value in copies.tensors.items() if key is not None}, copies.plain
        flat, state = self._partitions.flats[partition], self.live_state(partition)
        like = {key: value for key, value in state.items() if _is_like(value, flat)}
        return like, {key: value for key, value in state.items() if key not in like}

    def _copied(self, tensor: Tensor) -> Tensor:
        room = self._room(tensor.numel(), tensor.dtype)
        room.copy_(tensor.detach())
        return room

    def _room(self, length: int, dtype: torch.dtype) -> Tensor:
        """Zeros in a file that has no name any more: the memory can go to the disk at any time."""
        with tempfile.NamedTemporaryFile(dir=self._state.folder) as file:
            file.truncate(max(length, 1) * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=length, dtype=dtype)


def _is_like(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape and value.dim() == 1


def _stand_ins(state: ZeroState, buffers: _Buffers, *, with_state: bool) -> StandIns:
    shards: dict[int, Tensor] = {}
    parts = state.parts()
    for parameter in state.module.parameters():
        part = parts.get(id(parameter))
        if part is not None:
            shards[id(parameter)] = _shard(part, buffers)
        elif is_partitioned(parameter):
            own = own_part(parameter)
            run = partition_of(parameter).narrow(0, 0, own.length)
            shards[id(parameter)] = FlatShard.of(own.shape, run, own.start)
    optimizers = []
    if state.optimizer is not None:
        optimizers = [_stand_in_optimizer(state, buffers, shards, with_state=with_state)]
    return StandIns(model=StandInModule(state.module, shards), optimizers=optimizers)


def _shard(part: Part, buffers: _Buffers) -> FlatShard:
    """A parameter's masters, and rooms for its state in the buffers that the optimizer has."""

    def room(path: tuple[Any, ...], dtype: torch.dtype) -> FlatShard:
        if len(path) != 1:
            raise CheckpointError(
                f"Optimizer state {path} is nested, which ZeRO's flat buffers cannot hold. Resume with strategy='3d'."
            )
        return view(buffers.tensor(part.partition, path[0], dtype))

    def view(flat: Tensor) -> FlatShard:
        return FlatShard.of(part.shape, flat.narrow(0, part.offset, part.length), part.start)

    shard = view(buffers.tensor(part.partition, None))
    shard.room = room
    return shard


def _stand_in_optimizer(
    state: ZeroState, buffers: _Buffers, shards: Mapping[int, Tensor], *, with_state: bool
) -> Optimizer:
    """An optimizer that was never made: it has the groups and the state, and that is all that is read."""
    live = state.optimizer
    assert live is not None
    kind = stored_type(live)
    stand_in: Any = kind.__new__(kind)
    stand_in.param_groups = [
        {**group, "params": [shards.get(id(p), p) for p in parameters]}
        for group, parameters in zip(live.param_groups, state.groups, strict=True)
    ]
    stand_in.state = {}
    if with_state:
        for key, part in state.parts().items():
            like, plain = buffers.entries(part.partition)
            if like or plain:
                stand_in.state[shards[key]] = {
                    name: FlatShard.of(part.shape, value.narrow(0, part.offset, part.length), part.start)
                    for name, value in like.items()
                } | {name: _stored(name, value) for name, value in plain.items()}
    result: Optimizer = stand_in
    return result


def _stored(name: str, value: Any) -> Any:
    """Counts of steps as torch's optimizers keep them."""
    return torch.tensor(float(value)) if name == "step" and not isinstance(value, Tensor) else value


def _take_over(state: ZeroState, buffers: _Buffers, stand_ins: StandIns) -> None:
    """Gives the optimizer what was restored and is not in a buffer: hyperparameters, counts of steps; local."""
    live, filled = state.optimizer, stand_ins.optimizers[0]
    assert live is not None
    for group, restored in zip(live.param_groups, filled.param_groups, strict=True):
        group.update({key: value for key, value in restored.items() if key != "params"})
    by_partition: dict[int, list[tuple[str, Part, dict[Any, Any]]]] = {}
    parts = state.parts()
    for name, parameter in state.module.named_parameters():
        part = parts.get(id(parameter))
        if part is not None:
            values = filled.state.get(stand_ins.model.shard(parameter), {})
            by_partition.setdefault(part.partition, []).append((name, part, values))
    for partition, members in by_partition.items():
        _take_over_partition(state, buffers, partition, members)


def _take_over_partition(
    state: ZeroState,
    buffers: _Buffers,
    partition: int,
    members: Sequence[tuple[str, Part, dict[Any, Any]]],
) -> None:
    optimizer, flat = state.optimizer, state.partitions.flats[partition]
    assert optimizer is not None
    on_disk = state.partitions.on_disk(partition)
    restored = [(name, values) for name, _, values in members if values]
    live = buffers.live_state(partition)
    if not restored and not on_disk:
        optimizer.state.pop(flat, None)
        return
    for key in [key for key, value in live.items() if isinstance(value, Tensor) and value.dim() == 1]:
        for _, part, values in members:
            if key not in values:
                buffers.tensor(partition, key).narrow(0, part.offset, part.length).zero_()
    plain = _common(restored)
    if not restored:
        plain = {key: 0 for key in live if key == "step"}
    for key, value in plain.items():
        if isinstance(live.get(key), Tensor):
            live[key].fill_(value)
        elif key == "step" and is_cpu_adam(optimizer):
            optimizer.state[flat][key] = int(value)
        else:
            optimizer.state[flat][key] = value.clone() if isinstance(value, Tensor) else value


def _common(restored: Sequence[tuple[str, dict[Any, Any]]]) -> dict[str, Any]:
    """What parameters of one buffer have in common beside tensors of their shape.

    Raises:
        CheckpointError: they do not have it in common.
    """
    common: dict[str, Any] = {}
    for name, values in restored:
        for key, value in values.items():
            if isinstance(value, FlatShard):
                continue
            first = common.setdefault(key, value)
            if first is not value and bool(torch.as_tensor(first != value).any()):
                raise CheckpointError(
                    f"{key} of {name} is {value} in the checkpoint and {first} of {restored[0][0]}, but ZeRO steps both"
                    " at once. Resume with strategy='3d'."
                )
    return common
