# SPDX-License-Identifier: Apache-2.0
"""`BlockGate`: decides what happens when the user's forward calls one of the model's blocks.

[Note: the step is the stage]
The forward of a pipeline stage is the user's own step, run to where the stage ends. On a stage that is not the first,
what runs before its blocks works on zeros, and the gate of the last block that it does not have returns the received
hidden state. On a stage that is not the last, the gate of its last block ends the step by raising `StageExit` with the
hidden state. Whatever surrounds the blocks or stands between two of them (masks, rotary tables, embedding multipliers,
logit caps, the loss) is the user's code, run where it belongs, and only the hidden state crosses the wire.

The gate also is the border of sequence parallelism: the hidden state is split along the sequence on entering the first
block and gathered on leaving the last one, so that nothing outside the blocks sees a part of a sequence.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_3d.errors import ModelError, StepError
from lightning_3d.parallel.absent import AbsentTensor
from lightning_3d.parallel.recompute import Recompute
from lightning_3d.parallel.stand_ins import map_tensors, run_on_meta

Call = Callable[..., Any]


class StageExit(BaseException):  # not an Exception: a user's `except Exception` must not swallow it
    """Unwinds the user's step at the end of a stage; carries the hidden state."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class SequenceBorder(Protocol):
    """What is done to the hidden state where the blocks begin and end."""

    def enter_blocks(self, hidden: Tensor) -> Tensor:
        """[B, S, D] -> this rank's part."""

    def exit_blocks(self, hidden: Tensor) -> Tensor:
        """This rank's part -> [B, S, D]."""

    def local_hidden_shape(self, shape: Iterable[int]) -> torch.Size:
        """Shape of this rank's part, given [B, S, D]."""

    def expect_sequence(self, length: int) -> None:
        """Tells a stage that is entered behind the first block the length S of the whole sequence."""


