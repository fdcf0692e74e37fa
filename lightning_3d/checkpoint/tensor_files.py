# SPDX-License-Identifier: Apache-2.0
"""The bulk of a checkpoint: named sharded tensors in and out of torch.distributed.checkpoint's files.

Torch's planners and file layout are used as they are; what is ours is where the pieces come from (`shards`), the
checksums, and that nothing is unpickled: tensors are read with `weights_only=True`, there are no other objects in
the files, a plan that asks for one is refused, and the index comes from `safe_index`.
"""

import io
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_3d.checkpoint.agreement import Ranks, describe, summary
from lightning_3d.checkpoint.folder import FileRecord
from lightning_3d.checkpoint.places import Place, RemotePath
from lightning_3d.checkpoint.shards import Piece, ShardedTensor
from lightning_3d.compat import dcp_load, dcp_save
from lightning_3d.errors import CheckpointError

Tensors = Mapping[str, ShardedTensor]


def write_tensors(
    folder: Place, tensors: Tensors, ranks: Ranks, on_bytes: Callable[[int], None] | None = None
) -> dict[str, FileRecord]:
    """Writes this rank's share of the tensors; collective.

    A piece that several ranks hold is written by one of them, so that the load is spread.

    Args:
        folder: where to write.
        tensors: of this rank.
        ranks: everyone who saves.
        on_bytes: told of every write, in bytes.

    Returns:
        The files that this rank wrote.

    Raises:
        CheckpointError: on all ranks, when any failed.
    """
    writer = _Writer(folder, on_bytes)
    planner = _SavePlanner(tensors)
    with _as_checkpoint_error(f"writing tensors to {folder}", ranks), _released(planner):
        dcp_save(writer, planner, ranks.group)
    return writer.files.records


@dataclass(frozen=True, kw_only=True)
class Target:
    """A tensor to fill, and the name of its data in the file; several targets may have one source."""

    source: str
    tensor: ShardedTensor


def read_tensors(folder: Place, index: Metadata, targets: Sequence[Target], ranks: Ranks) -> None:
    """Fills the targets in place, whatever the layout in which they were saved; collective.

    Args:
        folder: the checkpoint.
        index: of `read_index`.
        targets: what to fill, each source present in the index with the target's shape.
        ranks: everyone who loads.

    Raises:
        CheckpointError: on all ranks, when any failed.
    """
    planner = _LoadPlanner(targets)
    with _as_checkpoint_error(f"reading tensors of {folder}", ranks), _released(planner):
        dcp_load(_Reader(folder, index), planner, ranks.group)


@contextmanager
def _released(planner: "_SavePlanner | _LoadPlanner") -> Iterator[None]:
    """Takes the tensors from a planner afterwards: torch leaves it in a reference cycle, and they would live on."""
    try:
        yield
    finally:
        planner.pieces = {}
        planner.tensors = {}


