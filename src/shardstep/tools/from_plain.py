"""A plain file, which ``torch.save`` wrote, to a checkpoint directory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardstep.checkpoint import keys
from shardstep.checkpoint.contribution import Contribution
from shardstep.checkpoint.keys import GROUPS, OPTIM, STATE
from shardstep.checkpoint.leaves import map_leaves
from shardstep.checkpoint.save_job import SaveJob
from shardstep.checkpoint.storage.manifest import CheckpointError
from shardstep.comm.consensus import RankConsensus
from shardstep.comm.process_group import alone
from shardstep.state import subclasses
from shardstep.state.dicts import OLD_MARK
from shardstep.state.shards import shard_of_whole

Progress = Callable[[int], None]  # called with bytes done


def from_plain(source: Path, directory: Path, key: str, progress: Progress) -> str:
    """Make a checkpoint directory of a file that ``torch.save(optimizer.state_dict(), source)`` wrote.

    The file is mapped into memory, not read as a whole. Parameters are called by the names in the file, if it has some,
    else by their positions; a checkpoint of positions loads into an optimizer with as many parameters in each group.

    Args:
        key: under which the state dict lies in the file.

    Returns:
        A note for the user, if there is something to know.
    """
    form = _optimizer_in(_contents_of(source), source, key)
    group = alone()
    SaveJob(directory, _contribution_of(form), group, RankConsensus(group), progress=progress).run()
    count = sum(len(group["params"]) for group in form[GROUPS])
    if count and not any(not isinstance(entry, Mapping) or entry for entry in form[STATE].values()):
        return (
            f"{source} holds no state for its {count} parameters, as before the first step (or of an optimizer that "
            "needs none), so the checkpoint has none."
        )
    return ""


def _contents_of(source: Path) -> Any:
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch.load may raise anything for a file that torch.save did not write
        named = re.search(r"GLOBAL ((?:\w+\.)+)(\w+)", str(error))
        if named is None:
            reason = (str(error).splitlines() or [repr(error)])[0]
        else:
            module = ".".join(named[1].rstrip(".").split(".")[:2])
            reason = f"it holds a {named[1]}{named[2]}. If you trust that package, pass --import {module}."
        raise CheckpointError(f"{source} cannot be read as plain data that torch.save wrote: {reason}") from error


def _optimizer_in(whole: Any, source: Path, key: str) -> Mapping[str, Any]:
    """The optimizer's state dict in what a file holds."""
    paths = list(_paths_in(whole))
    root = keys.root_of(paths, key)
    if root is None:
        raise ValueError(f"{source} has nothing under the key {key!r} but has {_text(whole)}. Pass another with --key.")
    form = whole
    for part in root:
        form = form[part]
    if isinstance(form, Mapping) and OLD_MARK in form:
        raise CheckpointError(
            f"{source} expects the full state but was saved on a rank that did not receive it. Convert what "
            f"rank {form[OLD_MARK]} saved, to which the state was consolidated."
        )
    if not _is_state_dict(form):
        others = keys.optimizer_roots(paths)
        remedy = f"It has {keys.hint('optimizer', others)}" if others else "Pass what state_dict() returned."
        raise ValueError(
            f"{source} expects an optimizer's state dict, with 'state' and 'param_groups', but holds {_text(form)}. "
            f"{remedy}"
        )
    return form


def _is_state_dict(form: Any) -> bool:
    if not isinstance(form, Mapping) or not {STATE, GROUPS} <= form.keys():
        return False
    state, groups = form[STATE], form[GROUPS]
    return (
        isinstance(state, Mapping)
        and isinstance(groups, (list, tuple))
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)
    )


def _text(form: Any) -> str:
    return f"{sorted(map(str, form))}" if isinstance(form, Mapping) else f"a {type(form).__name__}"


def _paths_in(value: Any, path: keys.Path = ()) -> Iterator[keys.Path]:
    """The paths of a tree's leaves; a list counts as a leaf unless dicts are in it."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        items = list(enumerate(value))
    for part, item in items:
        yield from _paths_in(item, (*path, part))
    if not items:
        yield path


def _contribution_of(form: Mapping[str, Any]) -> Contribution:
    """What a plain state dict contributes: everything."""
    names: dict[Any, str] = {}
    for group in form[GROUPS]:
        called = group.get("param_names") or [str(number) for number in group["params"]]
        names.update(zip(group["params"], map(str, called), strict=True))
    groups = [
        {
            **{key: value for key, value in group.items() if key != "param_names"},
            "params": [names[number] for number in group["params"]],
        }
        for group in form[GROUPS]
    ]
    state = {
        names.get(key, str(key)): map_leaves(subclasses.opened(entry), _whole) for key, entry in form[STATE].items()
    }
    return Contribution({OPTIM: {STATE: state, GROUPS: groups}})


def _whole(leaf: Any) -> Any:
    return shard_of_whole(leaf) if isinstance(leaf, Tensor) else leaf
