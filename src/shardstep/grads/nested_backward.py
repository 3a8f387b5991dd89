"""Which backward runs now: the outermost one, or one that a node of another called (re-entrant checkpointing)?

Autograd tells the number of the graph that it works on, and whom to call at its end, but not whether that end is the
end of everything: a backward inside a checkpointed segment has a number and an end of its own. There is no interface to
ask, and without an answer gradients of shared parameters would be reduced too early, silently wrong. So this file, and
no other, looks for torch's entry point on the call stack: once per backward, not once per parameter.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import NamedTuple

import torch


class Backward(NamedTuple):
    """A backward that was not the one before."""

    task: int
    is_nested: bool
    outermost_call: FrameType | None  # if it is on this thread
    follows_another: bool  # an earlier backward, at whose end we wanted to be called, is over


class BackwardTracker:
    """Follows the backwards of one program."""

    def __init__(self) -> None:
        self._task = -1  # the one that was last asked about
        self._outermost = -1  # the one at whose end we are called
        self._outer_call: FrameType | None = None

    def look(self) -> Backward | None:
        """The backward that runs now; None if it is the one that was entered last."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return None
        is_nested, call = _outermost_backward()
        another_call = call is not None and self._outer_call not in (None, call)
        another_task = not is_nested and task != self._outermost and self._outermost >= 0
        return Backward(task, is_nested, call, another_call or another_task)

    def enter(self, backward: Backward) -> bool:
        """Follow this one from now on. Whether it is outermost, and new."""
        self._task, self._outer_call = backward.task, backward.outermost_call
        if backward.is_nested or backward.task == self._outermost:
            return False
        self._outermost = backward.task
        return True

    def reset(self) -> None:
        """All is done that was to be done at the end of backward."""
        self._task = self._outermost = -1
        self._outer_call = None


def _outermost_backward() -> tuple[bool, FrameType | None]:
    """Whether the backward that runs on this thread was called by a node of another one; the outermost call."""
    entry = torch.autograd.graph._engine_run_backward.__code__
    frame: FrameType | None = sys._getframe()
    calls = []
    while frame is not None:
        if frame.f_code is entry:
            calls.append(frame)
        frame = frame.f_back
    # Autograd's own threads (one per accelerator) do not show the outermost call.
    if isinstance(threading.current_thread(), threading._DummyThread):
        return bool(calls), None
    return len(calls) > 1, calls[-1] if calls else None
