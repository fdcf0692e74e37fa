# SPDX-License-Identifier: Apache-2.0
"""What a file system has to do so that a name stands for a whole checkpoint or for none."""

from abc import ABC, abstractmethod

from lightning_3d.checkpoint.folder import Manifest
from lightning_3d.checkpoint.places import Place


class Naming(ABC):
    """One name, and the ways to make it stand for a checkpoint; local, for keepers (see `commit`)."""

    def __init__(self, name: Place) -> None:
        self.name = name

    @abstractmethod
    def staging(self, save_id: str) -> Place:
        """The folder in which a save of this name writes its files."""

    @abstractmethod
    def clear(self, besides: Place) -> None:
        """Removes what earlier saves of this name left unfinished, a given staging folder excepted."""

    @abstractmethod
    def commit(self, folder: Place, manifest: Manifest) -> None:
        """Makes the name stand for a staging folder that is complete; then removes what it stood for before."""

    @abstractmethod
    def abandon(self, folder: Place) -> None:
        """Removes the staging folder of a save that failed, as far as it can, unless the name stands for it."""

    @abstractmethod
    def remove(self) -> None:
        """Removes what has the name in such a way that a half-removed checkpoint never has it."""

    @abstractmethod
    def link(self, target: Place) -> None:
        """Makes the name stand for a checkpoint beside it, in one step; what had the name is replaced."""

    @abstractmethod
    def recover(self, besides: Place | None = None) -> None:
        """Gives a whole checkpoint its name back when a save died between two steps of `commit`."""
