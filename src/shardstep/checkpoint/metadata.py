"""DCP's ``.metadata``: what a checkpoint directory holds, and where. Read without running code, and checked.

The file is a pickle. ``read`` does not unpickle it: it interprets the few opcodes that such a file consists of, knows
no class but DCP's records, and takes time and memory in proportion to the file's size. Records that other versions of
torch wrote lose the fields that this one does not know. ``Metadata`` that comes out is complete and consistent: DCP's
reader and planner can be given it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

_LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "_mkldnn", "jagged")
_MOST_DIMENSIONS = 64
_MOST_ARGUMENTS = 100  # of a call: the parts of a path
_MOST_CUT = 8  # dimensions in which the chunks of a tensor are cut
_SPARE_POSITIONS = 10_000  # of a list that may be empty: they leave no entry


class MetadataError(ValueError):
    """This is not the metadata of a checkpoint, or it contradicts itself."""


def read(data: bytes) -> Metadata:
    """The metadata in a pickle, checked. MetadataError if that is not what it is."""
    try:
        found = _interpret(data)
        if type(found) is not Metadata:
            raise MetadataError(f"it holds a {type(found).__name__}")
        _check(found)
    except MetadataError:
        raise
    except Exception as error:  # of somebody else's file anything can be wrong
        raise MetadataError(f"{type(error).__name__}: {str(error)[:200]}") from error
    return found


# --- a pickle machine that knows DCP's records only -------------------------------------------------------------------


class _Known(NamedTuple):
    """A class or function on the stack. Nothing can be done with it but what is known."""

    record: type | None = None  # to be made without arguments, and filled
    call: Callable[..., Any] | None = None


class _Nested(tuple):
    """A tuple with tuples in it. None may hold one of these: what is nested deeply takes long to compare."""

    __slots__ = ()


def _interpret(data: bytes) -> Any:
    """What Python has pickled, with protocol 4 or 5. An opcode that DCP's metadata does not need is refused.

    One loop that hardly calls anything, because there are a hundred opcodes for every tensor.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []
    at = 0
    while True:
        code, at = data[at], at + 1
        if code == 0x8C:  # SHORT_BINUNICODE
            end = at + 1 + data[at]
            stack.append(str(data[at + 1 : end], "utf-8", "surrogatepass"))
            at = end
        elif code == 0x94:  # MEMOIZE
            memo.append(stack[-1])
        elif code == 0x68:  # BINGET
            stack.append(memo[data[at]])
            at += 1
        elif code in _WIDTHS:  # LONG_BINGET, and integers of some width
            width = _WIDTHS[code] or 1 + data[at]
            number = int.from_bytes(
                data[at + width - (_WIDTHS[code] or data[at]) : at + width], "little", signed=code in _SIGNED
            )
            stack.append(memo[number] if code == 0x6A else number)
            at += width
        elif code == 0x28:  # MARK
            marks.append(len(stack))
        elif code in _TUPLES or code in _FILLING:
            count = _TUPLES.get(code, 0) or _FILLING.get(code, 0)
            start = len(stack) - count if count else marks.pop()
            items = stack[start:]
            del stack[start:]
            if code in _TUPLES:
                kinds = set(map(type, items))
                if _Nested in kinds:
                    raise MetadataError("tuples are nested too deeply")
                stack.append(_Nested(items) if tuple in kinds else tuple(items))
            elif code == 0x62:  # BUILD
                _fill(stack[-1], items[0])
            elif code in (0x61, 0x65) and type(stack[-1]) is list:  # APPEND, APPENDS
                stack[-1].extend(items)
            else:  # SETITEM, SETITEMS
                _set_items(stack[-1], items)
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code == 0x5D:  # EMPTY_LIST
            stack.append([])
        elif code == 0x7D:  # EMPTY_DICT
            stack.append({})
        elif code == 0x93:  # STACK_GLOBAL
            name = stack.pop()
            stack[-1] = _find(stack[-1], name)
        elif code in (0x52, 0x81):  # REDUCE, NEWOBJ
            arguments = stack.pop()
            stack[-1] = _make(stack[-1], arguments, is_call=code == 0x52)
        elif code == 0x58:  # BINUNICODE
            end = at + 4 + int.from_bytes(data[at : at + 4], "little")
            stack.append(str(data[at + 4 : end], "utf-8", "surrogatepass"))
            at = end
        elif code == 0x2E:  # STOP
            (found,) = stack
            return found
        elif code in (0x80, 0x95):  # PROTO, FRAME
            at += 1 if code == 0x80 else 8
        else:
            raise MetadataError(f"its pickle has the opcode {code:#x}")


