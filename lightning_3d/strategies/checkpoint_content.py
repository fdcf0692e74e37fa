# SPDX-License-Identifier: Apache-2.0
"""Lightning's checkpoint dict, taken apart for the writer of shards and put together again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_3d.checkpoint import is_checkpoint, load_weights, read_metadata, read_rank_metadata
from lightning_3d.checkpoint.agreement import Ranks, listed
from lightning_3d.checkpoint.convert import find_prefix
from lightning_3d.checkpoint.places import place_of
from lightning_3d.checkpoint.weight_files import is_weights
from lightning_3d.compat_lightning import train_loaders
from lightning_3d.errors import CheckpointError
from lightning_3d.strategies.data_position import Progress, is_stateful
from lightning_3d.strategies.resume import (
    KEY,
    ResumePoint,
    coordinates,
    epoch_is_half_done,
    epoch_is_over,
    finish_epoch,
    random_state,
    reopen_epoch,
    sizes,
    warn_of_other_layout,
)
from lightning_3d.strategies.weight_averaging import BESIDE

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_3d.strategies.checkpointing import CheckpointedStrategy

_RNG, _LOADERS = "rng", "loaders"


@dataclass(frozen=True, kw_only=True)
class Content:
    """What one save writes."""

    model: nn.Module
    optimizers: list[Optimizer]
    metadata: dict[str, Any]
    rank_metadata: dict[str, Any]
    model_keys: frozenset[str] | None
    entries: dict[str, Any]
    beside: dict[str, Any]

    def arguments(self) -> dict[str, Any]:
        """For `save_checkpoint`."""
        return vars(self).copy()

    @classmethod
    def of(
        cls,
        strategy: "CheckpointedStrategy",
        checkpoint: dict[str, Any],
        offered: Mapping[str, Any],
        progress: Progress,
        model: nn.Module,
        optimizers: list[Optimizer],
    ) -> "Content":
        """Sorts Lightning's dict.

        Args:
            strategy: whose model and optimizers are saved.
            checkpoint: the dict, after all `on_save_checkpoint` hooks.
            offered: the state dict as it was before them.
            progress: of the epoch.
            model: what to save, see `CheckpointedStrategy.stored_state`.
            optimizers: as there.
        """
        whole = "optimizer_states" in checkpoint
        state = checkpoint.get("state_dict", {})
        changed = {key: value for key, value in state.items() if offered.get(key) is not value}
        added = {k: v for k, v in changed.items() if k not in offered and not isinstance(v, DTensor)}
        metadata = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states", *BESIDE)}
        metadata[KEY] = {"whole": whole, "entries": added}
        ranks: dict[str, Any] = {}
        if whole:
            metadata[KEY] |= _run_state(strategy, progress)
            ranks = _rank_state(strategy)
        return cls(
            model=model,
            optimizers=optimizers if whole else [],
            metadata=metadata,
            rank_metadata=ranks,
            model_keys=frozenset(state) if offered.keys() - state.keys() else None,
            entries={key: value for key, value in changed.items() if key not in added},
            beside={label: checkpoint[label] for label in BESIDE if label in checkpoint},
        )

    @staticmethod
    def has_optimizers(strategy: "CheckpointedStrategy", path: Any) -> bool:
        """Whether a checkpoint is one to resume from; one that does not read is, so that loading it says why."""
        whole = True
        if strategy.is_global_zero:
            try:
                whole = read_metadata(path).get(KEY, {}).get("whole", True)
            except Exception:
                whole = True
        whole = strategy.broadcast(whole)
        if not whole:
            rank_zero_warn(
                f"{path} holds weights only: there is no optimizer state in it, nor schedulers or progress. Training "
                "starts anew from its weights. To go on where a run stopped, save with save_weights_only=False.",
                stacklevel=8,
            )
        return whole

    @staticmethod
    def restored(
        strategy: "CheckpointedStrategy",
        path: Any,
        metadata: dict[str, Any],
        *,
        fitting: bool,
        ranks: Mapping[str, Any] | None = None,
    ) -> tuple[ResumePoint | None, dict[str, Any]]:
        """Lightning's dict, and what waits until training starts.

        Args:
            strategy: which resumes.
            path: of the checkpoint.
            metadata: of the checkpoint.
            fitting: whether to resume.
            ranks: what the ranks added; read from the checkpoint if None.
        """
        own = metadata.pop(KEY, {})
        checkpoint = {**metadata, "state_dict": own.get("entries", {})}
        if not fitting:
            return None, checkpoint
        if not own.get("whole", True):
            return None, weights_alone(checkpoint)
        if "seed" not in own or "loops" not in metadata:
            return None, checkpoint
        ranks = read_rank_metadata(path) if ranks is None else ranks
        return _resume_point(strategy, ranks, own, metadata["loops"]["fit_loop"]), checkpoint


def _run_state(strategy: "CheckpointedStrategy", progress: Progress) -> dict[str, Any]:
    module = strategy.lightning_module
    assert module is not None
    replicas = strategy.mesh.dp_size
    return {
        "seed": strategy._seed,
        "steps_run": strategy._num_steps_run,
        "layout": sizes(strategy.mesh),
        "positions": [progress.position(loader, replicas) for loader in train_loaders(module.trainer)],
    }


def _rank_state(strategy: "CheckpointedStrategy") -> dict[str, Any]:
    module, mesh = strategy.lightning_module, strategy.mesh
    assert module is not None
    state: dict[str, Any] = {f"{_RNG}.{coordinates(mesh)}": random_state(strategy.root_device)}
    loaders = [loader.state_dict() for loader in train_loaders(module.trainer) if is_stateful(loader)]
    if loaders:
        state[f"{_LOADERS}.dp{mesh.dp_rank}"] = loaders
    return state


def _resume_point(
    strategy: "CheckpointedStrategy",
    ranks: Mapping[str, Any],
    own: Mapping[str, Any],
    fit_loop: dict[str, Any],
) -> ResumePoint:
    mesh = strategy.mesh
    same_layout = own["layout"] == sizes(mesh)
    if not same_layout:
        warn_of_other_layout(own["layout"], sizes(mesh))
    if epoch_is_half_done(fit_loop):
        reopen_epoch(fit_loop)
    finished = epoch_is_over(fit_loop)
    batches = fit_loop["epoch_loop.batch_progress"]
    if finished:
        finish_epoch(fit_loop)
    _take_own_loader_state(ranks, fit_loop, mesh.dp_rank)
    return ResumePoint(
        steps_run=own["steps_run"],
        seed=own["seed"],
        layout=own["layout"],
        positions=own["positions"],
        random=ranks.get(f"{_RNG}.{coordinates(mesh)}") if same_layout else None,
        new_epoch=finished,
        last_batch=batches["is_last_batch"] and batches["total"]["completed"] < batches["total"]["processed"],
    )


def _take_own_loader_state(ranks: Mapping[str, Any], fit_loop: dict[str, Any], dp_rank: int) -> None:
    """The states of stateful loaders are those of the first replica in Lightning's dict, and differ."""
    states = sorted(name for name in ranks if name.startswith(f"{_LOADERS}."))
    if not states:
        return
    name = f"{_LOADERS}.dp{dp_rank}"
    if name not in ranks:
        name = states[dp_rank % len(states)]
        rank_zero_warn(
            f"The checkpoint has the loader states of {len(states)} replicas, and there are others now: samples may "
            "be seen twice or not at all in this epoch. Resume with as many replicas, or use a DistributedSampler.",
            stacklevel=8,
        )
    fit_loop.setdefault("state_dict", {})["combined_loader"] = ranks[name]


