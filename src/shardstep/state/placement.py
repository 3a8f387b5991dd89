"""Wrappers that pass a state dict round to put the state on a device: ``load_state_dict(moved(state_dict()))``.

Accelerate's does, when it is built. The whole state is on no rank then, and it need not be: state follows its
parameters by itself (``params/relocation.py``). So such a caller gets a dict without state and with a mark, and when
the dict comes back everything stays as it is. Without this, an optimizer that has state cannot be given to
``accelerator.prepare``. The caller is told by its name on the call stack; it passes nothing that would tell it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

# The key, in a state dict, that says: the state stays where it is. A number of the optimizer.
KEPT = "shardstep_state_is_kept"
_CALLERS = {("accelerate.optimizer", "__init__")}
_DEPTH = 8  # frames to look at: torch's decorators are between its function and us


def is_all_that_is_wanted() -> bool:
    """Whether whoever calls ``state_dict`` does so to put the state on a device."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _CALLERS:
            return True
        frame = frame.f_back
    return False


def mark(form: dict[str, Any], optimizer: object) -> dict[str, Any]:
    """A dict without state, of this optimizer, that says so."""
    return {**form, KEPT: id(optimizer)}


def is_kept(state_dict: Any, optimizer: object) -> bool:
    """Whether a dict that is to be loaded says that the state stays. ValueError if it is another optimizer's."""
    if not isinstance(state_dict, Mapping) or KEPT not in state_dict:
        return False
    if state_dict[KEPT] != id(optimizer):
        raise ValueError(
            "load_state_dict expects a dict with the state, but got one that was made to put the state of another "
            "optimizer on a device, and has none. Use consolidate_state_dict and state_dict to carry state over."
        )
    return True
