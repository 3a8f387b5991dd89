"""How far the steps of one optimizer have come on this rank, as a state machine.

A step that failed leaves state and parameters half updated. If all ranks failed at the same place, the next step may go
on; if a gather failed, what the ranks have sent each other is unknown, and nothing goes on.
"""

from __future__ import annotations

from enum import Enum, auto


class StepState(Enum):
    READY = auto()  # between steps
    STEPPING = auto()  # in one, or it did not come to its end
    BROKEN = auto()  # a gather failed


class Progress:
    """The state of one optimizer's steps, and how often its state has changed."""

    def __init__(self) -> None:
        self._state = StepState.READY
        self._reason = ""
        self.has_state = False  # whether any rank may hold optimizer state
        self.gathers_started = 0  # so far: after a failure the ranks compare it
        self.version = 0  # counts changes of the state: what was collected at another version is stale

    @property
    def failure(self) -> str:
        """How the last step failed; empty if it did not."""
        return self._reason or ("" if self._state is StepState.READY else "it did not end")

    @property
    def is_broken(self) -> bool:
        """Whether nothing may go on."""
        return self._state is StepState.BROKEN

    def begin(self) -> None:
        """A step begins, perhaps after one that failed everywhere alike."""
        self._expect(StepState.READY, StepState.STEPPING)
        self._state, self._reason = StepState.STEPPING, ""

    def end(self) -> None:
        """The step came to its end."""
        self._expect(StepState.STEPPING)
        self._state = StepState.READY

    def break_off(self, reason: str) -> None:
        """The parameters could not be gathered. (With lazy gathers that is found out between steps.)"""
        self._state, self._reason = StepState.BROKEN, reason

    def changed(self, has_state: bool = True) -> None:
        """The optimizer's state is another one now."""
        self.version += 1
        self.has_state = has_state

    def _expect(self, *states: StepState) -> None:
        if self._state not in states:
            raise AssertionError(f"expects a step that is {states} but it is {self._state}")
