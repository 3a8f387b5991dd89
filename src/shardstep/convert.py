"""Checkpoint directories to plain files, and plain files of others to checkpoint directories: ``shardstep convert``.

A key is a place in a saved tree as people write it: its parts with dots between. Names of parameters have dots as well,
so a key is never split: it is compared with the beginnings of the places that there are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import packages_distributions
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardstep.checkpoint import export, forms
from shardstep.checkpoint.export import Place
from shardstep.checkpoint.files import (
    GROUPS,
    OPTIM,
    STATE,
    CheckedFileSystem,
    Checkpoint,
    CheckpointError,
    Progress,
    put,
)
from shardstep.checkpoint.saving import save_alone
from shardstep.comm.codec import is_live_only
from shardstep.state import subclasses
from shardstep.state.dicts import OLD_MARK
from shardstep.state.shards import filled

WHOLE = "."  # the key of everything
SAFETENSORS = ".safetensors"
_MOST_LEVELS = 100  # of dicts and lists in each other


def to_file(directory: Path, target: Path, key: str, *, master: bool, progress: Progress) -> str:
    """Write what is under a key. Returns a note for the user, or nothing.

    An optimizer gets torch's plain form, with positions for names. Anything else is written as it was saved.
    """
    checkpoint = Checkpoint(directory, export.MappedReader)
    places = list(checkpoint.paths.values())
    root, optimizers = _locate(directory, places, key), _optimizers_in(places)
    if target.suffix == SAFETENSORS:
        if root in optimizers:
            raise ValueError(f"safetensors are for models, and {key!r} is an optimizer: write it to a '.pt' file")
        left_out = export.write_safetensors(checkpoint, root, target, master=master, progress=progress)
        return f"left out, because it is not a tensor: {', '.join(left_out)}" if left_out else ""
    with export.replacing(target) as beside:
        tree: dict[str, Any] = {}
        for place, value in export.read_part(checkpoint, root, target, master=master, progress=progress).items():
            put(tree, place, value)
        with CheckedFileSystem(progress).create_stream(beside, "wb") as stream:
            torch.save(_numbered(tree, directory) if root in optimizers else tree, cast("IO[bytes]", stream))
    if any(place[-1] == subclasses.MARK for place in places if place[: len(root)] == root):
        return (
            f"'{directory}' holds state of tensor subclasses (quantized state, for example), which needs their "
            f"classes. '{target}' has the plain tensors inside them: ZeroRedundancyOptimizer.load_state_dict "
            "takes these. A plain optimizer loads the directory itself: shardstep.checkpoint.load."
        )
    return ""


def _numbered(form: dict[str, Any], directory: Path) -> dict[str, Any]:
    """An optimizer's form with positions for names: torch's plain form."""
    groups = form[GROUPS]
    if not all(isinstance(group, Mapping) and "params" in group for group in groups):
        raise CheckpointError(f"'{directory}' has a parameter group without the key 'params'")
    for key, value in (option for group in groups for option in group.items() if is_live_only(option[1])):
        raise ValueError(
            f"'{directory}' has the option {key!r} as {value.split(':', 1)[1]!r}, a class, a function or a member "
            "of an enumeration, which a plain file cannot hold. Load the directory itself: shardstep.checkpoint.load."
        )
    names = dict.fromkeys(name for group in groups for name in group["params"])
    numbers: dict[Any, int] = {name: number for number, name in enumerate(names)}
    states = {name: filled(entry) for name, entry in form.get(STATE, {}).items()}
    ordered = sorted(states, key=lambda name: numbers.get(name, len(numbers)))
    return {
        STATE: {numbers.get(name, name): states[name] for name in ordered if states[name] is not None},
        GROUPS: [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups],
    }


def to_directory(source: Path, directory: Path, key: str, *, progress: Progress) -> str:
    """Make a checkpoint of an optimizer's state dict that ``torch.save`` wrote. Returns a note, or nothing.

    Parameters have the names in the file, if it has some, else their positions: a checkpoint of positions loads into an
    optimizer with as many parameters in each group.
    """
    whole = _contents_of(source)
    form = _optimizer_at(_locate(source, list(_places_in(whole)), key), whole, source)
    names: dict[Any, str] = {}
    for group in form[GROUPS]:
        called = group.get("param_names") or [str(number) for number in group["params"]]
        names.update(zip(group["params"], map(str, called), strict=True))
    entries = {names.get(number, str(number)): subclasses.opened(entry) for number, entry in form[STATE].items()}
    check_size(list(entries.values()), source.stat().st_size, source)
    groups = [
        {key: forms._plain(key, value) for key, value in group.items() if key != "param_names"}
        | {"params": [names[number] for number in group["params"]]}
        for group in form[GROUPS]
    ]
    state = {name: forms._plain(name, entry) for name, entry in entries.items()}
    with export.naming(directory):
        save_alone(directory, {OPTIM: {STATE: state, GROUPS: groups}}, {}, progress)
    if names and not any(not isinstance(entry, Mapping) or entry for entry in form[STATE].values()):
        return (
            f"'{source}' holds no state for its {len(names)} parameters, as before the first step (or of an "
            "optimizer that needs none), so the checkpoint has none."
        )
    return ""


def _contents_of(source: Path) -> Any:
    try:
        found = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch.load raises anything for a file that torch.save did not write
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = (str(error).splitlines() or [repr(error)])[0]
        if named is not None:  # the file chooses this name: only what is installed may be worth importing
            reason = f"it holds {named[1]}, which is not plain data"
            if named[1].split(".")[0] in packages_distributions().keys() - sys.stdlib_module_names:
                reason += ". If that is a tensor class of a package you trust, import what makes it known with --import"
        raise CheckpointError(f"'{source}' cannot be read as plain data that torch.save wrote: {reason}") from error
    check_size(found, source.stat().st_size, source)
    return found


def check_size(form: Any, most: int, source: Path) -> None:
    """CheckpointError if a few bytes claim to hold much: many times the same list or tensor, or one without memory.

    What torch.save writes takes a byte at least for each value, and the memory of every tensor once.
    """
    values = memory = 0
    waiting = [(form, 0)]
    while waiting:
        value, level = waiting.pop()
        values += 1
        if isinstance(value, Mapping):
            waiting += [(item, level + 1) for item in value.values()]
        elif isinstance(value, (list, tuple, set)):
            waiting += [(item, level + 1) for item in value]
        elif isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value):
            if value.layout != torch.strided or value.device.type != "cpu":
                raise CheckpointError(f"'{source}' holds a tensor that is not dense, or has no memory")
            memory += value.numel() * value.itemsize
        if values > most or memory > most or level > _MOST_LEVELS:
            raise CheckpointError(f"'{source}' claims to hold much more than its {most} bytes")


def _optimizer_at(root: Place, whole: Any, source: Path) -> Mapping[str, Any]:
    """The optimizer's state dict in what a file holds."""
    form = whole
    for part in root:
        form = form[part]
    if isinstance(form, Mapping) and OLD_MARK in form:
        raise CheckpointError(
            f"'{source}' was saved on a rank that did not receive the full state. Convert what rank "
            f"{form[OLD_MARK]} saved, to which the state was consolidated."
        )
    state, groups = (form.get(STATE), form.get(GROUPS)) if isinstance(form, Mapping) else (None, None)
    if not isinstance(state, Mapping) or not isinstance(groups, (list, tuple)):
        keys = f"{sorted(map(str, form))}"[:300] if isinstance(form, Mapping) else f"a {type(form).__name__}"
        raise ValueError(f"'{source}' holds {keys}, and not what an optimizer's state_dict() returned")
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups):
        raise ValueError(f"'{source}' has a parameter group without a list of 'params'")
    return form


