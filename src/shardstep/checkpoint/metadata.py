"""DCP's ``.metadata``: what a checkpoint directory holds, and where. Read without running code, and checked.

The file is a pickle. ``read`` does not unpickle it: it interprets the few opcodes that such a file consists of, knows
no class but DCP's records, and takes time and memory in proportion to the file's size. Records that other versions of
torch wrote lose the fields that this one does not know. ``Metadata`` that comes out is complete and consistent: DCP's
reader and planner can be given it.
"""

from __future__ import annotations

import pickletools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from itertools import product
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

_RECORDS = (
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    filesystem._StorageInfo,
)
_CLASSES: dict[tuple[str, str], Any] = {(kind.__module__, kind.__name__): kind for kind in _RECORDS}
_DTYPES = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"}
_LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "_mkldnn", "jagged")
_MOST_DIMENSIONS = 64
_SPARE_POSITIONS = 10_000  # of a list that may be empty: they leave no entry


class MetadataError(ValueError):
    """This is not the metadata of a checkpoint, or it contradicts itself."""


def read(data: bytes) -> Metadata:
    """The metadata in a pickle, checked. MetadataError if that is not what it is."""
    try:
        found = _Machine().run(data)
        if type(found) is not Metadata:
            raise MetadataError(f"it holds a {type(found).__name__}")
        for problem in _problems(found):
            raise MetadataError(problem)
    except MetadataError:
        raise
    except Exception as error:  # of somebody else's file anything can be wrong
        raise MetadataError(f"{type(error).__name__}: {str(error)[:200]}") from error
    return found


# --- a pickle machine that knows DCP's records only -------------------------------------------------------------------


class _Nested(tuple):
    """A tuple with tuples in it. None may hold one of these: what is nested deeply takes long to compare."""

    __slots__ = ()


def _tuple_of(items: list[Any]) -> tuple[Any, ...]:
    if any(type(item) is _Nested for item in items):
        raise MetadataError("tuples are nested too deeply")
    return _Nested(items) if any(type(item) is tuple for item in items) else tuple(items)


