"""What changes about a sharded optimizer after it was built, in one object.

Lightning's and Fabric's wrappers are of our class, find our attributes on the optimizer inside, and keep for themselves
whatever a method sets. So no method sets an attribute: it changes this object, which the wrapper and the optimizer
inside share. ``tests/test_architecture.py`` asserts it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardstep.state.collect import StateView


class Snapshot(NamedTuple):
    """The full state, collected. Forgotten as soon as anything changes."""

    to: tuple[int, ...]  # the ranks that have it, in the order in which they got it
    states: dict[Any, Any]  # by parameter index; empty unless this rank has it


@dataclass
class Status:
    """What changes about one optimizer, on this rank."""

    snapshot: Snapshot | None = None
    has_state: bool = False  # whether any rank may hold state
    recipient: int = 0  # who collected the state last: whoever that was will save it
    view: StateView | None = None
    lazy: Any = None  # gathers that the last step left under way
    failure: str = ""  # how the last step failed, if it did
    gather_failed: bool = False
    has_hook: bool = False  # a DDP hook was made for it (see overlap.py)
    steps_in_backward: bool = False  # and DDP has called it
    divide_by_initial_world_size: bool = True  # in a Join context
    # What checkpoint.py keeps: "pending", the save in the background; "side", where the ranks meet for saves.
    checkpoints: dict[str, Any] = field(default_factory=dict)

    def changed(self, has_state: bool = True) -> None:
        """The state is another one now: what was collected is stale."""
        self.snapshot, self.has_state = None, has_state

    def collected(self, to: int, states: dict[Any, Any]) -> None:
        """Rank ``to`` has the full state. Ranks that collected the same state before keep theirs."""
        before = self.snapshot or Snapshot((), {})
        self.snapshot = Snapshot((*(rank for rank in before.to if rank != to), to), states or before.states)
        self.recipient = to
