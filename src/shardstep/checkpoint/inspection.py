"""Checkpoint directories without an optimizer: look into one, check it."""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from shardstep.checkpoint import keys
from shardstep.checkpoint.keys import OPTIM, STATE
from shardstep.checkpoint.open_checkpoint import Checkpoint
from shardstep.checkpoint.storage import directories
from shardstep.checkpoint.storage.manifest import CheckpointError
from shardstep.checkpoint.storage.reader import SafeLoadPlanner
from shardstep.checkpoint.storage.torch_file import bytes_in
from shardstep.comm.codec import dtype_name
from shardstep.state.shards import MASTER

Progress = Callable[[int], None]  # called with bytes done
_RANK_IN_NAME = re.compile(r"__(\d+)_\d+\.distcp$")
_MOST_STEPS = 256  # that are read to find the step


class Entry(NamedTuple):
    """What a checkpoint holds under one key."""

    key: str
    kind: str  # "tensor" or "value"
    shape: list[int]
    dtype: str
    bytes: int
    pieces: int
    value: Any = None  # of what is no tensor


class Contents(NamedTuple):
    """What is in a checkpoint directory."""

    directory: str
    entries: list[Entry]
    ranks: list[int]  # that wrote it
    steps: list[float]  # that the optimizer has made, according to its state; usually one number
    checksums: bool
    files: dict[str, int]  # name -> bytes
    masters: int = 0  # how many parameters have a float32 master


def inspect(directory: Path) -> Contents:
    """What is in a checkpoint directory of shardstep or DCP."""
    checkpoint = Checkpoint(directory)
    values = _values(checkpoint)
    entries = []
    for key, entry in sorted(checkpoint.entries.items()):
        if isinstance(entry, TensorStorageMetadata):
            size = bytes_in(tuple(entry.size), entry.properties.dtype)
            dtype = dtype_name(entry.properties.dtype)
            entries.append(Entry(key, "tensor", list(entry.size), dtype, size, len(entry.chunks)))
        else:
            value = values[key]
            kind = "" if isinstance(value, _NotPlain) else type(value).__name__
            entries.append(Entry(key, "value", [], kind, 0, 1, value))
    names = {str(info.relative_path) for info in checkpoint.metadata.storage_data.values()}
    found = (_RANK_IN_NAME.search(name) for name in names)
    return Contents(
        str(directory),
        entries,
        sorted({int(match[1]) for match in found if match}),
        _steps(checkpoint),
        checkpoint.reader.manifest is not None,
        {name: (directory / name).stat().st_size for name in sorted(names)},
        len(masters_in(checkpoint)),
    )


def masters_in(checkpoint: Checkpoint) -> dict[str, str]:
    """The float32 masters in a checkpoint: the names of parameters, and under which keys their masters are."""
    paths = [path for fqn, path in checkpoint.paths.items() if fqn in checkpoint.entries]
    states = {(*root, STATE) for root in keys.optimizer_roots(paths)}
    ends = {path[:-1] for path in paths if str(path[-1]).endswith(f".{MASTER}")}
    flattened = {root for root in ends if keys.is_flattened_optimizer(paths, root)}
    found: dict[str, str] = {}
    for fqn in checkpoint.entries:
        path = checkpoint.paths[fqn]
        if path[-1] == MASTER and path[:-2] in states:
            found[str(path[-2])] = fqn
        elif path[:-1] in flattened and str(path[-1]).endswith(f".{MASTER}"):
            found[str(path[-1]).removeprefix(f"{STATE}.").removesuffix(f".{MASTER}")] = fqn
    return found


class _NotPlain:
    """Stands for a value that cannot be read without running code."""

    def __str__(self) -> str:
        return "(not plain data)"


class _ShowingPlanner(SafeLoadPlanner):
    """Shows a stand-in for a value that only code could read, so that the rest can be shown.

    (Damage that a checksum shows was found before.)
    """

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            super().load_bytes(read_item, value)
        except Exception:  # torch.load raises anything
            self.original_state_dict[read_item.dest_index.fqn] = _NotPlain()


def _values(checkpoint: Checkpoint) -> dict[str, Any]:
    """All values that are not tensors, by the keys under which they were saved."""
    form: dict[str, Any] = {
        key: None for key, entry in checkpoint.entries.items() if not isinstance(entry, TensorStorageMetadata)
    }
    checkpoint.read_into(form, _ShowingPlanner())
    return form


def _steps(checkpoint: Checkpoint) -> list[float]:
    form: dict[str, Any] = {}
    states = {(*root, STATE) for root in ((OPTIM,), *keys.optimizer_roots(checkpoint.paths.values()))}
    for fqn, entry in checkpoint.entries.items():
        path = checkpoint.paths[fqn]
        is_step = path[-1] == "step" and any(path[: len(state)] == state for state in states)
        if is_step and isinstance(entry, TensorStorageMetadata) and entry.size.numel() == 1 and len(form) < _MOST_STEPS:
            form[fqn] = torch.empty(entry.size, dtype=entry.properties.dtype)
    checkpoint.read_into(form)
    return sorted({float(value) for value in form.values()})


def data_bytes(directory: Path) -> int:
    """How many bytes its data files have."""
    names = {str(info.relative_path) for info in Checkpoint(directory).metadata.storage_data.values()}
    return sum((directory / name).stat().st_size for name in names)


def problems(directory: Path, progress: Progress) -> list[str]:
    """What is wrong with a checkpoint: every byte of it is read.

    One that DCP wrote has no manifest; then the checksums that its archives have are compared.
    """
    try:
        checkpoint = Checkpoint(directory)
    except CheckpointError as error:
        return [str(error)]
    manifest = checkpoint.reader.manifest
    if manifest is not None:
        return list(directories.problems(directory, manifest, progress))
    found = []
    infos = sorted(checkpoint.metadata.storage_data.values(), key=lambda info: (info.relative_path, info.offset))
    for info in infos:
        path = directory / info.relative_path
        try:
            with open(path, "rb") as stream, zipfile.ZipFile(_Slice(stream, info.offset, info.length)) as archive:
                damaged = archive.testzip()
        except (OSError, zipfile.BadZipFile) as error:
            damaged = str(error)
        if damaged is not None:
            found.append(f"{path} is damaged between bytes {info.offset} and {info.offset + info.length} ({damaged})")
        progress(info.length)
    return found


class _Slice(io.RawIOBase):
    """A range of a file, as a file."""

    def __init__(self, stream: Any, offset: int, length: int) -> None:
        self._stream, self._offset, self._length, self._position = stream, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        wanted = max(min(len(buffer), self._length - self._position), 0)
        self._stream.seek(self._offset + self._position)
        data = self._stream.read(wanted)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