_WIDTHS = {0x4B: 1, 0x4D: 2, 0x4A: 4, 0x6A: 4, 0x8A: 0}  # BININT1, BININT2, BININT, LONG_BINGET, LONG1 (as it says)
_SIGNED = (0x4A, 0x8A)
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False, 0x29: ()}
# How many items of the stack they take; 0: those since the last mark.
_TUPLES = {0x74: 0, 0x85: 1, 0x86: 2, 0x87: 3}
_FILLING = {0x61: 1, 0x65: 0, 0x73: 2, 0x75: 0, 0x62: 1}


def _set_items(target: Any, items: list[Any]) -> None:
    if type(target) is not dict:
        raise MetadataError("it sets an item of what is no dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) is MetadataIndex:
            is_known = type(key.fqn) is str and type(key.index) in (int, type(None))
            if not is_known or type(key.offset) not in (torch.Size, type(None)):
                raise MetadataError("an item's key is none")
        elif type(key) is not str:
            raise MetadataError(f"it has a {type(key).__name__} as a key")
        target[key] = value


def _find(module: Any, name: Any) -> Any:
    if type(module) is not str or type(name) is not str:
        raise MetadataError("it names a class by what is no name")
    place = ("pathlib" if module.split(".")[0] == "pathlib" else module), name  # which moved inside of its package
    if place not in _GLOBALS:
        raise MetadataError(f"{module}.{name} is nothing that metadata consists of")
    return _GLOBALS[place]


def _make(kind: Any, arguments: Any, is_call: bool) -> Any:
    if type(kind) is _Known and type(arguments) in (tuple, _Nested) and len(arguments) <= _MOST_ARGUMENTS:
        if is_call and kind.call is not None:
            return kind.call(*arguments)
        if not is_call and kind.record is not None and not arguments:
            return object.__new__(kind.record)
    raise MetadataError("it makes what is no record of DCP")


def _fill(record: Any, state: Any) -> None:
    """Give a record its fields, and nothing that this version of torch does not know."""
    if type(record) is metadata.TensorProperties and type(state) in (tuple, _Nested):
        record.__setstate__(tuple(state[:5]))  # torch 2.15 adds strides
    elif type(record) in _FIELDS:
        vars(record).update({name: state[name] for name in _FIELDS[type(record)] & state.keys()})
    else:
        raise MetadataError("it gives attributes to what is no record of DCP")


def _size(items: Any = ()) -> torch.Size:
    if len(items) > _MOST_DIMENSIONS:
        raise MetadataError("a size is none")
    return torch.Size(items)


def _layout(name: Any) -> torch.layout:
    if type(name) is not str or name.removeprefix("torch.") not in _LAYOUTS:
        raise MetadataError("a layout is none")
    return getattr(torch, name.removeprefix("torch."))


def _empty() -> dict[Any, Any]:
    return {}  # an OrderedDict is filled after it was made


def _path(*parts: Any) -> str:
    """Where a checkpoint was saved: a text for people."""
    return "/".join(part for part in parts if type(part) is str)


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
_FIELDS = {kind: {field.name for field in fields(kind)} for kind in _RECORDS}
_GLOBALS: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): _Known(record=kind) for kind in _RECORDS},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{
        ("pathlib", f"{pure}{system}Path"): _Known(call=_path)
        for pure in ("", "Pure")
        for system in ("Posix", "Windows")
    },
    ("pathlib", "Path"): _Known(call=_path),
    ("torch", "Size"): _Known(call=_size),
    ("torch.serialization", "_get_layout"): _Known(call=_layout),
    (metadata.__name__, "_MEM_FORMAT_ENCODING"): _Known(call=metadata._MEM_FORMAT_ENCODING),
    ("collections", "OrderedDict"): _Known(call=_empty),
}


# --- does it make sense? (No assert: ``python -O`` removes those.) ----------------------------------------------------


def _check(found: Metadata) -> None:
    """MetadataError if it contradicts itself."""
    entries, storage, paths = found.state_dict_metadata, found.storage_data, getattr(found, "planner_data", None)
    if type(entries) is not dict or type(storage) is not dict:
        raise MetadataError("it lacks entries or their places")
    if paths is not None:
        _check_paths(entries, paths)
    needed: dict[tuple[str, Any], int] = {}  # bytes by key and offset
    lists: set[int] = set()
    for key, entry in entries.items():
        if type(entry) is TensorStorageMetadata:
            if id(entry.chunks) in lists:  # which would be gone through again and again
                raise MetadataError(f"{key} shares its chunks with another entry")
            lists.add(id(entry.chunks))
            _check_tensor(key, entry)
            for chunk in entry.chunks:
                needed[key, chunk.offsets] = chunk.sizes.numel() * entry.properties.dtype.itemsize
        elif type(entry) is metadata.BytesStorageMetadata:
            needed[key, ()] = 0
        else:
            raise MetadataError(f"{key} is neither a tensor nor a value")
    _check_storage(storage, needed)


