"""Checkpoint directories without an optimizer: look into one, check it, turn it into a plain file and back."""

from __future__ import annotations

import io
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardstep import directories
from shardstep.agreement import Board
from shardstep.codec import dtype_name
from shardstep.collectives import alone
from shardstep.file_reader import put
from shardstep.loader import OPTIM, Checkpoint
from shardstep.manifest import CheckpointError
from shardstep.saver import Contribution, Saving
from shardstep.sharded_form import map_leaves
from shardstep.state_shard import shard_of_range, shard_of_whole
from shardstep.subclasses import opened
from shardstep.torch_file import WINDOW_BYTES, bytes_in, memory_of, patch_checksums

Progress = Callable[[int], None]  # called with bytes done
_RANK_IN_NAME = re.compile(r"__(\d+)_\d+\.distcp$")
_MOST_STEPS = 256  # that are read to tell the step


class Entry(NamedTuple):
    """What a checkpoint holds under one key."""

    key: str
    kind: str  # "tensor" or "value"
    shape: list[int]
    dtype: str
    bytes: int
    pieces: int
    value: Any = None  # of what is no tensor, if it is short


class Contents(NamedTuple):
    """What is in a checkpoint directory."""

    directory: str
    entries: list[Entry]
    ranks: list[int]  # that wrote it
    steps: list[float]  # that the optimizer has made, as its state tells; usually one number
    checksums: bool
    files: dict[str, int]  # name -> bytes


def inspect(directory: Path) -> Contents:
    """What is in a checkpoint directory of shardstep or DCP."""
    checkpoint = Checkpoint(directory)
    values = {OPTIM: checkpoint.skeleton(OPTIM, "param_groups").get(OPTIM, {}), **_values_of_extra(checkpoint)}
    checkpoint.read_into(values)
    flat = dict(_flattened(values))
    entries = []
    for key, entry in sorted(checkpoint.entries.items()):
        if isinstance(entry, TensorStorageMetadata):
            size = bytes_in(tuple(entry.size), entry.properties.dtype)
            dtype = dtype_name(entry.properties.dtype)
            entries.append(Entry(key, "tensor", list(entry.size), dtype, size, len(entry.chunks)))
        else:
            value = flat.get(key)
            entries.append(Entry(key, "value", [], type(value).__name__ if key in flat else "", 0, 1, value))
    names = {str(info.relative_path) for info in checkpoint.metadata.storage_data.values()}
    found = (_RANK_IN_NAME.search(name) for name in names)
    return Contents(
        str(directory),
        entries,
        sorted({int(match[1]) for match in found if match}),
        _steps(checkpoint),
        checkpoint.reader.manifest is not None,
        {name: (directory / name).stat().st_size for name in sorted(names)},
    )


def _values_of_extra(checkpoint: Checkpoint) -> dict[str, Any]:
    tree = checkpoint.skeleton("extra")
    return {key: _without_tensors(value) for key, value in tree.items()}


def _without_tensors(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_tensors(item) for key, item in value.items() if not isinstance(item, Tensor)}
    return value


