"""DCP's storage, reading: any range of a tensor into its final memory, checked, and without running code.

Reads what DCP's own file system storage reads.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from shardstep.checkpoint.storage import dcp_versions, directories, safe_metadata
from shardstep.checkpoint.storage import manifest as manifests
from shardstep.checkpoint.storage.manifest import CheckpointError, FileList, Item, Manifest
from shardstep.checkpoint.storage.torch_file import WINDOW_BYTES, Frame, bytes_in, frame_of, memory_of
from shardstep.comm.host_copies import Uploads, view_as

_SMALL_BYTES = 8 * 1024  # an item up to this size is read with one call, also if a part of it is wanted


class Reader(FileSystemReader):
    """Reads a DCP directory. Checks what it reads if the directory has a manifest; unpickles nothing but plain data.

    ``load`` uses it. It is public for those who call DCP themselves and read what somebody else gave them.

    Args:
        path: the checkpoint directory.

    Examples:
        ```python
        dcp.load(form, storage_reader=checkpoint.Reader(directory), planner=checkpoint.SafeLoadPlanner())
        ```
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.bytes_read = 0  # of data files
        self._manifest: Manifest | None = None
        self._metadata: Metadata | None = None
        self._chunks_of: Metadata | None = None
        self._chunks: dict[Any, tuple[tuple[int, ...], torch.dtype]] = {}
        self._frames: dict[tuple[tuple[int, ...], torch.dtype], Frame] = {}
        self._uploads = Uploads(WINDOW_BYTES)

    @property
    def directory(self) -> Path:
        return Path(self.path)

    @property
    def manifest(self) -> Manifest | None:
        """The checksums, if the directory has any. There after ``read_metadata``."""
        return self._manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id is not None:
            self._metadata = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, through the safe reader, once. CheckpointError names the file that is missing or wrong."""
        if self._metadata is None:
            self._metadata = self._read_metadata()
        return self._metadata

    def _read_metadata(self) -> Metadata:
        path = self.directory / manifests.METADATA_NAME
        if not self.directory.is_dir():
            what = "is no directory" if self.directory.exists() else "does not exist"
            raise CheckpointError(f"expects a checkpoint directory but {self.directory} {what}. Check the path.")
        if not directories.may_be_checkpoint(path.name for path in self.directory.iterdir()):
            raise CheckpointError(directories.no_checkpoint(self.directory))
        self._manifest = manifests.read(self.directory)
        if self._manifest is not None:
            for problem in manifests.quick_problems(self.directory, self._manifest):
                raise CheckpointError(problem)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        metadata = safe_metadata.loads(data, path)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        self._check(metadata, path)
        return metadata

    def _check(self, metadata: Metadata, path: Path) -> None:
        """Check that all items are in files of this directory: the metadata says where to read."""
        for info in (metadata.storage_data or {}).values():
            name = str(info.relative_path)
            if Path(name).name != name:
                raise CheckpointError(f"{path} speaks of a file outside the directory: {name!r}.")
            if self._manifest is not None and name not in self._manifest.files:
                raise CheckpointError(f"{path} speaks of a file that the manifest does not know: {name!r}.")

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        if self._chunks_of is metadata:
            return
        self._chunks_of = metadata
        self._chunks = {
            (fqn, tuple(chunk.offsets)): (tuple(chunk.sizes), entry.properties.dtype)
            for fqn, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            items.sort(key=lambda item: (self.storage_data[item.storage_index].offset, item.storage_offsets))
            self._read_file(name, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, name: str, items: list[ReadItem], planner: LoadPlanner) -> None:
        path = self.directory / name
        checks = self._manifest.files.get(name) if self._manifest is not None else None
        try:
            with open(path, "rb", buffering=0) as stream:
                file = _OpenFile(path, stream, checks)
                for item in items:
                    self._read_item(file, item, planner)
                self.bytes_read += file.bytes_read
        except (CheckpointError, MemoryError, torch.OutOfMemoryError):  # lack of memory is not damage
            raise
        except Exception as error:  # torch.load raises anything for what it did not write
            raise CheckpointError(f"{path} cannot be read as a file of a DCP checkpoint: {error}") from error

    def _read_item(self, file: _OpenFile, item: ReadItem, planner: LoadPlanner) -> None:
        info = self.storage_data[item.storage_index]
        transforms = dcp_versions.transforms_of(info)
        if transforms:
            raise CheckpointError(f"{file.path} is written with transforms {transforms}: unsupported.")
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(file.read_whole(info)))
            return
        shape, dtype = self._chunks[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
        target = planner.resolve_tensor(item).detach()
        region = tuple(item.storage_offsets), tuple(item.lengths)
        payload = self._payload_of(file, info, shape, dtype)
        if payload is None or not _is_contiguous_region(shape, *region):
            saved = torch.load(io.BytesIO(file.read_whole(info)), map_location="cpu", weights_only=True)
            if not isinstance(saved, Tensor) or tuple(saved.shape) != shape:
                raise CheckpointError(f"{file.path} expects a tensor of shape {shape} at byte {info.offset}.")
            for dim, (offset, length) in enumerate(zip(*region, strict=True)):
                saved = saved.narrow(dim, offset, length)
            self._copy(saved, target)
        else:
            start = _flat_start(shape, region[0])
            for at, window in self._windows_for(target, dtype):
                file.read_range(info, payload, (start + at) * dtype.itemsize, memory_of(window))
                if window.data_ptr() != target.data_ptr():
                    self._fill(target, at, window)
        planner.commit_tensor(item, target)

    def _copy(self, saved: Tensor, target: Tensor) -> None:
        if target.device.type == "cpu" or saved.nbytes == 0:
            target.copy_(saved)
            return
        place = view_as(self._uploads.room(saved.nbytes), saved)
        place.copy_(saved)
        self._uploads.send(place, target)

    def _windows_for(self, target: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """Where to read to, in order, with the first element of each: the target's memory, or host memory for it."""
        on_cpu = target.device.type == "cpu"
        if on_cpu and target.is_contiguous() and target.dtype == dtype:
            yield 0, target
            return
        row = 1 if target.is_contiguous() else target[0].numel()
        step = max(WINDOW_BYTES // (row * dtype.itemsize), 1) * row
        for at in range(0, target.numel(), step):
            size = min(step, target.numel() - at) * dtype.itemsize
            memory = torch.empty(size, dtype=torch.uint8) if on_cpu else self._uploads.room(size)
            yield at, memory.view(dtype)

    def _fill(self, target: Tensor, at: int, window: Tensor) -> None:
        """Copy what was read, from element ``at`` on: whole rows, if the target is not contiguous."""
        if target.is_contiguous():
            self._uploads.send(window, target.view(-1)[at : at + window.numel()])
        else:
            rows = target.narrow(0, at // target[0].numel(), window.numel() // target[0].numel())
            self._uploads.send(window.view(rows.shape), rows)

    def _payload_of(self, file: _OpenFile, info: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Item | None:
        """Where the elements of an item are in the file, if they are stored as in memory."""
        size = bytes_in(shape, dtype)
        if size == 0:
            return None
        if file.checks is not None:
            item = file.checks.items.get(info.offset)
            return item if item is not None and item.head and item.payload == size else None
        key = shape, dtype
        if key not in self._frames:
            self._frames[key] = frame_of(*key)
        frame = self._frames[key]
        same = info.length == len(frame.head) + size + len(frame.tail)
        if not same or file.read_at(info.offset, len(frame.head)) != frame.head:
            return None
        return Item(info.offset, info.length, len(frame.head), size, 1, 0, ())


class _OpenFile:
    """A data file that is read in ranges, each checked against the manifest."""

    def __init__(self, path: Path, stream: io.FileIO, checks: FileList | None) -> None:
        self.path, self.checks = path, checks
        self._stream = stream
        self.bytes_read = 0

    def read_at(self, offset: int, length: int) -> bytes:
        buffer = bytearray(length)
        self._fill(offset, memoryview(buffer))
        return bytes(buffer)

    def _fill(self, offset: int, target: memoryview) -> None:
        while len(target):
            count = os.preadv(self._stream.fileno(), [target], offset)
            if count == 0:
                raise CheckpointError(
                    f"{self.path} ends at byte {offset}, before what it should hold. It is truncated."
                )
            self.bytes_read += count
            offset, target = offset + count, target[count:]

    def _damaged(self, item: Item) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is damaged between bytes {item.offset} and {item.offset + item.length}: the checksum differs "
            "from the one in the manifest."
        )

    def read_whole(self, info: Any) -> bytes:
        """An item with its head and tail."""
        data = self.read_at(info.offset, info.length)
        if self.checks is not None:
            item = self.checks.items.get(info.offset)
            if item is None or item.length != info.length:
                raise CheckpointError(f"{self.path} holds no item at byte {info.offset} according to the manifest.")
            view = memoryview(data)
            end = item.head + item.payload
            sound = manifests.payload_is_sound(item, [view[item.head : end]])
            if not sound or not manifests.frame_is_sound(item, view[: item.head], view[end:]):
                raise self._damaged(item)
        return data

    def read_range(self, info: Any, item: Item, start: int, target: memoryview) -> None:
        """The payload's bytes from ``start`` on. The ends are read up to whole blocks, to be checked."""
        base, stop = item.offset + item.head, start + len(target)
        if item.length <= _SMALL_BYTES:
            target[:] = memoryview(self.read_whole(info))[item.head + start : item.head + stop]
            return
        if self.checks is None:
            self._fill(base + start, target)
            return
        block = item.block
        low, high = start // block * block, min(-(-stop // block) * block, item.payload)
        before, after = bytearray(start - low), bytearray(high - stop)
        self._fill(base + low, memoryview(before))
        self._fill(base + start, target)
        self._fill(base + stop, memoryview(after))
        parts = (memoryview(before), target, memoryview(after))
        if not manifests.payload_is_sound(item, parts, low // block, -(-high // block)):
            raise self._damaged(item)
        if stop == item.payload:  # whoever reads the end checks the head and the tail
            end = base + item.payload
            head, tail = self.read_at(item.offset, item.head), self.read_at(end, item.offset + item.length - end)
            if not manifests.frame_is_sound(item, head, tail):
                raise self._damaged(item)


def _is_contiguous_region(shape: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...]) -> bool:
    """Whether a box of a tensor is one range of its elements: ones, then any, then whole dimensions."""
    free = [dim for dim in range(len(shape)) if lengths[dim] != 1]
    return all(lengths[dim] == shape[dim] for dim in range(free[0] + 1, len(shape))) if free else True


def _flat_start(shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    return sum(offset * prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))


class SafeLoadPlanner(DefaultLoadPlanner):
    """DCP's planner, without its pickles: what is no tensor is read with ``weights_only=True``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key, found = read_item.dest_index.fqn, torch.load(value, map_location="cpu", weights_only=True)
        if self.flatten_state_dict:
            put(self.original_state_dict, self.mappings[key], found)
        else:
            self.state_dict[key] = found


def put(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set ``tree[path[0]][path[1]]...``, making dicts and lists on the way."""
    for part, following in pairwise(path):
        new: Any = [] if isinstance(following, int) else {}
        tree = _extended(tree, part) if isinstance(tree, list) else tree
        if isinstance(tree, list):
            if tree[part] is None:
                tree[part] = new
            tree = tree[part]
        else:
            tree = tree.setdefault(part, new)
    if isinstance(tree, list):
        _extended(tree, path[-1])
    tree[path[-1]] = value


def _extended(items: list[Any], position: int) -> list[Any]:
    items.extend([None] * (position + 1 - len(items)))
    return items
