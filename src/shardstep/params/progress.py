"""How far the steps of one optimizer have come on this rank, as a state machine.

A step that failed leaves state and parameters half updated. If all ranks failed at the same place, the next step may go
on; if a gather failed, what the ranks have sent each other is unknown, and nothing goes on. A closure may call ``step``
itself, as in plain torch: then one step is inside another.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from shardstep.comm.streams import Marks


class StepState(Enum):
    READY = auto()  # between steps
    STEPPING = auto()
    FAILED = auto()  # the last one did not come to its end
    BROKEN = auto()  # a gather failed


_NEXT = {
    # Between steps a lazy gather may fail, or train() or eval() of the optimizer.
    StepState.READY: {StepState.STEPPING, StepState.FAILED, StepState.BROKEN},
    StepState.STEPPING: {StepState.STEPPING, StepState.READY, StepState.FAILED, StepState.BROKEN},
    StepState.FAILED: {StepState.STEPPING, StepState.FAILED, StepState.BROKEN},
    StepState.BROKEN: {StepState.BROKEN},
}


class Progress:
    """The state of one optimizer's steps, and what was collected of its state since it last changed."""

    def __init__(self) -> None:
        self._state = StepState.READY
        self._reason = ""
        self._depth = 0  # of steps inside of one another
        self.has_state = False  # whether any rank may hold optimizer state
        self.gathers_started = 0  # so far: after a failure the ranks compare it
        self.consolidated_to: tuple[int, ...] = ()  # the ranks that have the full state, until it changes
        self.states: dict[Any, Any] = {}  # the full state, on those ranks
        self.recipient = 0  # the rank that collected the state last, and so will save it
        # On accelerators: when what a save in the background copies of the state is copied. Who changes it waits.
        self.copies = Marks()
        self.is_captured = False  # a step went into a graph: nobody tells us when that is replayed

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
        self.copies.wait()
        self.copies.clear()  # whatever follows on another stream is ordered after this step
        self._become(StepState.STEPPING)
        self._depth += 1

    def end(self) -> None:
        """The step came to its end. If one inside of it failed, and the closure went on, this one failed, too."""
        if self._state is StepState.FAILED:
            return
        self._depth -= 1
        if self._depth <= 0:
            self._become(StepState.READY)

    def fail(self) -> None:
        """The step, and any that it is inside of, did not come to its end."""
        self._depth = 0
        if self._state is not StepState.BROKEN:
            self._become(StepState.FAILED)

    def break_off(self, reason: str) -> None:
        """The parameters could not be gathered. (With lazy gathers that is found out between steps.)"""
        self._become(StepState.BROKEN)
        self._reason = self._reason or reason  # the first one is the cause of the others

    def changed(self, has_state: bool = True) -> None:
        """The optimizer's state is another one now: what was collected is stale, and its memory is freed."""
        self.consolidated_to, self.states, self.has_state = (), {}, has_state

    def consolidated(self, to: int, states: dict[Any, Any]) -> None:
        """Rank ``to`` has the full state. Ranks that collected the same state before keep theirs."""
        self.consolidated_to = (*(rank for rank in self.consolidated_to if rank != to), to)
        self.states, self.recipient = states or self.states, to

    def _become(self, state: StepState) -> None:
        if state not in _NEXT[self._state]:
            raise AssertionError(f"a step that is {self._state} cannot become {state}")
        self._state = state
