# SPDX-License-Identifier: Apache-2.0
"""Private names of torch and Lightning, and nothing else: a version that changes one breaks this file only.

Each block belongs to one package of ours; each name says which public API will replace it.
"""

import atexit
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses import FakeTensor as TorchFakeTensor
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_traceable_wrapper_subclass

# --- mesh, parallel ---------------------------------------------------------------------------------------------------


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Joins the axes of a mesh into one (`DeviceMesh._flatten`, until a public `flatten` comes)."""
    return mesh._flatten(name)


def foreach_mul_(tensors: list[Tensor], factor: Tensor | float) -> None:
    """Multiplies many tensors in place (`torch._foreach_mul_`, until `torch.nn.utils` has a public one)."""
    torch._foreach_mul_(tensors, factor)


def foreach_copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies many tensors in place (`torch._foreach_copy_`, until there is a public one)."""
    torch._foreach_copy_(targets, sources)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Maps the leaves of nested containers (`torch.utils._pytree`, until `torch.utils.pytree` is in every version)."""
    return pytree.tree_map(function, tree)


def is_wrapper_subclass(tensor: Tensor) -> bool:
    """Whether a tensor holds its data in others (`is_traceable_wrapper_subclass`, documented for such classes)."""
    return bool(is_traceable_wrapper_subclass(tensor))


def tree_tensors(tree: Any) -> list[Tensor]:
    """The tensors in nested containers (as `tree_map`)."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def run_exit_functions() -> None:
    """What is registered with `atexit`, before `os._exit` would skip it (`atexit._run_exitfuncs`)."""
    atexit._run_exitfuncs()


# --- profiling --------------------------------------------------------------------------------------------------------

TorchDispatchMode = _TorchDispatchMode
"""Sees every operator (until `torch.overrides` has a mode below autograd)."""


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread (`_current_graph_task_id`, until autograd has a public one)."""
    return bool(torch._C._current_graph_task_id() != -1)


def watch_resizes(callback: Callable[[Any], None]) -> Callable[[], None]:
    """Calls back after `UntypedStorage.resize_`, with which FSDP2 frees and takes memory past all operators.

    Returns:
        A function that ends it.
    """
    plain = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        result = plain(storage, size)
        callback(storage)
        return result

    setattr(torch.UntypedStorage, "resize_", resize_)  # noqa: B010 - mypy knows no assignment to a method
    return partial(setattr, torch.UntypedStorage, "resize_", plain)


def record_cuda_history() -> None:
    """Begins to record allocations (`torch.cuda.memory._record_memory_history`, until it loses its underscore)."""
    torch.cuda.memory._record_memory_history()


def dump_cuda_history(path: Any) -> None:
    """Writes what was recorded, for pytorch.org/memory_viz, and ends recording (as above)."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    torch.cuda.memory._record_memory_history(enabled=None)


FakeTensor = TorchFakeTensor
"""A tensor without data, with which DTensor finds out about shapes (`torch._subclasses`)."""


def leave_mode(mode: TorchDispatchMode) -> None:
    """Leaves a mode whatever was entered after it, which `__exit__` cannot (`_get_current_dispatch_mode_stack`)."""
    stack = _get_current_dispatch_mode_stack()
    above = stack[stack.index(mode) + 1 :] if mode in stack else []
    for other in reversed(above):
        TorchDispatchMode.__exit__(other, None, None, None)  # type: ignore[no-untyped-call]
    TorchDispatchMode.__exit__(mode, None, None, None)  # type: ignore[no-untyped-call]
    for other in above:
        TorchDispatchMode.__enter__(other)  # type: ignore[no-untyped-call]


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of a name, which functional collectives take (`_resolve_process_group`, as above)."""
    from torch.distributed import distributed_c10d

    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(name)


_COLLECTIVES = (
    "allreduce allgather _allgather_base all_gather_single reduce_scatter _reduce_scatter_base reduce_scatter_single"
    " alltoall_base broadcast"
).split()
"""Methods of a process group; their names change between versions."""


def replace_waits(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Puts something around the places where Python code waits for a collective, until torch has a hook for them.

    These are `Work.wait`, the waiting of functional collectives (`_functional_collectives.wait_tensor`) and, on CUDA,
    of a stream for an event, which is how FSDP2 waits, and collectives that run on the computing stream itself.

    Returns:
        Puts the originals back.
    """
    places: list[tuple[Any, str]] = [(dist.Work, "wait"), (functional_collectives, "wait_tensor")]
    if torch.cuda.is_available():
        places.append((torch.cuda.Stream, "wait_event"))
        places += [(dist.ProcessGroup, name) for name in _COLLECTIVES if hasattr(dist.ProcessGroup, name)]
    originals = [getattr(owner, name) for owner, name in places]
    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, make(original))

    def restore() -> None:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)

    return restore


def allow_compiled_variants(count: int) -> None:
    """Lets one function have that many more compiled forms (`torch._dynamo.config`, public by its documentation)."""
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, 8 + count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 256 + 8 * count)


# --- checkpoint -------------------------------------------------------------------------------------------------------

StridedShard = _StridedShard
"""Placement of FSDP over tensor parallel, and of interleaved shards, until `Shard` can say both."""


def dcp_save(writer: Any, planner: Any, group: Any) -> None:
    """Saves what the planner plans (`_save_state_dict`, until `dcp.save` takes one process without a warning)."""
    from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

    _save_state_dict({}, writer, process_group=group, no_dist=group is None, planner=planner)


