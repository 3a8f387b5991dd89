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
_FIELDS = {kind: {field.name for field in fields(kind)} for kind in _RECORDS}
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
        found = _interpret(data)
        if type(found) is not Metadata:
            raise MetadataError(f"it holds a {type(found).__name__}")
        for problem in _problems(found):
            raise MetadataError(problem)
    except MetadataError:
        raise
    except Exception as error:  # of somebody else's file anything can be wrong
        raise MetadataError(f"{type(error).__name__}: {str(error)[:200]}") from error
    return found


# --- a pickle machine that knows DCP's records only ------------------------------------------------------------------


class _Nested(tuple):
    """A tuple with tuples in it. None may hold one of these: what is nested deeply takes long to compare."""

    __slots__ = ()


class _Name(tuple):
    """The module and name of a class or function, in its place: nothing can be done with it but what is known."""

    __slots__ = ()


def _interpret(data: bytes) -> Any:
    """What Python has pickled, with protocol 4 or 5. Any opcode that DCP's metadata does not need is refused.

    One loop without calls, because there are a hundred opcodes for every tensor.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _VALUES:
            stack.append(argument)
        elif name == "MEMOIZE":
            memo.append(stack[-1])
        elif name == "BINGET" or name == "LONG_BINGET":
            stack.append(memo[int(argument or 0)])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _TAKEN:
            start = len(stack) - _TAKEN[name] if _TAKEN[name] else marks.pop()
            taken = stack[start:]
            del stack[start:]
            if name.startswith("TUPLE"):
                kinds = set(map(type, taken))
                if _Nested in kinds:
                    raise MetadataError("tuples are nested too deeply")
                stack.append(_Nested(taken) if tuple in kinds else tuple(taken))
            elif name.startswith("APPEND") and type(stack[-1]) is list:
                stack[-1].extend(taken)
            elif name.startswith("SETITEM") and type(stack[-1]) is dict:
                _set_items(stack[-1], taken)
            elif name == "BUILD":
                _fill(stack[-1], taken[0])
            elif name == "STACK_GLOBAL":
                stack.append(_find(*taken))
            elif name == "NEWOBJ" or name == "REDUCE":
                stack.append(_made(*taken, is_call=name == "REDUCE"))
            else:
                raise MetadataError(f"{name} of a {type(stack[-1]).__name__}")
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise MetadataError(f"its pickle has the opcode {name}")
    (found,) = stack
    return found


_VALUES = {"SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict}
# How many items of the stack an opcode takes; 0: those since the last mark.
_TAKEN = {"TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "APPENDS": 0, "SETITEM": 2, "SETITEMS": 0}
_TAKEN |= {"BUILD": 1, "STACK_GLOBAL": 2, "NEWOBJ": 2, "REDUCE": 2}


def _set_items(target: dict[Any, Any], items: list[Any]) -> None:
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) is MetadataIndex:
            is_known = type(key.fqn) is str and type(key.index) in (int, type(None))
            if not is_known or type(key.offset) not in (torch.Size, type(None)):
                raise MetadataError("an item's key is none")
        elif type(key) is not str:
            raise MetadataError(f"it has a {type(key).__name__} as a key")
        target[key] = value


def _find(module: Any, name: Any) -> Any:
    place = _Name((module, name))
    if type(module) is str and module.split(".")[0] == "pathlib" and name in _PATHS:
        return _PATH
    if place in _DTYPES:
        return _DTYPES[place]
    if place in _CLASSES or place in _CALLS:
        return place
    raise MetadataError(f"{module}.{name} is nothing that metadata consists of")


def _made(kind: Any, arguments: Any, is_call: bool) -> Any:
    if type(kind) is not _Name or type(arguments) not in (tuple, _Nested):
        raise MetadataError("it calls what is no class of DCP")
    if is_call:
        return _CALLS[kind](*arguments)
    if arguments:
        raise MetadataError("it makes a record from arguments")
    return object.__new__(_CLASSES[kind])


def _fill(record: Any, state: Any) -> None:
    """Give a record its fields, and nothing that this version of torch does not know."""
    if type(record) is metadata.TensorProperties:
        record.__setstate__(tuple(state)[:5])  # torch 2.15 adds strides
    elif type(record) in _RECORDS:
        vars(record).update((name, value) for name, value in state.items() if name in _FIELDS[type(record)])
    else:
        raise MetadataError("it gives attributes to what is no record of DCP")


def _size(items: Any = ()) -> torch.Size:
    if len(items) > _MOST_DIMENSIONS or not {int} >= set(map(type, items)):
        raise MetadataError("a size is none")
    return torch.Size(items)


def _layout(name: Any) -> torch.layout:
    if str(name).removeprefix("torch.") not in _LAYOUTS:
        raise MetadataError("a layout is none")
    return getattr(torch, str(name).removeprefix("torch."))


def _path(*parts: Any) -> str:
    """Where a checkpoint was saved: a text for people."""
    return "/".join(part for part in parts if type(part) is str)


_PATH = _Name(("pathlib", "Path"))
_CALLS: dict[tuple[Any, ...], Callable[..., Any]] = {
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _layout,
    (metadata.__name__, "_MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
    ("collections", "OrderedDict"): dict,
    _PATH: _path,
}


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
    if type(entry.chunks) is not list or {type(chunk) for chunk in entry.chunks} != {metadata.ChunkStorageMetadata}:
        yield f"{key} has no chunks"
    sizes = [entry.size, *(size for chunk in entry.chunks for size in (chunk.offsets, chunk.sizes))]
    if any(type(size) is not torch.Size or len(size) != len(entry.size) or min(size, default=0) < 0 for size in sizes):
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
