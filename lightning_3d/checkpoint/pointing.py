# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint gets its name in a store of objects, which renames nothing: one small object is written last.

```
last.ckpt/manifest.json          the pointer: what it says is the checkpoint; replaced in one step
last.ckpt/data-9f2c41d07a55/...  the files of the save that it points to
last.ckpt/data-...               of a save that is being written, or died: nobody looks at it
```
Deleting goes the other way round: the pointer first. An object is all there or not at all with S3, Google Cloud
Storage, Azure and their like; a server of plain files (sftp) may keep half of a manifest when it dies just then, and
that is refused as damaged.
"""

import contextlib
import warnings
from dataclasses import replace
from typing import final

from lightning_3d.checkpoint.agreement import describe
from lightning_3d.checkpoint.folder import (
    MANIFEST,
    Manifest,
    check_sizes,
    read_manifest,
    remove,
    write_link,
    write_manifest,
)
from lightning_3d.checkpoint.naming import Naming
from lightning_3d.checkpoint.places import Place, RemotePath
from lightning_3d.errors import CheckpointError

DATA = "data-"


@final
class ByPointer(Naming):
    """A name stands for the files that its manifest points to."""

    name: RemotePath

    def staging(self, save_id: str) -> RemotePath:
        """Below the name."""
        return self.name / f"{DATA}{save_id}"

    def clear(self, besides: Place) -> None:
        """Everything below but the checkpoint itself; nothing where that does not read."""
        kept = [besides.name]
        if (self.name / MANIFEST).exists():
            try:
                manifest = read_manifest(self.name)
            except CheckpointError:
                return
            kept += [MANIFEST, *((manifest.data,) if manifest.data else manifest.files)]
        self._remove_all(*kept)

    def commit(self, folder: Place, manifest: Manifest) -> None:
        """Writes the manifest."""
        manifest = replace(manifest, data=folder.name)
        check_sizes(self.name, manifest)  # what the store has, not what it was given
        write_manifest(self.name, manifest)
        with contextlib.suppress(Exception):  # the checkpoint stands, whatever becomes of the old one
            self._remove_all(folder.name, MANIFEST)
            if self.name.is_file():  # a plain file of another strategy
                remove(self.name)

    def abandon(self, folder: Place) -> None:
        """Asks what stands: a store that answers too late may have written the manifest all the same."""
        with contextlib.suppress(Exception):
            if not (self.name / MANIFEST).exists() or read_manifest(self.name).data != folder.name:
                remove(folder)

    def remove(self) -> None:
        """The manifest first."""
        try:
            (self.name / MANIFEST).unlink(missing_ok=True)
        except Exception as error:  # nothing is lost, and training need not end
            warnings.warn(f"{self.name} could not be removed: {describe(error)}", stacklevel=4)
            return
        remove(self.name)

    def link(self, target: Place) -> None:
        """A manifest that says another name."""
        if target.parent != self.name.parent:
            raise ValueError(f"{target} is not beside {self.name}")
        write_link(self.name, target.name)
        with contextlib.suppress(Exception):
            self._remove_all(MANIFEST)

    def recover(self, besides: Place | None = None) -> None:
        """A pointer is replaced in one step."""

    def _remove_all(self, *besides: str) -> None:
        """Removes what is under the name, as far as it can: files of older saves, or of other software."""
        for path in self.name.iterdir():
            if path.name not in besides:
                remove(path)
