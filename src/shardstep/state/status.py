"""What changes about the state of a sharded optimizer after it was built, in one object.

Lightning's and Fabric's wrappers are of our class, find our attributes on the optimizer inside, and keep for themselves
whatever a method sets. So no method sets an attribute: it changes this object, or the engine, which the wrapper and the
optimizer inside share. ``tests/test_architecture.py`` asserts it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shardstep.params.progress import Progress
from shardstep.state.view import StateView


class Snapshot(NamedTuple):
    """The full state, collected. Forgotten as soon as anything changes."""

    to: tuple[int, ...]  # the ranks that have it, in the order in which they got it
    states: dict[Any, Any]  # by parameter index; empty unless this rank has it


class Status:
    """What changes about one optimizer's state, on this rank."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.recipient = 0  # the rank that collected the state last, and so will save it
        self.view: StateView | None = None
        self.saves: dict[str, Any] = {}  # what shardstep.checkpoint keeps about the optimizer

    @property
    def snapshot(self) -> Snapshot | None:
        """The full state, unless it has changed since it was collected."""
        return self._progress.collected

    @property
    def has_state(self) -> bool:
        """Whether any rank may hold state."""
        return self._progress.has_state

    def changed(self, has_state: bool = True) -> None:
        """The state has changed: what was collected is stale."""
        self._progress.changed(has_state)

    def forget(self) -> None:
        """What was collected lacks something, although nothing has changed."""
        if self.snapshot is not None:
            self.changed()

    def collected(self, to: int, states: dict[Any, Any]) -> None:
        """Rank ``to`` has the full state. Ranks that collected the same state before keep theirs."""
        before = self.snapshot or Snapshot((), {})
        ranks = (*(rank for rank in before.to if rank != to), to)
        self._progress.collected = Snapshot(ranks, states or before.states)
        self.recipient = to
