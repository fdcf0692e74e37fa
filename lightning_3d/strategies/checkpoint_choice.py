# SPDX-License-Identifier: Apache-2.0
"""What `ckpt_path="last"` and `"best"` mean: the newest, or best, checkpoint that is whole."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from lightning_3d.checkpoint import is_checkpoint, newest_checkpoint, read_metadata
from lightning_3d.checkpoint.agreement import listed
from lightning_3d.checkpoint.commit import is_taken, recover_all, unfinished
from lightning_3d.checkpoint.folder import read_manifest
from lightning_3d.checkpoint.places import place_of
from lightning_3d.compat_lightning import (
    checkpoint_folder,
    let_link_anywhere,
    look_with,
    on_checkpoint_choice,
    on_restore,
)
from lightning_3d.errors import CheckpointError
from lightning_3d.parallel.agreement import by_value, say_ranks

if TYPE_CHECKING:
    import lightning.pytorch as pl


def take_part(trainer: "pl.Trainer", finish_saving: Callable[[], None]) -> None:
    """Has a say in what a Trainer makes of `ckpt_path`.

    Args:
        trainer: before it looks for checkpoints.
        finish_saving: waits for a checkpoint in the background, which may be the newest.
    """

    def before(asked: Any) -> str | None:
        finish_saving()
        return look(trainer, asked)

    on_checkpoint_choice(trainer, before, partial(choose, trainer))
    on_restore(trainer, check_seen_by_all)


def look(trainer: "pl.Trainer", asked: Any) -> str | None:
    """What a user's `ckpt_path` means before Lightning looks; None leaves it to Lightning, and then to `choose`."""
    if asked == "best":
        _remember_best(trainer)
    return _newest(trainer) if asked == "last" else None


def _remember_best(trainer: "pl.Trainer") -> None:
    """Gives a ModelCheckpoint of a new process the best path that the newest checkpoint knows of."""
    callback = trainer.checkpoint_callback
    if not isinstance(callback, ModelCheckpoint) or callback.best_model_path:
        return
    newest = newest_checkpoint(checkpoint_folder(callback, trainer))
    if newest is None:
        return
    state = read_metadata(newest).get("callbacks", {}).get(callback.state_key, {})
    callback.best_model_path = state.get("best_model_path", "")
    callback.best_k_models = state.get("best_k_models", {})


def check_folders(trainer: "pl.Trainer") -> None:
    """Lets callbacks keep checkpoints at any address, and refuses, before training, one that cannot be used.

    Raises:
        CheckpointError: fsspec does not know its protocol, or misses a package for it.
    """
    for callback in _keepers(trainer):
        place_of(callback.dirpath or trainer.default_root_dir)
        let_link_anywhere(callback)
        look_with(callback, is_taken)


def _keepers(trainer: "pl.Trainer") -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def _newest(trainer: "pl.Trainer") -> str | None:
    """The newest whole checkpoint of all ModelCheckpoint callbacks, which is what `last` means; None if there is none.

    Lightning takes the file called `last` that was modified last, whole or not.
    """
    found, skipped = [], []
    for folder in sorted({checkpoint_folder(callback, trainer) for callback in _keepers(trainer)}):
        place = place_of(folder)
        recover_all(place)
        whole = newest_checkpoint(place)
        found += [whole] if whole is not None else []
        skipped += unfinished(place)
    latest = max(found, key=lambda place: read_manifest(place).created_ns) if found else None
    if skipped:
        rank_zero_warn(
            f"Skipped {len(skipped)} partial or damaged checkpoints: {listed(skipped)}. "
            + (f"Resuming from {latest}." if latest else "There is no whole one beside them."),
            stacklevel=8,
        )
    return None if latest is None else str(latest)


def choose(trainer: "pl.Trainer", asked: Any, chosen: Any) -> Any:
    """Replaces what Lightning found for `best` where that is partial, and for `last` where it is no file either.

    Args:
        trainer: with its ModelCheckpoint callbacks.
        asked: the user's `ckpt_path`.
        chosen: Lightning's: for `last` by modification time, whole or not, and None without a file called `last`.
    """
    place = place_of(chosen) if chosen else None
    if asked == "last":
        return chosen if place is not None and place.is_file() else None
    callbacks = _keepers(trainer)
    if asked == "best" and place is not None and callbacks and not place.is_file() and not is_checkpoint(place):
        best = _best_whole(callbacks[0])
        if best is not None:
            rank_zero_warn(
                f"The best checkpoint, {chosen}, is not whole. Taking the next best, {best}.", stacklevel=8
            )
            return best
    return chosen


def check_seen_by_all(path: Any) -> None:
    """Checks that all ranks load a checkpoint, or none does; collective over the world.

    Ranks look for `last` before they have met, each on its own disk. Which one is loaded, rank 0 says.

    Args:
        path: what this rank found, or None.

    Raises:
        CheckpointError: on every rank, if some see a checkpoint and others do not.
    """
    ranks = by_value(None if path is None else str(path))
    if len(ranks) > 1 and None in ranks:
        blind = ranks.pop(None)
        found, seeing = next(iter(ranks.items()))
        raise CheckpointError(
            f"The checkpoint {found} was found on {say_ranks(seeing)}, and none on {say_ranks(blind)}, which would start"
            " anew. All ranks must see it: keep checkpoints on storage that all nodes share, or bring the folder to"
            " those nodes; or start anew everywhere with ckpt_path=None."
        )


def _best_whole(callback: ModelCheckpoint) -> str | None:
    """The best checkpoint of `best_k_models` that is whole."""
    scores = {path: float(score) for path, score in callback.best_k_models.items() if _whole(path)}
    if not scores:
        return None
    pick = min if callback.mode == "min" else max
    return pick(scores, key=lambda path: scores[path])


def _whole(path: str) -> bool:
    try:
        return is_checkpoint(path)
    except CheckpointError:
        return False
