"""Is it Accelerate that moves the optimizer's state to its device?

``accelerator.prepare`` calls ``optimizer.state_dict()``, moves what it gets, and gives it to ``load_state_dict``: on
every rank, and nothing is saved. It passes nothing, asks no hook, and looks for no method, so this file looks for it on
the call stack. (As read in accelerate 1.15. Its wrapper can be told not to, ``device_placement=[False]``, but who loads
an optimizer and then prepares it does not know that he has to.)

Without this file an optimizer that was loaded before ``prepare`` cannot be prepared. If a later version renames these,
nothing is found, and the ordinary contract of ``state_dict`` applies: an error that asks for consolidation.
"""

from __future__ import annotations

import sys
from types import FrameType

_MODULE, _FUNCTION = "accelerate.optimizer", "__init__"
_DEPTH = 8  # frames to look at: torch's decorators are between its function and us


def is_moving() -> bool:
    """Whether ``state_dict`` is called by Accelerate's wrapper, which loads the result at once."""
    frame: FrameType | None = sys._getframe()
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == _MODULE:
            return frame.f_code.co_name == _FUNCTION
        frame = frame.f_back
    return False