class _Machine:
    """Interprets the opcodes of protocols 4 and 5 that Python writes for DCP's metadata. Any other one is refused."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []

    def run(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            step = _STEPS.get(opcode.name)
            if step is None:
                raise MetadataError(f"its pickle has the opcode {opcode.name}")
            step(self, argument)
        (found,) = self._stack
        return found

    def skip(self, argument: Any) -> None:
        pass

    def push(self, argument: Any) -> None:
        self._stack.append(argument)

    def mark(self, argument: Any) -> None:
        self._marks.append(len(self._stack))

    def memoize(self, argument: Any) -> None:
        self._memo.append(self._stack[-1])

    def fetch(self, position: int) -> None:
        self._stack.append(self._memo[position])

    def take(self, count: int | None = None) -> list[Any]:
        """The last items of the stack: so many, or those since the last mark."""
        start = self._marks.pop() if count is None else len(self._stack) - count
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise MetadataError("it appends to what is no list")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict:
            raise MetadataError("it sets an item of what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is MetadataIndex:
                _check_index(key)
            elif type(key) is not str:
                raise MetadataError(f"it has a {type(key).__name__} as a key")
            target[key] = value

    def find(self, argument: Any) -> None:
        place = tuple(self.take(2))
        if place in _DTYPES:
            self.push(_DTYPES[place])
        elif place in _CLASSES or place in _CALLS or (str(place[0]).split(".")[0] == "pathlib" and place[1] in _PATHS):
            self.push(_Class(place))
        else:
            raise MetadataError(f"{place[0]}.{place[1]} is nothing that metadata consists of")

    def call(self, argument: Any) -> None:
        kind, arguments = self.take(2)
        if type(kind) is not _Class or type(arguments) not in (tuple, _Nested):
            raise MetadataError("it calls what is no class of DCP")
        self.push(_CALLS.get(kind.place, _path)(*arguments))

    def new(self, argument: Any) -> None:
        kind, arguments = self.take(2)
        if type(kind) is not _Class or kind.place not in _CLASSES or arguments != ():
            raise MetadataError("it makes what is no record of DCP")
        self.push(object.__new__(_CLASSES[kind.place]))

    def build(self, argument: Any) -> None:
        (state,) = self.take(1)
        record = self._stack[-1]
        if type(record) not in _RECORDS:
            raise MetadataError("it gives attributes to what is no record of DCP")
        if type(record) is metadata.TensorProperties:
            record.__setstate__(tuple(state)[:5])  # torch 2.15 adds strides
            return
        for field in fields(record):
            if field.name in state:
                object.__setattr__(record, field.name, state[field.name])


class _Class:
    """A class or function on the stack: by name, so that nothing can be done with it but what is known."""

    def __init__(self, place: tuple[Any, ...]) -> None:
        self.place = place


def _size(items: Any = ()) -> torch.Size:
    if len(items) > _MOST_DIMENSIONS or any(type(item) is not int for item in items):
        raise MetadataError("a size is none")
    return torch.Size(items)


def _layout(name: Any) -> torch.layout:
    if str(name).removeprefix("torch.") not in _LAYOUTS:
        raise MetadataError("a layout is none")
    return getattr(torch, str(name).removeprefix("torch."))


def _path(*parts: Any) -> str:
    """Where a checkpoint was saved: a text for people."""
    return "/".join(part for part in parts if type(part) is str)


_CALLS: dict[tuple[Any, ...], Callable[..., Any]] = {
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _layout,
    (metadata.__name__, "_MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
    ("collections", "OrderedDict"): dict,
}
_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), _Machine.skip),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"), _Machine.push),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "MARK": _Machine.mark,
    "MEMOIZE": _Machine.memoize,
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.fetch),
    "TUPLE": lambda machine, _: machine.push(_tuple_of(machine.take())),
    "TUPLE1": lambda machine, _: machine.push(_tuple_of(machine.take(1))),
    "TUPLE2": lambda machine, _: machine.push(_tuple_of(machine.take(2))),
    "TUPLE3": lambda machine, _: machine.push(_tuple_of(machine.take(3))),
    "APPEND": lambda machine, _: machine.append(machine.take(1)),
    "APPENDS": lambda machine, _: machine.append(machine.take()),
    "SETITEM": lambda machine, _: machine.set_items(machine.take(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.take()),
    "STACK_GLOBAL": _Machine.find,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.new,
    "BUILD": _Machine.build,
}


def _check_index(index: MetadataIndex) -> None:
    known = type(index.fqn) is str and type(index.index) in (int, type(None))
    if not known or type(index.offset) not in (torch.Size, type(None)):
        raise MetadataError("an item's key is none")


# --- does it make sense? (No assert: ``python -O`` removes those.) ----------------------------------------------------


def _problems(found: Metadata) -> Iterator[str]:
    """What is wrong with it, as far as it tells by itself."""
    entries, paths, storage = found.state_dict_metadata, getattr(found, "planner_data", None), found.storage_data
    if type(entries) is not dict or type(storage) is not dict:
        yield "it lacks entries or their places"
    if paths is not None:
        yield from _problems_of_paths(entries, paths)
    lists: set[int] = set()
    chunks: dict[tuple[str, tuple[int, ...]], int] = {}
    for key, entry in entries.items():
        if type(entry) is TensorStorageMetadata:
            if id(entry.chunks) in lists:  # which would be gone through again and again
                yield f"{key} shares its chunks with another entry"
            lists.add(id(entry.chunks))
            yield from _problems_of_tensor(key, entry)
            sizes = {(key, tuple(chunk.offsets)): prod(chunk.sizes) for chunk in entry.chunks}
            chunks.update((place, count * entry.properties.dtype.itemsize) for place, count in sizes.items())
        elif type(entry) is metadata.BytesStorageMetadata:
            chunks[key, ()] = 0
        else:
            yield f"{key} is neither a tensor nor a value"
    yield from _problems_of_storage(storage, chunks)


def _problems_of_paths(entries: Mapping[str, Any], paths: Any) -> Iterator[str]:
    """Where each entry stood in the dict that was saved."""
    most = len(entries) + _SPARE_POSITIONS
    for key, path in paths.items():
        if type(path) is not tuple or any(type(part) not in (str, int) for part in path):
            yield f"{key} has no place in the dict that was saved"
        if any(type(part) is int and not 0 <= part < most for part in path):
            yield f"{key} is at a position in a list that is longer than the checkpoint has entries"
        if key in entries and ".".join(map(str, path)) != key:
            yield f"{key} has another place in the dict that was saved"
    if not entries.keys() <= paths.keys():
        yield "an entry has no place in the dict that was saved"


def _problems_of_tensor(key: str, entry: TensorStorageMetadata) -> Iterator[str]:
    if type(entry.properties) is not metadata.TensorProperties or type(entry.properties.dtype) is not torch.dtype:
        yield f"{key} has no dtype"
    if type(entry.chunks) is not list:
        yield f"{key} has no chunks"
    dimensions = len(entry.size)
    for chunk in entry.chunks:
        if type(chunk) is not metadata.ChunkStorageMetadata:
            yield f"{key} has a chunk that is none"
        for size in (entry.size, chunk.offsets, chunk.sizes):
            if type(size) is not torch.Size or len(size) != dimensions or min(size, default=0) < 0:
                yield f"{key} has no size, or a chunk of it has none"
    if not _tile(entry):
        yield f"the chunks of {key} do not cover it, each element once"


def _tile(entry: TensorStorageMetadata) -> bool:
    """Whether the chunks make up the tensor: no hole, no overlap.

    A box is the signed sum of the quadrants that begin at its corners, and quadrants are linearly independent. So the
    boxes make up the whole if and only if, corner by corner, the sum of their signs is that of the whole.
    """
    if prod(entry.size) == 0:
        return True
    if len(entry.chunks) == 1:
        (chunk,) = entry.chunks
        return not any(chunk.offsets) and chunk.sizes == entry.size
    cut = [d for d, size in enumerate(entry.size) if any(chunk.sizes[d] != size for chunk in entry.chunks)]
    if (
        not entry.chunks
        or len(cut) > 8
        or any(chunk.offsets[d] for chunk in entry.chunks for d in range(len(entry.size)) if d not in cut)
    ):
        return False
    signs: Counter[tuple[int, ...]] = Counter()
    boxes = [([0] * len(cut), [entry.size[d] for d in cut], -1)]
    boxes += [([chunk.offsets[d] for d in cut], [chunk.sizes[d] for d in cut], 1) for chunk in entry.chunks]
    for offsets, sizes, sign in boxes:
        ends = [((offset, 1), (offset + size, -1)) for offset, size in zip(offsets, sizes, strict=True)]
        for corner in product(*ends):
            signs[tuple(at for at, _ in corner)] += sign * prod(part for _, part in corner)
    return not any(signs.values())


def _problems_of_storage(storage: Mapping[Any, Any], chunks: Mapping[Any, int]) -> Iterator[str]:
    """Where the bytes of each chunk and value are. ``chunks``: how many at least."""
    placed = set()
    for index, info in storage.items():
        if type(index) is not MetadataIndex or type(info) is not filesystem._StorageInfo:
            yield "an item has no key or no place"
        name, offset, length = info.relative_path, info.offset, info.length
        if type(name) is not str or not name or name in (".", "..") or "/" in name or "\0" in name:
            yield f"it speaks of a file outside the directory: {str(name)[:100]!r}"
        if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
            yield f"{index.fqn} has no place in its file"
        if getattr(info, "transform_descriptors", None):
            yield f"{index.fqn} was written with transforms, which are not supported"
        place = index.fqn, tuple(index.offset or ())
        if length < chunks.get(place, 0):
            yield f"{index.fqn} is larger than what is stored of it"
        placed.add(place)
    if not chunks.keys() <= placed:
        yield f"nothing is stored of {next(iter(chunks.keys() - placed))[0]}"
