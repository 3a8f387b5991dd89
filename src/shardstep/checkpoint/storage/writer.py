"""DCP's storage, writing: this rank's items, from the tensors' own memory to one file, with checksums.

The files are those that DCP's own file system storage writes.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from shardstep.checkpoint.storage import manifest as manifests
from shardstep.checkpoint.storage.manifest import FileList, Item, RunningChecksum
from shardstep.checkpoint.storage.torch_file import WINDOW_BYTES, Frame, frame_of, memory_of
from shardstep.comm.host_copies import on_host


class Written(NamedTuple):
    """What one rank wrote."""

    metadata: Metadata  # of its own items
    results: list[WriteResult]
    name: str  # of its file
    file: FileList


class _Part(NamedTuple):
    """Of which item a window of elements is, and what the item is."""

    position: int
    data: Tensor | io.BytesIO


class Writer(StorageWriter):
    """Writes this rank's items to one file of the directory that ``prepare`` makes; then calls ``finish`` with them.

    For ``dcp.save(..., no_dist=True)`` on every rank: ``prepare`` and ``finish`` make one checkpoint of it. Writing
    happens inside ``reporting``.
    """

    def __init__(
        self,
        rank: int,
        prepare: Callable[[], Path],
        finish: Callable[[Written], None],
        reporting: Callable[[], AbstractContextManager[None]],
        progress: Callable[[int], None] | None = None,
        await_copy: Callable[[Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self._await_copy = await_copy  # called before host memory is read, if a device may still write to it
        self._progress = progress  # called with the bytes of every item
        self._directory, self._rank = Path(), rank
        self._prepare, self._finish, self._reporting = prepare, finish, reporting
        self._file = FileList(0, {})
        self._frames: dict[tuple[tuple[int, ...], torch.dtype], Frame] = {}

    @property
    def _name(self) -> str:
        return f"__{self._rank}_0.distcp"

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._directory = self._prepare()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        with self._reporting():
            try:
                done.set_result(self._write(plan, planner))
            except OSError as error:
                if error.filename is None:  # a write knows only its descriptor
                    error.filename = os.fspath(self._directory / self._name)
                raise
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        results, items, offset = [], {}, 0
        parts = on_host(self._parts(plan, planner), WINDOW_BYTES)
        with closing(parts), open(self._directory / self._name, "wb", buffering=0) as stream:
            for position, of_item in groupby(parts, lambda part: part[0].position):
                item, written = plan.items[position], self._write_item(stream, of_item, offset)
                items[offset] = written
                if self._progress is not None:
                    self._progress(written.length)
                info = _StorageInfo(self._name, offset, written.length)
                results.append(WriteResult(index=item.index, size_in_bytes=written.length, storage_data=info))
                offset += written.length
            os.fsync(stream.fileno())
        self._file = FileList(offset, items)
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._finish(Written(metadata, results[0], self._name, self._file))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def _parts(self, plan: SavePlan, planner: SavePlanner) -> Iterator[tuple[_Part, Tensor | None]]:
        """What is written, in order: of a tensor that is framed its elements, in windows; of others nothing."""
        for position, item in enumerate(plan.items):
            data = planner.resolve_data(item)
            if isinstance(data, Tensor) and data.nbytes > 0:
                tensor = data.detach().resolve_conj().resolve_neg()
                for window in _windows(tensor, whole=self._await_copy is None):
                    yield _Part(position, tensor), window
            else:
                yield _Part(position, data), None

    def _write_item(self, stream: io.FileIO, parts: Iterator[tuple[_Part, Tensor | None]], offset: int) -> Item:
        (_, data), window = next(parts)
        if isinstance(data, Tensor) and window is not None:
            return self._write_framed(stream, data, chain([window], (window for _, window in parts)), offset)
        if isinstance(data, Tensor):
            buffer = io.BytesIO()
            torch.save(data.detach().cpu().clone(memory_format=torch.contiguous_format), buffer)
            data = buffer
        payload = data.getbuffer()
        block = manifests.block_for(len(payload))
        checksum = RunningChecksum(block)
        checksum.add(payload)
        checksum.note()
        _write_all(stream, [payload])
        return Item(offset, len(payload), 0, len(payload), block, 0, tuple(checksum.noted))

    def _write_framed(self, stream: io.FileIO, tensor: Tensor, windows: Iterable[Any], offset: int) -> Item:
        key = tuple(tensor.shape), tensor.dtype
        if key not in self._frames:
            self._frames[key] = frame_of(*key)
        frame, block = self._frames[key], manifests.block_for(tensor.nbytes)
        checksum = RunningChecksum(block)
        first: list[memoryview | bytes] = [frame.head]
        for window in windows:
            if self._await_copy is not None:
                self._await_copy(window)
            memory = memory_of(window)
            checksum.add(memory)
            _write_all(stream, [*first, memory])
            first = []
        checksum.note()
        tail = frame.tail_for(checksum.value)
        _write_all(stream, [tail])
        length = len(frame.head) + tensor.nbytes + len(tail)
        frame_crc = zlib.crc32(tail, zlib.crc32(frame.head))
        return Item(offset, length, len(frame.head), tensor.nbytes, block, frame_crc, tuple(checksum.noted))


def _windows(tensor: Tensor, *, whole: bool) -> Iterator[Tensor]:
    """The elements of a tensor in order, in parts of a bounded size; ``whole``: or as they are, if they can be."""
    if whole and tensor.device.type == "cpu" and tensor.is_contiguous():
        yield tensor
        return
    rows = tensor.view(-1) if tensor.is_contiguous() else tensor
    row_bytes = max(rows[0].nbytes, 1)
    yield from rows.split(max(WINDOW_BYTES // row_bytes, 1))


def _write_all(stream: io.FileIO, parts: Sequence[memoryview | bytes]) -> None:
    views = [memoryview(part) for part in parts]
    while views:
        count = os.writev(stream.fileno(), views)
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]
