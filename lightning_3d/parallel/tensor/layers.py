# SPDX-License-Identifier: Apache-2.0
"""What is mixed into the user's modules: forwards that compute on shards.

Parameters are read from `_parameters` in every forward, because FSDP2 exchanges them around it. What a mixin needs to
know lies in the instance's `__dict__`. See [Note: class swap].
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.errors import ModelError
from lightning_3d.parallel.tensor.collectives import gather_sequence, keep_sequence
from lightning_3d.parallel.tensor.context import TensorContext
from lightning_3d.parallel.tensor.mixing import Mixin
from lightning_3d.parallel.tensor.narrow import NarrowInput
from lightning_3d.parallel.tensor.parameters import local


@dataclass(frozen=True, kw_only=True)
class LinearShard:
    """How a linear layer computes on its shard."""

    context: TensorContext
    transposed: bool = False
    """Whether the weight is [in, out]."""
    own_input: bool = False
    """Whether the layer gathers its input itself, for want of a parent that does it once for all."""
    parts: tuple[tuple[int, int], ...] = ()
    """Output features (start, stop) this rank computes, for weights that every rank keeps whole."""


class ColumnLinear(Mixin):
    """Output features sharded. x: [..., in] whole -> [..., out/tp]."""

    def forward(self, hidden: Tensor) -> Tensor:
        """See the class."""
        shard: LinearShard = self._linear_shard  # type: ignore[attr-defined]
        if shard.own_input:
            shard.context.region.begin(training=self.training)  # type: ignore[attr-defined]
            hidden = shard.context.to_shards(hidden)
        weight, bias = _weights(self)
        if shard.parts:
            weight = torch.cat(
                [weight.narrow(int(shard.transposed), a, b - a) for a, b in shard.parts],
                int(shard.transposed),
            )
            bias = None if bias is None else torch.cat([bias[a:b] for a, b in shard.parts])
        return _linear(hidden, weight, bias, shard.transposed)


class RowLinear(Mixin):
    """Input features sharded. x: [..., in/tp] -> [..., out], summed over ranks."""

    def forward(self, hidden: Tensor) -> Tensor:
        """See the class."""
        shard: LinearShard = self._linear_shard  # type: ignore[attr-defined]
        context = shard.context
        if not context.sequence_parallel:
            context.region.end()
        weight, bias = _weights(self)
        output = context.from_shards(_linear(hidden, weight, None, shard.transposed))
        return output if bias is None else output + bias


def _weights(module: Any) -> tuple[Tensor, Tensor | None]:
    bias = module._parameters.get("bias")
    return local(module._parameters["weight"]), None if bias is None else local(bias)


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    return F.linear(hidden, weight.t() if transposed else weight, bias)


class ShardedInput(Mixin):
    """A module with column layers inside: its input is made whole once. In every forward of it a region begins."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See the class."""
        context, first_name, narrow = self._sharded_input  # type: ignore[attr-defined]
        hidden = first_tensor(args, kwargs, first_name)
        whole = context.to_shards(hidden)
        args, kwargs = replace_tensor(
            args, kwargs, hidden, NarrowInput.of(whole, context.size) if narrow else whole
        )
        if context.sequence_parallel:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        context.region.begin(training=self.training)  # type: ignore[attr-defined]
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            context.region.end()


class WholeSequence(Mixin):
    """A module inside a block that nobody shards: under sequence parallelism it still gets whole sequences."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See the class."""
        context, first_name = self._whole_sequence  # type: ignore[attr-defined]
        first = first_tensor(args, kwargs, first_name)
        length = context.whole_length(first.shape[1])
        whole: dict[int, Tensor] = {}

        def gather(value: Any) -> Any:
            """The input, and what comes along in its shape, such as the residual."""
            if not isinstance(value, Tensor) or value.shape != first.shape or not value.is_floating_point():
                return value
            if id(value) not in whole:
                whole[id(value)] = gather_sequence(value, length, context.group)
            return whole[id(value)]

        args, kwargs = tuple(map(gather, args)), {key: gather(value) for key, value in kwargs.items()}
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        if isinstance(output, tuple | list):
            return type(output)(_keep(value, length, context) for value in output)
        return _keep(output, length, context)


def _keep(value: Any, length: int, context: TensorContext) -> Any:
    if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == length:
        return keep_sequence(value, context.group)
    return value


class BlockScope(Mixin):
    """A block. Its sharded region ends with it, however it ends; with sequence parallelism all of it is the region."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See the class."""
        context: TensorContext = self._block_scope  # type: ignore[attr-defined]
        if context.sequence_parallel:
            context.region.begin(training=self.training)  # type: ignore[attr-defined]
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            context.region.end()


class LocalParameters(Mixin):
    """A module with replicated parameters: its own code finds plain tensors where the DTensors are.

    A module with both parameters and children (`nn.MultiheadAttention`) may use the parameters of its children
    without calling them; for the time of its forward those are plain too. Of a parameter with one value for each head
    a rank sees those of its heads.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See the class."""
        context, name, owners, num_heads = self._local_parameters  # type: ignore[attr-defined]
        # With sequence parallelism it is known of all of them; what is noted here is compiled anew at every change.
        if context.region.active and not context.sequence_parallel:
            context.partial_modules.add(name)
        shown: list[tuple[dict[str, Any], str]] = []
        for owner in owners:
            attributes = vars(owner)  # found before `_parameters` is looked at
            for key, parameter in attributes["_parameters"].items():
                if parameter is not None and key not in attributes:
                    value = local(parameter)
                    attributes[key] = context.own_part(value) if value.shape == (num_heads,) else value
                    shown.append((attributes, key))
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            for attributes, key in shown:
                attributes.pop(key, None)


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any], first_name: str) -> Tensor:
    """The hidden state among the arguments of a forward: the first positional tensor, or the first argument by name.

    Raises:
        ModelError: no argument is a tensor.
    """
    named = [kwargs.get(first_name), *(value for value in kwargs.values() if _is_hidden(value))]
    for value in (*args, *named):
        if isinstance(value, Tensor):
            return value
    raise ModelError(
        "A module with sharded layers was called without a tensor: there is no hidden state to share."
    )


def _is_hidden(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def replace_tensor(
    args: tuple[Any, ...], kwargs: dict[str, Any], old: Tensor, new: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with one tensor for another, wherever it is passed."""
    return (
        tuple(new if value is old else value for value in args),
        {key: new if value is old else value for key, value in kwargs.items()},
    )