def _check_paths(entries: Mapping[str, Any], paths: Any) -> None:
    """Where each entry stood in the dict that was saved."""
    most = len(entries) + _SPARE_POSITIONS
    for key, path in paths.items():
        if type(path) is not tuple or not set(map(type, path)) <= {str, int}:
            raise MetadataError(f"{key} has no place in the dict that was saved")
        if any(type(part) is int and not 0 <= part < most for part in path):
            raise MetadataError(f"{key} is at a position in a list that is longer than the checkpoint has entries")
        if ".".join(map(str, path)) != key:
            raise MetadataError(f"{key} has another place in the dict that was saved")
    if not entries.keys() <= paths.keys():
        raise MetadataError("an entry has no place in the dict that was saved")


def _check_tensor(key: str, entry: TensorStorageMetadata) -> None:
    if type(entry.properties) is not metadata.TensorProperties or type(entry.properties.dtype) is not torch.dtype:
        raise MetadataError(f"{key} has no dtype")
    if type(entry.chunks) is not list or {type(chunk) for chunk in entry.chunks} != {metadata.ChunkStorageMetadata}:
        raise MetadataError(f"{key} has no chunks")
    sizes = [entry.size, *(chunk.offsets for chunk in entry.chunks), *(chunk.sizes for chunk in entry.chunks)]
    for size in sizes:
        if type(size) is not torch.Size or len(size) != len(entry.size) or min(size, default=0) < 0:
            raise MetadataError(f"{key} has no size, or a chunk of it has none")
    if not _tile(entry):
        raise MetadataError(f"the chunks of {key} do not cover it, each element once")


def _tile(entry: TensorStorageMetadata) -> bool:
    """Whether the chunks make up the tensor: no hole, no overlap.

    A box is the signed sum of the quadrants that begin at its corners, and quadrants are linearly independent. So the
    boxes make up the whole if and only if, corner by corner, the sum of their signs is that of the whole.
    """
    if entry.size.numel() == 0:
        return True
    if len(entry.chunks) == 1:
        return not any(entry.chunks[0].offsets) and entry.chunks[0].sizes == entry.size
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes), 1) for chunk in entry.chunks]
    boxes.append(((0,) * len(entry.size), tuple(entry.size), -1))
    cut = [dim for dim, whole in enumerate(entry.size) if any(o[dim] or s[dim] != whole for o, s, _ in boxes)]
    if len(cut) > _MOST_CUT:
        return False
    signs: Counter[tuple[int, ...]] = Counter()
    for offsets, sizes, sign in boxes:
        for corner in product(*(((offsets[dim], 1), (offsets[dim] + sizes[dim], -1)) for dim in cut)):
            signs[tuple(place for place, _ in corner)] += sign * prod(part for _, part in corner)
    return not any(signs.values())


def _check_storage(storage: Mapping[Any, Any], needed: Mapping[Any, int]) -> None:
    """Where the bytes of each chunk and value are. ``needed``: how many at least."""
    placed = set()
    for index, info in storage.items():
        if type(index) is not MetadataIndex or type(info) is not filesystem._StorageInfo:
            raise MetadataError("an item has no key or no place")
        name, offset, length = info.relative_path, info.offset, info.length
        if type(name) is not str or not is_plain_name(name):
            text = repr(name[:100]) if type(name) is str else f"a {type(name).__name__}"
            raise MetadataError(f"it speaks of a file outside the directory: {text}")
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise MetadataError(f"{index.fqn} has no place in its file")
        if getattr(info, "transform_descriptors", None):
            raise MetadataError(f"{index.fqn} was written with transforms, which are not supported")
        place = index.fqn, index.offset or ()
        if length < needed.get(place, 0):
            raise MetadataError(f"{index.fqn} is larger than what is stored of it")
        placed.add(place)
    if not needed.keys() <= placed:
        raise MetadataError(f"nothing is stored of {next(iter(needed.keys() - placed))[0]}")


def is_plain_name(name: str) -> bool:
    """Whether it is that of a file inside the directory."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name