@contextmanager
def _as_checkpoint_error(doing: str, ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:  # the same on every rank; a BaseException
        failures = [
            describe(error.failures[rank][0]) if rank in error.failures else None
            for rank in range(ranks.size)
        ]
        raise CheckpointError(summary(doing, failures)) from None
    except RuntimeError as error:
        raise CheckpointError(f"While {doing}: {describe(error)}") from error


class _SavePlanner(DefaultSavePlanner):
    """Plans from pieces instead of DTensors; torch's global plan does the rest (each piece once, indexed)."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = _by_index(tensors)
        self.tensors: Tensors = tensors

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, index, self) for (name, _), index in _indices(self.pieces)])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        _check_agreement(all_plans)
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        index = write_item.index
        return self.pieces[index.fqn, _offsets(index)].local


class _LoadPlanner(DefaultLoadPlanner):
    """Reads into pieces; refuses anything but tensors."""

    def __init__(self, targets: Sequence[Target]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.sources = {str(number): target.source for number, target in enumerate(targets)}
        self.tensors: Tensors = {str(number): target.tensor for number, target in enumerate(targets)}
        self.pieces = _by_index(self.tensors)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        stored = self.metadata.state_dict_metadata if self.metadata else {}
        for name, source in self.sources.items():
            entry = stored[source]
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"{source} is not a tensor in this checkpoint.")
            chunks = [_chunk(piece) for piece in self.tensors[name].pieces]
            items += (
                replace(item, dest_index=replace(item.dest_index, fqn=name))
                for item in create_read_items_for_chunk_list(source, entry, chunks)
            )
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is a pickled object; only tensors are read.")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        view = self.pieces[read_item.dest_index.fqn, _offsets(read_item.dest_index)].local
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, length)
        return view


def _by_index(tensors: Tensors) -> dict[tuple[str, tuple[int, ...]], Piece]:
    return {(name, piece.offsets): piece for name, tensor in tensors.items() for piece in tensor.pieces}


def _indices(
    pieces: Mapping[tuple[str, tuple[int, ...]], Piece],
) -> Iterator[tuple[tuple[str, tuple[int, ...]], MetadataIndex]]:
    return ((key, MetadataIndex(key[0], torch.Size(key[1]))) for key in pieces)


def _offsets(index: MetadataIndex) -> tuple[int, ...]:
    return tuple(index.offset or ())


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=piece.local.size())


def _write_item(name: str, index: MetadataIndex, planner: _SavePlanner) -> WriteItem:
    tensor = planner.tensors[name]
    data = TensorWriteData(
        chunk=_chunk(planner.pieces[name, _offsets(index)]),
        properties=TensorProperties(dtype=tensor.dtype),
        size=tensor.shape,
    )
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


def _check_agreement(plans: Sequence[SavePlan]) -> None:
    """One name is one tensor: the same shape and dtype wherever a part of it lives."""
    known: dict[str, TensorWriteData] = {}
    for item in (item for plan in plans for item in plan.items):
        data = cast(TensorWriteData, item.tensor_data)
        first = known.setdefault(item.index.fqn, data)
        if (first.size, first.properties.dtype) != (data.size, data.properties.dtype):
            raise CheckpointError(
                f"{item.index.fqn} is {tuple(first.size)} {first.properties.dtype} on one rank and "
                f"{tuple(data.size)} {data.properties.dtype} on another. Names must mean one tensor on all ranks."
            )


class _Files(FileSystem):
    """Files of a folder on a disk or at a remote address, by paths that know how to open themselves."""

    def create_stream(self, path: Any, mode: str) -> Any:
        return path.open(mode)

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def init_path(self, path: Any) -> Any:
        return path


class _ChecksummedFiles(_Files):
    """Files whose size and checksum are known when they are written."""

    def __init__(self, on_bytes: Callable[[int], None] | None) -> None:
        self.records: dict[str, FileRecord] = {}
        self.error: Exception | None = None
        """The first error of writing: torch's zip writer reports the consequences instead (`unexpected pos`)."""
        self._on_bytes = on_bytes

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as raw:
            stream = _ChecksummedStream(raw, self._on_bytes)
            try:
                yield stream
                stream.flush()
            finally:
                self.error = self.error or stream.error
        self.records[path.name] = FileRecord(num_bytes=stream.num_bytes, crc32=stream.checksum)

    def rename(self, path: Any, new_path: Any) -> None:
        path.rename(new_path)
        self.records[new_path.name] = self.records.pop(path.name)

    def exists(self, path: Any) -> bool:
        return path.exists()

    def mkdir(self, path: Any) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def rm_file(self, path: Any) -> None:
        path.unlink()


class _ChecksummedStream(io.IOBase):
    """A file that is written from front to back."""

    def __init__(self, raw: io.IOBase, on_bytes: Callable[[int], None] | None) -> None:
        self.raw = raw
        self.num_bytes = 0
        self.checksum = 0
        self.error: Exception | None = None
        self._on_bytes = on_bytes

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            written = int(self.raw.write(data))
        except Exception as error:
            self.error = self.error or error
            raise
        self.checksum = zlib.crc32(data, self.checksum)
        self.num_bytes += written
        if self._on_bytes is not None:
            self._on_bytes(written)
        return written

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        try:
            if not self.raw.closed:
                self.raw.flush()
        except Exception as error:
            self.error = self.error or error
            raise

    def fileno(self) -> int:
        self.flush()  # whoever asks for the descriptor wants to sync what was written
        return self.raw.fileno()


class _Writer(FileSystemWriter):
    def __init__(self, folder: Place, on_bytes: Callable[[int], None] | None) -> None:
        super().__init__(folder, sync_files=not isinstance(folder, RemotePath))
        self.fs = self.files = _ChecksummedFiles(on_bytes)
        self.path = cast(Any, folder)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(save_id=self.save_id)  # without the path, which is not the final one

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except (
            Exception
        ) as error:  # as text: an error that does not pickle would leave the other ranks waiting
            raise CheckpointError(describe(self.files.error or error)) from None


class _Reader(FileSystemReader):
    def __init__(self, folder: Place, index: Metadata) -> None:
        super().__init__(folder)
        self.fs = _Files()
        self.path = cast(Any, folder)
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self.index.storage_meta = StorageMeta(load_id=self.load_id)
        return self.index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        places = self.storage_data
        in_order = sorted(
            plan.items,
            key=lambda item: (places[item.storage_index].relative_path, places[item.storage_index].offset),
        )
        try:
            return super().read_data(replace(plan, items=in_order), planner)
        except FileNotFoundError as error:
            name = os.path.basename(error.filename or str(error))
            raise CheckpointError(
                f"{name} was written on the disk of another node. Copy the nodes' folders of this checkpoint "
                "into one that all ranks see, or load in the layout in which it was saved."
            ) from None
        except Exception as error:
            raise CheckpointError(describe(error)) from None