# --- keys -------------------------------------------------------------------------------------------------------------


def _key_of(place: Place) -> str:
    return ".".join(map(str, place)) or WHOLE


def _places_in(value: Any, place: Place = ()) -> Iterator[Place]:
    """The places of a tree's leaves; a list counts as a leaf unless dicts are in it."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        items = list(enumerate(value))
    for part, item in items:
        yield from _places_in(item, (*place, part))
    if not items:
        yield place


def _optimizers_in(places: Iterable[Place]) -> list[Place]:
    """The places with optimizers, that is with lists of parameter groups."""
    found = {
        place[:position]: None
        for place in places
        for position, (part, below) in enumerate(pairwise(place))
        if part == GROUPS and isinstance(below, int)
    }
    return list(found)


def _locate(source: Path, places: list[Place], key: str) -> Place:
    """The place that a key stands for. ValueError, with the keys to pass, if that is none, or has optimizers deeper."""
    where, optimizers = f"'{source}'", _optimizers_in(places)
    beginnings = {place[:end] for place in places for end in range(len(place))}
    roots = {()} if key == WHOLE else {place for place in beginnings if place and _key_of(place) == key}
    if len(roots) > 1:
        raise ValueError(f"{where} has several places with the key {key!r}: {sorted(map(str, roots))}")
    root = next(iter(roots), None)
    below = (
        {str(place[len(root)]).split(".")[0] for place in places if place[:-1] == root} if root is not None else set()
    )
    if GROUPS in below and below <= {GROUPS, STATE}:
        raise ValueError(
            f"{where} has a flattened optimizer state dict under {key!r}, which lacks the order of its parameters. "
            "Load it with torch's set_optimizer_state_dict and save it without flatten_optimizer_state_dict."
        )
    inside = [place for place in optimizers if root is not None and place[: len(root)] == root]
    if root is not None and (root in optimizers or not inside):
        return root
    others = inside or (optimizers if key == OPTIM else [place for place in beginnings if place[-1:] == (key,)])
    if others:
        names = sorted(map(_key_of, others))
        text = f"under {key!r}, but under {' and '.join(map(repr, names))}: pass --key {names[0]}"
    else:
        text = f"under {key!r}, but {sorted({str(place[0]) for place in places if place})}: pass --key"
    raise ValueError(f"{where} has nothing to convert {text}")