def _flattened(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flattened(item, (*path, str(key)))
        return
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for position, item in enumerate(value):
            yield from _flattened(item, (*path, str(position)))
        return
    yield ".".join(path), value


def _steps(checkpoint: Checkpoint) -> list[float]:
    form: dict[str, Any] = {}
    for fqn, entry in checkpoint.entries.items():
        path = checkpoint.paths[fqn]
        is_step = path[:2] == (OPTIM, "state") and path[-1] == "step"
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


# --- to a plain file ----------------------------------------------------------------------------------------------


def to_plain(directory: Path, target: Path, part: str, progress: Progress) -> None:
    """Write one plain state dict, as ``torch.save(optimizer.state_dict(), target)`` would, without holding it.

    A skeleton of the file is written first, with holes for the tensors; then they are filled in, part by part. No more
    than a window of the data is in memory.

    Args:
        part: "optim" or "model".
    """
    checkpoint = Checkpoint(directory)
    tree, keys = _plain_tree(checkpoint, part)
    form = _numbered(tree) if part == OPTIM else dict(_flattened(tree))  # (a model's dots are part of its keys)
    beside = target.with_name(f".{target.name}.converting")
    try:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(form, beside)
        with FakeTensorMode():
            skeleton = torch.load(beside, weights_only=True)
        places = [int(leaf.untyped_storage()._checkpoint_offset or 0) for leaf in _tensors_in(skeleton)]
        wanted = [keys[id(leaf)] for leaf in _tensors_in(form)]
        with open(beside, "r+b") as stream:
            places = dict(zip(wanted, places, strict=True))
            checksums: dict[int, int] = {}
            for batch in _batches(checkpoint, wanted):
                checksums.update(_fill(checkpoint, batch, stream.fileno(), places, progress))
            os.fsync(stream.fileno())
        patch_checksums(beside, checksums)
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def _plain_tree(checkpoint: Checkpoint, root: str) -> tuple[dict[str, Any], dict[int, str]]:
    """What is under ``root``, with tensors that have no memory, and the keys of those by their identity."""
    values: dict[str, Any] = {}
    for fqn, entry in checkpoint.entries.items():
        if checkpoint.paths[fqn][0] == root and not isinstance(entry, TensorStorageMetadata):
            values[fqn] = None
    checkpoint.read_into(values)
    tree: dict[str, Any] = {}
    keys: dict[int, str] = {}
    mode = FakeTensorMode()
    for fqn, entry in checkpoint.entries.items():
        if checkpoint.paths[fqn][0] != root:
            continue
        leaf = values.get(fqn)
        if isinstance(entry, TensorStorageMetadata):
            with mode:
                leaf = torch.empty(entry.size, dtype=entry.properties.dtype)
            keys[id(leaf)] = fqn
        put(tree, checkpoint.paths[fqn], leaf)
    if root not in tree:
        raise CheckpointError(f"{checkpoint.directory} has nothing under the key {root!r}.")
    return tree[root], keys


def _numbered(form: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's form with positions for names: torch's plain form."""
    groups = form["param_groups"]
    names = dict.fromkeys(name for group in groups for name in group["params"])
    numbers: dict[Any, int] = {name: number for number, name in enumerate(names)}
    states = form.get("state", {})
    ordered = sorted(states, key=lambda name: numbers.get(name, len(numbers)))
    return {
        "state": {numbers.get(name, name): states[name] for name in ordered},
        "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups],
    }


def _tensors_in(form: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_leaves(form, lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None)
    return found


def _batches(checkpoint: Checkpoint, keys: list[str]) -> Iterator[list[str]]:
    """Tensors that are read together: small ones as many as fit into a window, a large one alone."""
    batch: list[str] = []
    filled = 0
    for key in keys:
        size = _size_of(checkpoint, key)
        if batch and filled + size > WINDOW_BYTES:
            yield batch
            batch, filled = [], 0
        batch.append(key)
        filled += size
    if batch:
        yield batch


def _size_of(checkpoint: Checkpoint, key: str) -> int:
    entry = checkpoint.entries[key]
    assert isinstance(entry, TensorStorageMetadata)
    return bytes_in(tuple(entry.size), entry.properties.dtype)


def _fill(
    checkpoint: Checkpoint, keys: list[str], descriptor: int, places: dict[str, int], progress: Progress
) -> dict[int, int]:
    """Copy tensors to their places in a file; return the checksums of their bytes by place."""
    if len(keys) == 1:
        return {places[keys[0]]: _fill_by_windows(checkpoint, keys[0], descriptor, places[keys[0]], progress)}
    form: dict[str, Any] = {}
    for key in keys:
        entry = checkpoint.entries[key]
        assert isinstance(entry, TensorStorageMetadata)
        form[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    checkpoint.read_into(form)
    checksums = {}
    for key, tensor in form.items():
        memory = memory_of(tensor)
        checksums[places[key]] = zlib.crc32(memory)
        _write_at(descriptor, memory, places[key])
        progress(len(memory))
    return checksums


def _fill_by_windows(checkpoint: Checkpoint, key: str, descriptor: int, place: int, progress: Progress) -> int:
    entry = checkpoint.entries[key]
    assert isinstance(entry, TensorStorageMetadata)
    shape, dtype = tuple(entry.size), entry.properties.dtype
    count, step, checksum = entry.size.numel(), max(WINDOW_BYTES // dtype.itemsize, 1), 0
    buffer = torch.empty(min(step, count), dtype=dtype)
    for start in range(0, count, step):
        stop = min(start + step, count)
        window = buffer[: stop - start]
        whole = start == 0 and stop == count
        shard = shard_of_whole(window.view(shape)) if whole else shard_of_range(shape, start, stop, window)
        checkpoint.read_into({key: shard})
        memory = memory_of(window)
        checksum = zlib.crc32(memory, checksum)
        _write_at(descriptor, memory, place + start * dtype.itemsize)
        progress(len(memory))
    return checksum


def _write_at(descriptor: int, memory: memoryview, place: int) -> None:
    while len(memory):
        count = os.pwrite(descriptor, memory, place)
        memory, place = memory[count:], place + count


# --- from a plain file --------------------------------------------------------------------------------------------


def from_plain(source: Path, directory: Path, progress: Progress) -> None:
    """Make a checkpoint directory of a file that ``torch.save(optimizer.state_dict(), source)`` wrote.

    The file is mapped into memory, not read as a whole. Parameters are called by the names in the file, if it has some,
    else by their positions; a checkpoint of positions loads into an optimizer with as many parameters in each group.
    """
    try:
        form = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch.load raises anything for a file that is none of its own
        raise CheckpointError(f"{source} cannot be read as plain data that torch.save wrote: {error}") from error
    if not isinstance(form, Mapping) or not {"state", "param_groups"} <= form.keys():
        raise CheckpointError(
            f"{source} expects an optimizer's state dict, with 'state' and 'param_groups', but holds "
            f"{sorted(map(str, form)) if isinstance(form, Mapping) else type(form).__name__}."
        )
    group = alone()
    Saving(directory, _PlainContribution(form), group, Board(group), progress=progress).run()


class _PlainContribution(Contribution):
    """What a plain state dict contributes: everything."""

    def __init__(self, form: Mapping[str, Any]) -> None:
        names: dict[Any, str] = {}
        for group in form["param_groups"]:
            told = group.get("param_names") or [str(number) for number in group["params"]]
            names.update(zip(group["params"], map(str, told), strict=True))
        groups = [
            {
                **{key: value for key, value in group.items() if key != "param_names"},
                "params": [names[number] for number in group["params"]],
            }
            for group in form["param_groups"]
        ]
        state = {names.get(key, str(key)): map_leaves(opened(entry), _whole) for key, entry in form["state"].items()}
        self.form = {OPTIM: {"state": state, "param_groups": groups}}
        self.shapes = {}


def _whole(leaf: Any) -> Any:
    return shard_of_whole(leaf) if isinstance(leaf, Tensor) else leaf