class BlockRun(Protocol):
    """One traversal of the blocks under a pipeline."""

    stand_in: Callable[[Tensor], Tensor] | None
    """Makes what stands for a tensor of another stage; None leaves zeros."""

    @property
    def is_behind_blocks(self) -> bool:
        """Whether the traversal has left the last block."""

    def on_block(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs, skips or ends at block `index`; `call` is the block's own `__call__`."""


class BlockGate:
    """Routes the calls of all blocks of one model; without an active run the blocks behave as always."""

    def __init__(
        self,
        blocks: tuple[nn.Module, ...],
        border: SequenceBorder | None = None,
        recompute: Recompute | None = None,
    ) -> None:
        """Mixes itself into the blocks' classes.

        Args:
            blocks: the model's blocks in order.
            border: what is done to the hidden state where the blocks begin and end.
            recompute: how blocks drop their activations; None keeps them.
        """
        self.num_blocks = len(blocks)
        self.border = border
        self._recompute = recompute
        self._run: BlockRun | None = None
        for index, block in enumerate(blocks):
            _gate(block, self, index)

    @contextmanager
    def running(self, run: BlockRun) -> Iterator[None]:
        """Routes the calls to `run` inside the context."""
        if self._run is not None:
            raise StepError(
                "The blocks are already being traversed: a step called the model from inside the model."
            )
        self._run = run
        try:
            yield
        finally:
            self._run = None

    @property
    def is_running(self) -> bool:
        """Whether a step runs."""
        return self._run is not None

    def stand_in_for(self, output: Any) -> Any:
        """What a module of another stage gives: its output of zeros, or what the traversal makes of it."""
        make = None if self._run is None else self._run.stand_in
        return output if make is None else map_tensors(make, output)

    @property
    def is_behind_blocks(self) -> bool:
        """Whether the step that runs has left the last block."""
        return self._run is not None and self._run.is_behind_blocks

    def on_call(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called instead of block `index`."""
        if self._run is None:
            return self.call_block(index, call, args, kwargs)
        return self._run.on_block(index, call, args, kwargs)

    def call_block(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the block itself, crossing the sequence border at the first and the last one."""
        if index == 0 and self.border is not None:
            args, kwargs = with_hidden(args, kwargs, self.border.enter_blocks(hidden_of(args, kwargs)))
        again = self._recompute
        if again is not None and again.applies_to(index, lambda: hidden_of(args, kwargs)):
            output = again.call(call, args, kwargs)
        else:
            output = call(*args, **kwargs)
        if index == self.num_blocks - 1 and self.border is not None:
            output = with_output_hidden(output, self.border.exit_blocks(output_hidden(output)))
        return output


class _Gated:
    """Mixed into a block's class; see `BlockGate`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gate, index = self.__dict__["_block_gate"]
        return gate.on_call(index, super().__call__, args, kwargs)  # type: ignore[misc]


def _gate(block: nn.Module, gate: BlockGate, index: int) -> None:
    if not isinstance(block, _Gated):
        cls = type(block)
        block.__class__ = type(
            cls.__name__, (_Gated, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__}
        )
    block.__dict__["_block_gate"] = (gate, index)


def gate_of(block: nn.Module) -> BlockGate:
    """The gate of a block."""
    gate, _ = block.__dict__["_block_gate"]
    assert isinstance(gate, BlockGate)
    return gate


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The hidden state among a block's arguments: the first floating-point tensor, positional before keyword."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise ModelError(
        "A block was called without a floating-point tensor: there is no hidden state to send to the next stage."
        " A pipeline needs blocks that take the hidden state as a tensor argument."
    )


def with_hidden(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with the hidden state replaced."""
    old = hidden_of(args, kwargs)
    for position, value in enumerate(args):
        if value is old:
            return (*args[:position], hidden, *args[position + 1 :]), dict(kwargs)
    name = next(key for key, value in kwargs.items() if value is old)
    return args, {**kwargs, name: hidden}


def output_hidden(output: Any) -> Tensor:
    """The hidden state in a block's output: the tensor itself or the first element of a tuple or mapping."""
    first = output
    if isinstance(output, Mapping):
        first = next(iter(output.values()), None)
    elif isinstance(output, tuple | list):
        first = output[0] if output else None
    if isinstance(first, Tensor):
        return first
    raise ModelError(
        f"A block returned {type(output).__name__}, but a pipeline needs a tensor, or a tuple or mapping that"
        " begins with the hidden state."
    )


def with_output_hidden(output: Any, hidden: Tensor) -> Any:
    """The same output with the hidden state replaced."""
    if isinstance(output, Tensor):
        return hidden
    if isinstance(output, Mapping):
        first = next(iter(output))
        return type(output)(**{**output, first: hidden})
    rest = output[1:]
    if hasattr(output, "_fields"):
        return type(output)(hidden, *rest)
    return type(output)((hidden, *rest))


def without_rest(output: Any) -> Any:
    """The same output with tensors beside the hidden state replaced by ones that cannot be computed with."""
    if isinstance(output, Tensor):
        return output
    return with_output_hidden(map_tensors(AbsentTensor.of, output), output_hidden(output))


class StageRun:
    """Runs the blocks `[start, stop)` of one stage and ends the step behind them, the last stage excepted."""

    def __init__(
        self,
        gate: BlockGate,
        start: int,
        stop: int,
        received: Tensor | None,
        *,
        exit_at_stop: bool,
        template: Any,
        on_start: Callable[[], object] = bool,
        stand_in: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Prepares one traversal.

        Args:
            gate: the gate of the model's blocks.
            start: first block of the stage.
            stop: one past its last block.
            received: hidden state from the stage before, or None on the first stage.
            exit_at_stop: whether the step ends behind the last block.
            template: an output of a block, for its structure.
            on_start: called before the first block.
            stand_in: makes what stands for the hidden state where it is not known; None leaves what came.
        """
        self.stand_in = stand_in
        self._gate, self._start, self._stop = gate, start, stop
        self._received, self._exit, self._template = received, exit_at_stop, template
        self._next, self._on_start = start, on_start
        self.last_output: Any = None

    @property
    def is_behind_blocks(self) -> bool:
        """See `BlockRun`."""
        return self._next == self._stop

    def on_block(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `BlockRun`."""
        if index < self._start:
            hidden = hidden_of(args, kwargs)
            if index == self._start - 1 and self._received is not None:
                hidden = self._received.to(output_hidden(self._template).dtype)  # the wire's may be wider
            elif self.stand_in is not None:
                hidden = self.stand_in(hidden)
            return with_output_hidden(self._template, hidden)
        if index != self._next:
            raise StepError(_describe_order(index, self._next, self._stop))
        if index == self._start:
            self._on_start()
        self._next += 1
        output = self._gate.call_block(index, call, args, kwargs)
        if isinstance(output, Tensor) != isinstance(self._template, Tensor):
            raise ModelError(
                f"Block {index} returned {type(output).__name__} where its trial run on the meta device gave"
                f" {type(self._template).__name__}: blocks of other stages would not be stood in for. Return the hidden"
                " state alone, or use pp=1."
            )
        if self._next == self._stop:
            self.last_output = output
            if self._exit:
                raise StageExit(output_hidden(output))
        return output

    def check_complete(self) -> None:
        """Raises if the step returned without passing through every block of the stage.

        Raises:
            StepError: the step did not call the model, or the model left out blocks.
        """
        if self._next != self._stop:
            raise StepError(
                f"The step returned after {self._next - self._start} of the {self._stop - self._start} blocks of this"
                " stage. Under pipeline parallelism every step must call the model exactly once, and the model"
                " must call all its blocks in order. Use pp=1 for steps that do not."
            )


class MergeRun:
    """Passes over all blocks and puts a finished hidden state behind the last one.

    Used in evaluation: the blocks ran microbatch by microbatch, the rest of the step runs once on the whole batch.
    """

    stand_in: Callable[[Tensor], Tensor] | None = None

    def __init__(self, num_blocks: int, hidden: Tensor, template: Any) -> None:
        self._last, self._hidden, self._template = num_blocks - 1, hidden, without_rest(template)
        self._done = False

    @property
    def is_behind_blocks(self) -> bool:
        """See `BlockRun`."""
        return self._done

    def on_block(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `BlockRun`."""
        if self._done:
            raise StepError(_describe_order(index, self._last + 1, self._last + 1))
        if index < self._last:
            return with_output_hidden(self._template, hidden_of(args, kwargs))
        self._done = True
        return with_output_hidden(self._template, self._hidden)


class ProbeRun:
    """Follows the step on the meta device to the end of the blocks, to learn shapes; runs no real block.

    Raises `StageExit` behind the last block. `hidden_shapes[i]` is the shape of the hidden state entering block `i`,
    and the last entry the one leaving the blocks.
    """

    is_behind_blocks = False
    stand_in: Callable[[Tensor], Tensor] | None = None

    def __init__(self, twins: tuple[nn.Module, ...]) -> None:
        self._twins = twins
        self._beside_hidden: list[Tensor] = []
        self.hidden_shapes: list[torch.Size] = []
        self.template: Any = None

    def on_block(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `BlockRun`."""
        hidden = hidden_of(args, kwargs)
        if index != len(self.hidden_shapes):  # here all ranks raise; in a schedule the others would wait
            raise StepError(_describe_order(index, len(self.hidden_shapes), len(self._twins)))
        self.hidden_shapes.append(hidden.shape)
        if any(value is other for value in (*args, *kwargs.values()) for other in self._beside_hidden):
            raise ModelError(
                f"Block {index} takes more than the hidden state from the block before it, but only the hidden state"
                " crosses pipeline stages. Use pp=1, or pack what the blocks pass on into one tensor."
            )
        try:
            output = without_rest(run_on_meta(self._twins[index], args, kwargs, device=hidden.device))
        except (RuntimeError, NotImplementedError):  # an operator that has no meta kernel for these arguments
            output = hidden if self.template is None else with_output_hidden(self.template, hidden)
        self.template = output if self.template is None else self.template
        self._beside_hidden = _beside_hidden(output)
        if index == len(self._twins) - 1:
            self.hidden_shapes.append(output_hidden(output).shape)
            raise StageExit(output_hidden(output))
        return output


def _beside_hidden(output: Any) -> list[Tensor]:
    """Tensors that a block returns behind its hidden state (attention weights, or state for the next block)."""
    if isinstance(output, Tensor):
        return []
    values = list(output.values()) if isinstance(output, Mapping) else list(output)
    return [value for value in values[1:] if isinstance(value, Tensor) and value.is_floating_point()]


def _describe_order(index: int, expected: int, stop: int) -> str:
    if expected >= stop or index < expected:
        return (
            f"Block {index} was called again in one step. Under pipeline parallelism every step must call the model"
            " exactly once. Concatenate the inputs of both calls along the batch dimension, or use pp=1."
        )
    return (
        f"Block {index} was called before block {expected}. Under pipeline parallelism the model must call all its"
        " blocks in order. Use pp=1 for models that skip or reorder blocks."
    )