def dcp_load(reader: Any, planner: Any, group: Any) -> None:
    """Loads what the planner plans (`_load_state_dict`, until `dcp.load` takes one process without a warning)."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    _load_state_dict({}, reader, process_group=group, no_dist=group is None, planner=planner)


# --- zero -------------------------------------------------------------------------------------------------------------


def extension_folder(name: str) -> Path:
    """Where torch builds and keeps a C++ extension (`_get_build_directory`); made if it is not there."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, verbose=False))


# --- pipeline ---------------------------------------------------------------------------------------------------------
# The executor of pipeline tables and its actions, until torch.distributed.pipelining takes a table publicly.

TorchAction = torch_schedules._Action
TorchActionKind = torch_schedules._ComputationType
TorchScheduleRuntime = torch_schedules._PipelineScheduleRuntime
_NO_OUTPUTS: dict[str, Any] = (  # an option of newer releases
    {"return_outputs": False}
    if "return_outputs" in signature(TorchScheduleRuntime._step_microbatches).parameters
    else {}
)


def lower_table(
    runtime: TorchScheduleRuntime, table: dict[int, list[TorchAction]]
) -> dict[int, list[TorchAction]]:
    """Adds the communication to a table with backward (`_prepare_schedule_with_comms`, as above)."""
    runtime._prepare_schedule_with_comms({rank: list(row) for rank, row in table.items()})
    return runtime.pipeline_order_with_comms


def use_lowered_table(
    runtime: TorchScheduleRuntime, table: dict[int, list[TorchAction]], owners: dict[int, int]
) -> None:
    """Gives an executor a table that has its communication already, and the rank of each stage (as above)."""
    runtime.pipeline_order_with_comms = table
    runtime.stage_index_to_group_rank = owners
    for stage in runtime._stages:
        stage.stage_index_to_group_rank = owners


def run_microbatches(
    runtime: TorchScheduleRuntime, arguments: list[Any], losses: list[Tensor] | None
) -> None:
    """Runs an executor on microbatches that are cut already (`_step_microbatches`, until `step` takes a list)."""
    for stage in runtime._stages:
        stage.has_backward = runtime._has_backward
    targets = [None] * len(arguments)
    runtime._step_microbatches(arguments, None, targets, losses, **_NO_OUTPUTS)


def receive_slots(infos: Any) -> list[Any]:
    """Where a stage receives: objects with a `buffer` (`_RecvInfo`, until stages allocate buffers late)."""
    return [info for info in infos if hasattr(info, "buffer") and not getattr(info, "is_root_arg", False)]


def _fsdp_states(modules: list[Any]) -> list[Any]:
    return [module._get_fsdp_state() for module in modules]


def _fsdp_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # a list since torch 2.12, before that one or none
    return list(groups) if groups is not None else [g for g in (state._fsdp_param_group,) if g is not None]


def fsdp_follow_requires_grad(module: Any) -> None:
    """Copies `requires_grad` of sharded parameters to their gathered ones (`FSDPParam`, until FSDP2 does it itself)."""
    for group in _fsdp_groups(module._get_fsdp_state()):
        for parameter in group.fsdp_params:
            gathered = getattr(parameter, "_unsharded_param", None)
            wanted = parameter.sharded_param.requires_grad
            if gathered is not None and gathered.requires_grad != wanted:
                gathered.requires_grad_(wanted)


def fsdp_reduce_pending(modules: list[Any]) -> int:
    """Reduces gradients that no backward hook has, as torch's own pipeline does (until FSDP2 has `reduce_gradients`).

    Returns:
        Number of parameter groups that had some.
    """
    count = 0
    for group in (group for state in _fsdp_states(modules) for group in _fsdp_groups(state)):
        if any(_has_unsharded_gradient(parameter) for parameter in group.fsdp_params):
            group.post_backward()
            count += 1
    return count


def _has_unsharded_gradient(parameter: Any) -> bool:
    unsharded = getattr(parameter, "_unsharded_param", None)
    accumulated = getattr(parameter, "unsharded_accumulated_grad", None)
    return accumulated is not None or (unsharded is not None and unsharded.grad is not None)


def fsdp_finish_backward(modules: list[Any]) -> None:
    """Waits for reductions outside autograd (`_root_post_backward_final_callback`, as above)."""
    for state in _fsdp_states(modules):
        if state._is_root:
            state._root_post_backward_final_callback()


def fsdp_forget_forwards(modules: list[Any]) -> None:
    """Forgets forwards that no backward followed; keeps gradients (`reset_iter_state` is public, but drops them)."""
    for state in _fsdp_states(modules):
        state._training_state = type(state._training_state).IDLE
        state._state_ctx.iter_forward_root = None
        state._comm_ctx.post_forward_order.clear()
        for group in _fsdp_groups(state):
            group._training_state = type(group._training_state).IDLE
            group._post_forward_indices.clear()


def fsdp_before_reduce(module: Any, call: Callable[[list[str], bool], None]) -> None:
    """Calls `call` before a backward reduces a module's gradients.

    It is given the names of trained parameters without a gradient, and whether any has one. Replaces `post_backward` of
    the module's own groups, until FSDP2 has a hook there.
    """
    for group in _fsdp_groups(module._get_fsdp_state()):
        group.post_backward = _calling_before_reduce(group, group.post_backward, call)


def _calling_before_reduce(
    group: Any, post_backward: Callable[..., Any], call: Callable[[list[str], bool], None]
) -> Callable[..., Any]:
    def noted(*unused: Any) -> Any:
        if group.reduce_grads:
            gathered = [
                parameter for parameter in group.fsdp_params if hasattr(parameter, "_unsharded_param")
            ]
            without = [parameter for parameter in gathered if not _has_unsharded_gradient(parameter)]
            names = [p._param_fqn or "" for p in without if p.sharded_param.requires_grad]
            call(names, len(without) < len(gathered))
        return post_backward(*unused)

    return noted
