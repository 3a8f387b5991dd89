"""What all rank processes begin with. Imported last by the process that they are forked from: done once, not in each.

(If that could not import it, because it was started elsewhere, each of them does it.)

The probe is asked once about a class of torch.optim with the same options, not for every optimizer that is built: that
is most of what building one takes. What it says goes from process to process. Classes of tests, which may change, are
probed each time; so is a class of torch.optim in which a test has replaced something.
"""

from __future__ import annotations

import gc
import sys
from types import FunctionType
from typing import Any

import torch

from shardstep.params import builder
from shardstep.params.probe import Verdict, examine
from tests import traces


class _Memory:
    """(No dict of the module: a process whose dicts have grown is not used again, see ``tests.traces``.)"""

    def __init__(self) -> None:
        self.known: dict[str, Verdict] = {}
        self.news: dict[str, Verdict] = {}
        classes = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
        self.parts = {kind: _parts(kind) for kind in classes}  # when nothing was replaced yet


def _parts(kind: type) -> list[Any]:
    """What a class has, and the functions of its module, which its step calls."""
    own = [traces.unhooked(getattr(kind, name)) for name in dir(kind) if name == "__init__" or name[:2] != "__"]
    return own + [part for part in vars(sys.modules[kind.__module__]).values() if isinstance(part, FunctionType)]


def _remembered(
    optimizer_class: Any, defaults: Any, options: Any, like: torch.Tensor, vouched: bool = False
) -> Verdict:
    parts = _memory.parts.get(optimizer_class) if isinstance(optimizer_class, type) else None
    if parts is None or parts != _parts(optimizer_class):
        return examine(optimizer_class, defaults, options, like, vouched=vouched)
    name = optimizer_class.__module__, optimizer_class.__qualname__
    key = repr((*name, defaults, options, like.dtype, like.device, vouched))
    if key not in _memory.known:
        _memory.known[key] = examine(optimizer_class, defaults, options, like, vouched=vouched)
        if " at 0x" not in key:  # something else may be there in another process
            _memory.news[key] = _memory.known[key]
    return _memory.known[key]


def learn(verdicts: dict[str, Verdict]) -> None:
    """Of other processes."""
    _memory.known.update(verdicts)


def news() -> dict[str, Verdict]:
    """What this process found out since it was last asked."""
    found, _memory.news = _memory.news, {}
    return found


_memory = _Memory()
builder.examine = _remembered
WATCHED = traces.watch()
# What was imported is not looked at again: neither by the collector nor by searches through all objects.
gc.freeze()
