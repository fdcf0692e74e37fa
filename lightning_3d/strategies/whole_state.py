# SPDX-License-Identifier: Apache-2.0
"""The weights of the whole model on one rank, for what knows of no shards (`save_pretrained`, `torch.save`)."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.mesh import ParallelMesh


def gather_state(module: nn.Module, mesh: ParallelMesh) -> dict[str, Tensor]:
    """Gathers a module's state dict; collective over the world.

    Args:
        module: the parallelized module, whose parameters FSDP holds as shards.
        mesh: of this rank.

    Returns:
        On global rank 0 every tensor of the model, whole, on the CPU; elsewhere nothing.
    """
    receives = mesh.dp_rank == 0 and mesh.rank("tp") == 0
    own: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if receives and isinstance(whole, Tensor):
            own[name] = whole.detach().cpu()
    if not receives:
        return {}
    if mesh.pp_size == 1:
        return own
    parts: list[Any] | None = [None] * mesh.pp_size if mesh.holds_loss else None
    dist.gather_object(own, parts, dst=mesh.loss_rank, group=mesh.group("pp"))
    return {name: value for part in reversed(parts or ()) for name, value in part.items()}
