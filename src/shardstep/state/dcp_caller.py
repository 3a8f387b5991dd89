"""What torch's ``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` want of ``optimizer.state_dict()``.

They do not say it, so this file reads it from their local variables. Why there is no other way, as read in torch 2.6.0,
2.9.1, 2.13.0 and 2.15.0:

- they call ``optimizer.state_dict()`` and ``optimizer.load_state_dict(state_dict=...)`` and pass nothing else. The
  user's ``StateDictOptions`` (full or sharded, offloaded, broadcast) stay in a local ``info``;
- hooks of ``register_state_dict_pre_hook`` and ``post_hook`` get the optimizer and the dict, not the options;
- ``torch.distributed.checkpoint.stateful.Stateful`` has no arguments either, and these functions never ask for it;
- what they do with the result they do for DTensor and ShardedTensor only. A piece of ours is a range of elements, which
  is no DTensor;
- from a flattened dict they drop the state that the optimizer does not have yet, before they call ``load_state_dict``.

Without this file users lose ``get_optimizer_state_dict`` and ``set_optimizer_state_dict``. If a later torch
renames these variables, nothing is found, and the ordinary contract of ``state_dict`` applies: an error that asks for
``consolidate_state_dict``. ``sharded_state_dict`` and ``shardstep.checkpoint`` do not need it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

_MODULE = "torch.distributed.checkpoint.state_dict"
_GETTER, _LOADER = "_get_optim_state_dict", "_load_optim_state_dict"
_DEPTH = 28  # frames to look at: torch's decorators are between its function and us


class Request(NamedTuple):
    """What DCP wants of ``state_dict``."""

    full: bool
    offload: bool  # full, and on rank 0 only
    broadcast: bool
    loading: Mapping[str, Any] | None  # the full dict that is about to be loaded, if one is


def request() -> Request | None:
    """What DCP wants, if DCP calls ``state_dict``."""
    info = _variable(_GETTER, "info")
    if info is None or not hasattr(info, "full_state_dict"):
        return None
    loading = _variable(_LOADER, "optim_state_dict")
    return Request(bool(info.full_state_dict), bool(info.cpu_offload), bool(info.broadcast_from_rank0), loading)


def flat_dict() -> Mapping[str, Any] | None:
    """The flattened dict that DCP is loading, if DCP calls ``load_state_dict`` and the user gave it a flattened one."""
    given = _variable(_LOADER, "state_dict")
    return given if isinstance(given, Mapping) and given and "state" not in given else None


def _variable(function: str, name: str) -> Any:
    """A local variable of the innermost call of one of DCP's functions; None if there is none."""
    return next((frame.f_locals.get(name) for frame in _frames() if frame.f_code.co_name == function), None)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    for _ in range(_DEPTH):
        if frame is None:
            return
        if frame.f_globals.get("__name__") == _MODULE:
            yield frame
        frame = frame.f_back