def weights_alone(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What `fit` takes of a checkpoint without optimizer state: its weights, and a start at step 0."""
    kept = {k: v for k, v in checkpoint.items() if k not in ("loops", "callbacks", "epoch", "global_step")}
    return {**kept, "epoch": 0, "global_step": 0, "lr_schedulers": []}


def load_weights_file(strategy: "CheckpointedStrategy", path: Any, *, fitting: bool) -> dict[str, Any] | None:
    """Loads the weights of a file, or of a Hugging Face folder, into the module; None if `path` is neither."""
    module = strategy.lightning_module
    assert module is not None
    plain = strategy.broadcast(
        Ranks.of(None).together(
            f"opening {path}", lambda: is_weights(place_of(path)) and not is_checkpoint(path)
        )
    )
    if not plain:
        return None
    with strategy.restored_state(with_optimizers=False) as (model, _):
        prefix = find_prefix(path, model)
        load_weights(path, model=model, rename=lambda name: prefix + name, strict=module.strict_loading)
    if fitting:
        rank_zero_warn(
            f"{path} is a plain file: its weights are loaded, and training starts anew at step 0. Optimizer state and "
            "progress resume from checkpoints of this strategy only.",
            stacklevel=8,
        )
    strategy._offered = module.state_dict()
    version = {"pytorch-lightning_version": lightning.__version__}
    return weights_alone({**version, "state_dict": dict(strategy._offered)})


def take_over_entries(
    module: nn.Module, state: Mapping[str, Any], offered: Mapping[str, Any], *, strict: bool
) -> None:
    """Applies what `on_load_checkpoint` changed in the state dict that it was shown.

    Raises:
        CheckpointError: strict, and entries that a hook added when saving were not taken out when loading.
    """
    known = module.state_dict()
    foreign = sorted(key for key in state if key not in known)
    if foreign and strict:
        raise CheckpointError(
            f"Unexpected in the checkpoint ({len(foreign)}): {listed(foreign)}. What on_save_checkpoint adds to the "
            "state dict, on_load_checkpoint has to take out; or set strict_loading = False."
        )
    changed = {k: v for k, v in state.items() if k in known and offered.get(k) is not v}
    if changed:
        module.load_state_dict(changed, strict=False)
