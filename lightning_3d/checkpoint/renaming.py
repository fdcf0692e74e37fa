# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint gets its name on a mounted file system: written beside, then renamed."""

import contextlib
import ctypes
import os
import uuid
from pathlib import Path
from typing import final

from lightning_3d.checkpoint.folder import (
    MANIFEST,
    Manifest,
    remove,
    sync_folder,
    whole_manifest,
    write_manifest,
)
from lightning_3d.checkpoint.naming import Naming
from lightning_3d.checkpoint.places import Place

_SAVING = ".saving-"
_REPLACED = ".replaced-"
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@final
class ByRename(Naming):
    """A folder is the checkpoint once it has the name; two names are swapped in one step where that goes."""

    name: Path

    def staging(self, save_id: str) -> Path:
        """Beside, hidden."""
        return self.name.parent / f".{self.name.name}{_SAVING}{save_id}"

    def clear(self, besides: Place) -> None:
        """Unfinished and replaced folders beside."""
        self.recover(besides)
        for leftover in self._siblings():
            if leftover != besides:
                remove(leftover)

    def commit(self, folder: Place, manifest: Manifest) -> None:
        """Renames, when everything is on the disk."""
        assert isinstance(folder, Path)
        write_manifest(folder, manifest)
        sync_folder(folder)
        self._put_in_place(folder, manifest.save_id)
        sync_folder(self.name.parent)

    def _put_in_place(self, folder: Path, save_id: str) -> None:
        """Renames; whatever had the name is removed only once the new folder has it."""
        if not os.path.lexists(self.name):
            folder.rename(self.name)
            return
        aside = self.name.parent / f".{self.name.name}{_REPLACED}{save_id}"
        if exchange(folder, self.name):
            folder.rename(aside)
        else:
            self.name.rename(aside)
            folder.rename(self.name)
        remove(aside)

    def abandon(self, folder: Place) -> None:
        """Whatever has the name has lost this one."""
        remove(folder)

    def remove(self) -> None:
        """Renames, then removes."""
        aside = self.name.parent / f".{self.name.name}{_REPLACED}{uuid.uuid4().hex[:12]}"
        with contextlib.suppress(FileNotFoundError):
            self.name.rename(aside)
        if aside.is_dir() and not aside.is_symlink():
            (aside / MANIFEST).unlink(missing_ok=True)  # or it could come back as one to recover
        remove(aside)

    def link(self, target: Place) -> None:
        """A symbolic link."""
        new = self.name.parent / f".{self.name.name}.link-{uuid.uuid4().hex[:12]}"
        new.symlink_to(os.path.relpath(target, self.name.parent))
        if self.name.is_dir() and not self.name.is_symlink():
            self.remove()
        new.replace(self.name)

    def recover(self, besides: Place | None = None) -> None:
        """From a folder of this name that is whole, the newest."""
        if os.path.lexists(self.name):
            return
        found = []
        for folder in self._siblings():
            manifest = whole_manifest(folder) if folder != besides else None
            if manifest is not None:
                found.append((manifest.created_ns, folder))
        if found:
            with contextlib.suppress(FileNotFoundError, FileExistsError):  # another rank was faster
                max(found)[1].rename(self.name)

    def _siblings(self) -> list[Path]:
        """Unfinished and replaced folders of this name."""
        if not self.name.parent.is_dir():
            return []
        prefixes = (f".{self.name.name}{_SAVING}", f".{self.name.name}{_REPLACED}")
        return [path for path in self.name.parent.iterdir() if path.name.startswith(prefixes)]


def exchange(first: Path, second: Path) -> bool:
    """Swaps two names in one step where the kernel and the file system can (Linux: most local ones)."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0)


def is_unfinished(path: Place) -> bool:
    """Whether a folder is one of a save that never finished."""
    return path.name.startswith(".") and _SAVING in path.name


def lost_names(parent: Path) -> list[str]:
    """Names whose checkpoint may have stayed under a hidden one."""
    hidden = [path.name for path in parent.glob(".*") if _REPLACED in path.name or _SAVING in path.name]
    return [name[1:].rpartition(_REPLACED if _REPLACED in name else _SAVING)[0] for name in hidden]
