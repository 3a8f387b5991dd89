"""Keys in a saved tree, as people write them, and the paths that they stand for.

A path is a tuple of dict keys and list positions, a key is its parts with dots between. Names of parameters have dots
of their own, so a key is never split: it is compared with the beginnings of the paths that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Path = tuple[Any, ...]
OPTIM, MODEL, EXTRA = "optim", "model", "extra"  # what a checkpoint consists of
STATE, GROUPS = "state", "param_groups"  # what an optimizer consists of
WHOLE = "."  # the key of everything


def key_of(path: Path) -> str:
    return ".".join(map(str, path)) or WHOLE


def hint(what: str, roots: Sequence[Path]) -> str:
    """A hint for the command line: where the thing is that was not found under the given key."""
    names = [key_of(root) for root in roots]
    return f"its {what} under {' and '.join(map(repr, names))}: pass --key {names[0]}"


def root_of(paths: Iterable[Path], key: str) -> Path | None:
    """The beginning that ``key`` stands for; None if there is none. ValueError if there are two of the same text."""
    if key == WHOLE:
        return ()
    found = {path[:end] for path in paths for end in range(1, len(path)) if key_of(path[:end]) == key}
    if len(found) > 1:
        raise ValueError(f"the key {key!r} expects one place but stands for {sorted(map(str, found))}.")
    return next(iter(found), None)


def optimizer_roots(paths: Iterable[Path]) -> list[Path]:
    """The beginnings under which there are optimizers, that is lists of parameter groups."""
    found: dict[Path, None] = {}
    for path in paths:
        for position, part in enumerate(path[:-1]):
            if part == GROUPS and isinstance(path[position + 1], int):
                found[path[:position]] = None
                break
    return list(found)


def is_flattened_optimizer(paths: Iterable[Path], root: Path) -> bool:
    """Whether torch's ``flatten_optimizer_state_dict`` made what lies under ``root``: one key for every value."""
    below = {str(path[len(root)]).split(".")[0] for path in paths if path[:-1] == root}
    return GROUPS in below and below <= {GROUPS, STATE}


def deeper(paths: Iterable[Path], name: str) -> list[Path]:
    """The beginnings that end with ``name`` and have something under them."""
    found = {path[:end]: None for path in paths for end in range(2, len(path)) if path[end - 1] == name}
    return list(found)
