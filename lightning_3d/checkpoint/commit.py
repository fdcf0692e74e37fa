# SPDX-License-Identifier: Apache-2.0
"""A checkpoint gets its name when it is whole: its files first, under a name of the save's own.

How is a matter of the file system: `renaming` on mounted ones, `pointing` at remote addresses.

[Note: per-node disks] The ranks that see one another's files share a file system. The lowest of them, the keeper,
makes and names that file system's checkpoint. On a shared file system there is one keeper; where every node has a
disk of its own there is one per node, each folder has a copy of the indices, and the manifest says which files
are here.
"""

import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from lightning_3d.checkpoint.agreement import Ranks
from lightning_3d.checkpoint.folder import (
    DCP_INDEX,
    MANIFEST,
    FileRecord,
    Manifest,
    whole_manifest,
)
from lightning_3d.checkpoint.naming import Naming
from lightning_3d.checkpoint.places import PathLike, Place, RemotePath, place_of
from lightning_3d.checkpoint.pointing import DATA, ByPointer
from lightning_3d.checkpoint.renaming import ByRename, is_unfinished, lost_names
from lightning_3d.errors import CheckpointError

_PROBE = ".rank-"


def naming(final: Place) -> Naming:
    """How a name is made to stand for a checkpoint."""
    return ByPointer(final) if isinstance(final, RemotePath) else ByRename(final)


@dataclass(frozen=True, kw_only=True)
class Staging:
    """A folder that is being written, on this rank's file system."""

    final: Place
    """The name that it gets."""
    folder: Place
    save_id: str
    keeper: int
    """The rank that makes and renames this file system's folder."""
    is_keeper: bool
    num_keepers: int


def open_staging(final: Place, ranks: Ranks) -> Staging:
    """Makes the folder in which all ranks write; collective.

    Raises:
        CheckpointError: `final` is something else than a checkpoint, or the parent is not writable. On all ranks.
    """
    save_id = ranks.broadcast(uuid.uuid4().hex[:12])
    folder = naming(final).staging(save_id)
    try:
        ranks.together(f"preparing {final}", lambda: _announce(final, folder, ranks.rank))
        seen = ranks.together(f"preparing {final}", lambda: _announced(folder))
        keepers = ranks.all_gather(min(seen))
        staging = Staging(
            final=final,
            folder=folder,
            save_id=save_id,
            keeper=min(seen),
            is_keeper=min(seen) == ranks.rank,
            num_keepers=len(set(keepers)),
        )
        ranks.together(f"preparing {final}", lambda: _clean(staging, ranks.rank))
    except CheckpointError:
        naming(final).abandon(folder)
        raise
    return staging


def _announce(final: Place, folder: Place, rank: int) -> None:
    _refuse_foreign(final)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{_PROBE}{rank}").write_bytes(b"-")  # a rank that may not write fails here, before anything is


def _announced(folder: Place) -> list[int]:
    return [int(path.name.removeprefix(_PROBE)) for path in folder.iterdir() if path.name.startswith(_PROBE)]


def _clean(staging: Staging, rank: int) -> None:
    (staging.folder / f"{_PROBE}{rank}").unlink()
    if staging.is_keeper:
        naming(staging.final).clear(besides=staging.folder)


def _refuse_foreign(final: Place) -> None:
    """A folder that no checkpoint software made is not ours to replace."""
    if not final.is_dir() or final.is_symlink():
        return
    names = {path.name for path in final.iterdir()}
    ours = {MANIFEST, DCP_INDEX, "meta.pt"}
    endings = (".distcp", ".pt", ".json")
    if names and not names & ours and not any(n.endswith(endings) or n.startswith(DATA) for n in names):
        raise CheckpointError(
            f"{final} is a folder with other contents ({', '.join(sorted(names)[:3])}...). "
            "Give the checkpoint a name of its own."
        )


def commit(staging: Staging, files: dict[str, FileRecord], world_size: int, torch_version: str) -> None:
    """Writes the manifest and gives the checkpoint its name; on keepers only, without collectives.

    Args:
        staging: an open staging folder in which every file is written.
        files: all files of the checkpoint, of all ranks.
        world_size: ranks that saved.
        torch_version: for the record.
    """
    here = sorted(name for name in files if staging.num_keepers == 1 or (staging.folder / name).exists())
    manifest = Manifest(
        save_id=staging.save_id,
        created_ns=time.time_ns(),
        world_size=world_size,
        torch_version=torch_version,
        files=files,
        here=tuple(here),
    )
    naming(staging.final).commit(staging.folder, manifest)


def remove_checkpoint(path: PathLike) -> None:
    """Removes a checkpoint, folder, file or link, in such a way that a half-removed one never has its name; local."""
    naming(place_of(path)).remove()


def link_checkpoint(target: PathLike, name: PathLike) -> None:
    """Makes `name` a link to a checkpoint beside it, in one step; local. An older link or checkpoint is replaced."""
    final = place_of(name)
    if final != place_of(target):
        naming(final).link(place_of(target))


def recover(final: Place) -> None:
    """Gives a whole checkpoint its name back when a save died in the middle of naming it."""
    naming(final).recover()


def recover_all(parent: Place) -> None:
    """`recover` for every name in a folder."""
    if isinstance(parent, Path):
        for name in lost_names(parent):
            recover(parent / name)


def unfinished(parent: Place) -> list[str]:
    """Saves in a folder that never finished, and checkpoints in it that are not whole, described."""
    found = []
    paths: list[Place] = list(parent.iterdir()) if parent.is_dir() else []
    for path in sorted(paths, key=str):
        if is_unfinished(path):
            found.append(f"{path.name} (a save that never finished)")
        elif _looks_like_one(path) and whole_manifest(path) is None:
            found.append(f"{path.name} (not whole)")
    return found


def _looks_like_one(path: Place) -> bool:
    if not path.is_dir() or path.name.startswith("."):
        return False
    return path.suffix == ".ckpt" or (path / MANIFEST).exists() or (path / DCP_INDEX).exists()


def is_taken(path: PathLike) -> bool:
    """Whether an address stands for something that a save would replace; files of a dead save do not count. Local."""
    final = place_of(path)
    return (final / MANIFEST).exists() or final.is_file()
