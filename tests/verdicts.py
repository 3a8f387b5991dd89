"""What the probe found out about classes of torch.optim, handed on from process to process.

A class is probed once for the same options, not for every optimizer that is built: the probe took a third of the
suite's time. Its own tests ask it directly, and classes of tests, which may change, are probed each time.
"""

from __future__ import annotations

from typing import Any

import torch

from shardstep.params import builder
from shardstep.params.probe import Verdict, examine


class _Memory:
    """(No dict of the module: a process whose dicts have grown is not used again, see ``tests.traces``.)"""

    def __init__(self) -> None:
        self.known: dict[str, Verdict] = {}
        self.news: dict[str, Verdict] = {}


_memory = _Memory()


def remember() -> None:
    """In this process, from now on."""
    builder.examine = _remembered


def learn(verdicts: dict[str, Verdict]) -> None:
    """Of other processes."""
    _memory.known.update(verdicts)


def news() -> dict[str, Verdict]:
    """What this process found out since it was last asked."""
    found, _memory.news = _memory.news, {}
    return found


def _remembered(
    optimizer_class: Any, defaults: Any, options: Any, like: torch.Tensor, vouched: bool = False
) -> Verdict:
    module = getattr(optimizer_class, "__module__", "")
    if not isinstance(optimizer_class, type) or not module.startswith("torch.optim."):
        return examine(optimizer_class, defaults, options, like, vouched=vouched)
    key = repr((module, optimizer_class.__qualname__, defaults, options, like.dtype, like.device, vouched))
    if key not in _memory.known:
        _memory.known[key] = examine(optimizer_class, defaults, options, like, vouched=vouched)
        if " at 0x" not in key:  # something else may be there in another process
            _memory.news[key] = _memory.known[key]
    return _memory.known[key]
