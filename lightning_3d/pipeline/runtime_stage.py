# SPDX-License-Identifier: Apache-2.0
"""One stage as torch's executor sees it: a plain module, and received tensors that live no longer than needed."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from lightning_3d.compat import receive_slots
from lightning_3d.errors import ModelError, StepError
from lightning_3d.pipeline.runtime_meter import StepMeter
from lightning_3d.pipeline.runtime_sync import GradientSync

Wire = tuple[torch.Size, torch.dtype]
"""Shape and dtype of the hidden state that stages send: [b, S, D]."""


class StageCall(nn.Module):
    """Calls the engine's stage module with the microbatch's number and checks what comes back.

    [Note: hidden modules]
    The stage module is kept out of `modules()`. Torch's executor looks there for FSDP modules and then gathers, frees
    and reduces for itself, stage by stage; it also clears the gradients of all it finds whenever a new shape comes.
    What several stages of one rank share (a root, an embedding) it knows nothing of, so `GradientSync` does this.
    """

    def __init__(
        self,
        module: Callable[[Tensor, int], Tensor],
        *,
        stage: int,
        is_last: bool,
        wire: Wire,
        parameters: Callable[[], Iterator[nn.Parameter]],
    ) -> None:
        """Args: see `PipelineRunner`; `parameters` gives those that the stage's backward reaches."""
        super().__init__()
        self._call = (module,)
        self._stage, self._is_last, self._wire = stage, is_last, wire
        self._stage_parameters = parameters
        self.microbatch = 0
        self.failure: Exception | None = None

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters as they are now, gathered ones whole: asked for when the backward is split."""
        return self._stage_parameters()

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [b, S, D], on the first stage an empty tensor -> [b, S, D], on the last stage a scalar."""
        try:
            output = self._call[0](hidden, self.microbatch)
            self._check(output)
        except Exception as error:
            self.failure = error
            raise
        return output.contiguous()

    def _check(self, output: Any) -> None:
        """Refuse what the next stage does not wait for: it would read garbage, or wait for ever."""
        if not isinstance(output, Tensor):
            raise StepError(
                f"Stage {self._stage} returned {type(output).__name__}. Return the hidden state, or on the last stage"
                " the loss, as a tensor."
            )
        shape, dtype = self._wire
        if self._is_last and output.dim() > 0:
            raise StepError(
                f"The loss has shape {tuple(output.shape)}. Return a scalar: its mean or its sum."
            )
        if not self._is_last and (output.shape != shape or output.dtype != dtype):
            raise ModelError(
                f"Stage {self._stage} gives a hidden state {tuple(output.shape)} of {output.dtype}, but the next stage"
                f" waits for {tuple(shape)} of {dtype}. Give the output of every block the same shape and dtype."
            )


class Stage(PipelineStage):
    """Torch's stage with receive buffers that live from the receive to the backward.

    Torch allocates one for every microbatch of the batch, twice, and keeps them: that is more than the activations in
    flight, and would be again for every shape seen.
    """

    def __init__(
        self,
        call: StageCall,
        stage: int,
        num_stages: int,
        *,
        device: torch.device,
        group: torch.distributed.ProcessGroup,
        wire: Wire,
        loss_dtype: torch.dtype,
        sync: GradientSync,
        warm_up: bool,
    ) -> None:
        """Args: see `PipelineRunner`."""
        # The wire requires gradients whether or not something before it does: a stage that follows a frozen one is
        # then like every other, in schedules that split the backward too.
        hidden = torch.empty(wire[0], dtype=wire[1], device="meta", requires_grad=True)
        super().__init__(
            call,
            stage,
            num_stages,
            device,
            input_args=torch.empty(0, device="meta") if stage == 0 else hidden,
            output_args=torch.empty((), dtype=loss_dtype, device="meta", requires_grad=True)
            if stage == num_stages - 1
            else hidden,
            group=group,
        )
        self._stage_call, self._wire, self._sync, self._warm_up = call, wire, sync, warm_up
        self.meter = StepMeter(device)

    @property
    def failure(self) -> Exception | None:
        """What the stage module raised, if it did."""
        return self._stage_call.failure

    def clear_runtime_states(self) -> None:
        """Forgets everything of the last run."""
        for cache in (
            self.fwd_cache,
            self.bwd_cache,
            self.output_chunks,
            self.backward_state,
            self.dw_runner,
        ):
            cache.clear()

    # [Note: no vote] Before a first step torch sends messages through all stages, to open connections and to ask
    # whether all have metadata. Ours always have: later executors send none, and a new shape costs no such trip.

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Tensor:
        return super()._warmup_forward_vote(*args, **kwargs) if self._warm_up else self._yes()

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Tensor:
        return super()._warmup_backward_result(*args, **kwargs) if self._warm_up else self._yes()

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return super()._get_init_p2p_neighbors_ops() if self._warm_up else []

    def _yes(self) -> Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_forward_infra(*args, **kwargs)
        self._drop_buffers(self.args_recv_info)
        return result

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_backward_infra(*args, **kwargs)
        self._drop_buffers(self.grad_recv_info)
        return result

    def _drop_buffers(self, infos_by_microbatch: dict[int, Any]) -> None:
        for infos in infos_by_microbatch.values():
            for slot in receive_slots(infos):
                slot.buffer = None

    def _new_buffers(self, infos: Any, requires_grad: bool) -> None:
        shape, dtype = self._wire
        for slot in receive_slots(infos):
            slot.buffer = torch.empty(shape, dtype=dtype, device=self.device, requires_grad=requires_grad)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """The receive of a microbatch's hidden state."""
        self._new_buffers(self.args_recv_info[fwd_chunk_id], self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """The receive of the gradient of a microbatch's hidden state."""
        if self.has_backward and not self.is_last:
            self._new_buffers(self.grad_recv_info[bwd_chunk_id], requires_grad=False)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """The send of a microbatch's hidden state; without a backward the stage forgets it."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        if not self.has_backward:
            self.fwd_cache.pop(fwd_chunk_id)
        return ops

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Runs one microbatch forward."""
        self._stage_call.microbatch = fwd_chunk_id
        with self.meter.action():
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._drop_buffers({0: self.args_recv_info[fwd_chunk_id]})
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Runs one microbatch backward: all of it, or the part that gives the input's gradient."""
        with self.meter.action(), self._sync.last_backward(self.stage_index, last_backward):
            super().backward_one_chunk(
                bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
            )
        self._drop_buffers({0: self.grad_recv_info.get(bwd_chunk_id, ())})
        gradients = self.bwd_cache.get(bwd_chunk_id)
        if gradients is not None:  # what is sent must be contiguous; what is not sent is not kept
            kept = () if self.is_first else tuple(g if g is None else g.contiguous() for g in gradients)
            self.bwd_cache[bwd_chunk_id] = kept

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Runs the part of a microbatch's backward that gives the parameters' gradients."""
        with self.meter.action(), self._sync.last_backward(self.stage_index, last_backward):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
