"""DCP's ``.metadata``: read it without running what is in it.

The file is a pickle. This reader gives it nothing to call: every class that DCP's metadata consists of is a stand-in,
made for this one reading, that keeps what it is given; anything else is refused. What was kept is then turned into
DCP's own classes, field by field. See SECURITY.md.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from shardstep.checkpoint.storage import dcp_versions
from shardstep.checkpoint.storage.manifest import CheckpointError

_RECORDS = (
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    filesystem._StorageInfo,
    filesystem._StoragePrefix,
)
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype)
_LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "_mkldnn", "jagged")


class _StandIn:
    """Keeps what a pickle does with a class: the arguments of its call, and the state that is given to the result."""

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: Any
    turn: Callable[[Any, Any], Any]

    def __new__(cls, *args: Any) -> _StandIn:
        stand_in = object.__new__(cls)
        stand_in.args, stand_in.state = args, None
        return stand_in

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _record(kind: type) -> Callable[[Any, Any], Any]:
    """For a data class: its fields, and nothing else, from the state."""
    names = {*(field.name for field in fields(kind)), *dcp_versions.later_fields(kind)}

    def turn(args: Any, state: Any) -> Any:
        if args or not isinstance(state or {}, dict) or not names.issuperset(state or {}):
            raise pickle.UnpicklingError(f"a {kind.__name__} has other fields than {sorted(names)}")
        made = object.__new__(kind)
        for name, value in (state or {}).items():
            object.__setattr__(made, name, value)
        return made

    return turn


def _layout(args: Any, state: Any) -> torch.layout:
    """torch pickles a layout as the call of a function with its name."""
    name = str(args[0]).removeprefix("torch.")
    if name not in _LAYOUTS:
        raise pickle.UnpicklingError(f"{name!r} is no layout")
    return getattr(torch, name)


# How the arguments and the state that were kept become what they stand for.
_TURNS: dict[tuple[str, str], Callable[[Any, Any], Any]] = {
    **{(kind.__module__, kind.__name__): _record(kind) for kind in _RECORDS},
    (metadata.__name__, "TensorProperties"): lambda args, state: dcp_versions.properties_of(state),
    (metadata.__name__, "_MEM_FORMAT_ENCODING"): lambda args, state: metadata._MEM_FORMAT_ENCODING(*args),
    ("torch", "Size"): lambda args, state: torch.Size(*args),
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): lambda args, state: {},
}


class _SafeUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._stand_ins: dict[tuple[str, str], type[_StandIn]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        turn = _TURNS.get((module, name))
        if module.split(".")[0] == "pathlib" and name in _PATHS:
            turn = _path
        if turn is None:
            raise pickle.UnpicklingError(f"{module}.{name} is nothing that a checkpoint's metadata consists of")
        if (module, name) not in self._stand_ins:
            self._stand_ins[module, name] = type(name, (_StandIn,), {"__slots__": (), "turn": staticmethod(turn)})
        return self._stand_ins[module, name]


def _path(args: Any, state: Any) -> str:
    """Where a checkpoint was saved: a text for people."""
    return "/".join(map(str, args))


def _turned(value: Any, known: dict[int, Any]) -> Any:
    """Plain data with every stand-in replaced by what it stands for. What is there twice is done once (``known``)."""
    if type(value) in _PLAIN:
        return value
    if id(value) not in known:
        known[id(value)] = _turn(value, known)
    return known[id(value)]


def _turn(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, _StandIn):
        return type(value).turn(_turned(value.args, known), _turned(value.state, known))
    if type(value) is dict:
        return {_turned(key, known): _turned(item, known) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_turned(item, known) for item in value)
    raise pickle.UnpicklingError(f"a {type(value).__name__} is nothing that a checkpoint's metadata consists of")


def dumps(found: metadata.Metadata) -> bytes:
    """The metadata in DCP's format, a pickle, which only ``loads`` reads back here."""
    return pickle.dumps(found)


def loads(data: bytes, path: Any) -> Any:
    """The metadata in ``data``. CheckpointError, which names ``path``, if that is not what it is."""
    try:
        found = _turned(_SafeUnpickler(data).load(), {})
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path} expects the metadata of a DCP checkpoint but cannot be read: {error}") from error
    if not isinstance(found, metadata.Metadata):
        raise CheckpointError(f"{path} expects the metadata of a DCP checkpoint but holds a {type(found).__name__}.")
    entries, storage = getattr(found, "state_dict_metadata", None), getattr(found, "storage_data", None)
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        raise CheckpointError(f"{path} expects the metadata of a DCP checkpoint but lacks entries or their places.")
    _check_fields(found, path)
    return found


def _check_fields(found: metadata.Metadata, path: Any) -> None:
    """Check that the fields we use exist and have the right type. (No assert: ``python -O`` removes those.)"""
    try:
        problem = next(_problems(found), None)
    except (AttributeError, TypeError, ValueError) as error:  # a record lacks a field, or has another kind of value
        problem = str(error)
    if problem is not None:
        raise CheckpointError(f"{path} expects the metadata of a DCP checkpoint, but a part of it is wrong: {problem}.")


def _problems(found: metadata.Metadata) -> Iterator[str]:
    entries, paths = found.state_dict_metadata, found.planner_data
    for key, entry in entries.items():
        if isinstance(entry, metadata.TensorStorageMetadata):
            if not isinstance(entry.properties.dtype, torch.dtype):
                yield f"{key} has no dtype"
            sizes = [entry.size, *(size for chunk in entry.chunks for size in (chunk.offsets, chunk.sizes))]
            if not all(isinstance(size, torch.Size) and min(size, default=0) >= 0 for size in sizes):
                yield f"{key} has no size, or a chunk of it has none"
        elif not isinstance(entry, metadata.BytesStorageMetadata):
            yield f"{key} is neither a tensor nor a value"
    if paths is not None:  # where each entry stood in the dict that was saved
        for key, place in paths.items():
            if not isinstance(place, tuple) or (key in entries and ".".join(map(str, place)) != key):
                yield f"{key} has another place in the dict that was saved"
        if not entries.keys() <= paths.keys():
            yield "an entry has no place in the dict that was saved"
    for index, info in found.storage_data.items():
        if not isinstance(index, metadata.MetadataIndex) or not isinstance(info.relative_path, str):
            yield "an item has no key or no file"
        if type(info.offset) is not int or type(info.length) is not int or min(info.offset, info.length) < 0:
            yield f"{index.fqn} has no place in its file"
