"""One iteration of ``shard_gradients``: what is collected and under way between two calls of ``zero_grad``.

``zero_grad`` throws the object away and begins another one. What was sent for it and is still under way is recognised
by it as being over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from torch import Tensor

from shardstep.grads.across_replicas import AcrossReplicas
from shardstep.grads.bucket_part import BucketPart
from shardstep.grads.gradient_streams import GradientStreams
from shardstep.grads.reduce_scatter import ReduceScatter


class IterationState(Enum):
    COLLECTING = auto()  # no round is open
    REDUCING = auto()  # a round is open: its buckets are sent as they become complete
    STALLED = auto()  # another rank was waited for in vain within backward; the first use of a gradient waits longer
    LOST = auto()  # another rank has aborted this iteration
    ABORTED = auto()  # thrown away


_ENDS = {IterationState.LOST, IterationState.ABORTED}
_NEXT = {
    IterationState.COLLECTING: {IterationState.REDUCING, IterationState.STALLED, *_ENDS},
    IterationState.REDUCING: {IterationState.COLLECTING, IterationState.STALLED, *_ENDS},
    IterationState.STALLED: {IterationState.REDUCING, IterationState.COLLECTING, *_ENDS},
    IterationState.LOST: {IterationState.ABORTED},
    IterationState.ABORTED: set(),
}


class RoundPlan(NamedTuple):
    """The buckets of a round, for the parameters that are trained now."""

    trained: list[bool]  # by parameter
    counts: list[int]  # by bucket: how many of its parameters are trained
    sequence: list[BucketPart]  # what to send, in the order in which all ranks send it


class Leaving(NamedTuple):
    """The gradients of a bucket whose parts are being sent."""

    gradients: list[Tensor | None]  # in its order
    kept: set[int]  # parameters to whose reduced gradient this one is added
    has_inputs: bool = True  # False: this rank takes part with zeros, in a Join context
    excused: Set[int] | None = frozenset()  # who may be missing: came in an earlier round, or (None) all: come later


@dataclass
class Round:
    """One reduction of every bucket that has a parameter to train."""

    sequence: Sequence[BucketPart]
    waiting: list[int]  # by bucket: how many of its parameters have not come; below 0: it was sent, or a part of it
    divisor: int
    has_inputs: bool = True  # False: this rank takes part with zeros, in a Join context
    ends_early: bool = False  # before all gradients have come: the rest comes in another one
    earlier: Set[int] = frozenset()  # what has come in such rounds of the same backward
    sent: int = 0  # of the sequence
    seen: set[int] = field(default_factory=set)  # the parameters that have come
    leaving: Leaving | None = None  # of the bucket whose first part was sent, until its last is

    @property
    def is_sent(self) -> bool:
        return self.sent >= len(self.sequence)

    @property
    def next(self) -> BucketPart:
        """What to send next."""
        return self.sequence[self.sent]

    @property
    def is_ready(self) -> bool:
        """Whether all gradients of what is next have come."""
        return self.waiting[self.next.bucket.position] <= 0

    def has_sent(self, position: int) -> bool:
        return self.waiting[position] < 0

    def mark_sent(self) -> None:
        """The next part was sent."""
        self.waiting[self.next.bucket.position] = -1
        if self.next.is_last:
            self.leaving = None
        self.sent += 1


class Iteration:
    """What belongs to one iteration, on this rank."""

    def __init__(self, number: int, after_abort: bool = False) -> None:
        self.number = number  # counted by zero_grad, alike on all ranks
        self.after_abort = after_abort  # the one before was aborted: compare with the other ranks before the next round
        self.arrived: dict[int, Tensor] = {}  # gradients that were not sent yet
        self.streams = GradientStreams()  # of those
        self.fresh: set[int] = set()  # parameters with a new gradient, to which nothing earlier is added
        self.round: Round | None = None  # the last one
        self.resend: deque[InFlight] = deque()  # to be sent again, see reducer.py
        self.misses = 0  # how often in a row the ranks were in this iteration, but in different buckets
        self.behind: list[int] = []  # ranks that were last met in an earlier iteration
        self._state = IterationState.COLLECTING

    @property
    def state(self) -> IterationState:
        return self._state

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is of use any more."""
        return self._state in _ENDS

    @property
    def is_open(self) -> bool:
        """Whether buckets of its round are still to be sent."""
        sending = self._state in (IterationState.REDUCING, IterationState.STALLED)
        return sending and self.round is not None and not self.round.is_sent

    def become(self, state: IterationState) -> None:
        """Change the state. A lost one stays lost: that comes out in the midst of sending, whose end is no news."""
        if state is self._state or (self._state is IterationState.LOST and state is not IterationState.ABORTED):
            return
        if state not in _NEXT[self._state]:
            raise AssertionError(f"an iteration that is {self._state} cannot become {state}")
        self._state = state
        if self.is_over:  # buckets under way still refer to it, and must not keep its gradients alive
            self.arrived.clear()
            self.round = None

    def keep_copies(self) -> None:
        """Of gradients that were not sent yet: their memory will be used for others."""
        self.arrived = {index: gradient.clone() for index, gradient in self.arrived.items()}
        if self.round is not None and self.round.leaving is not None:
            leaving = self.round.leaving
            copies = [None if gradient is None else gradient.clone() for gradient in leaving.gradients]
            self.round.leaving = leaving._replace(gradients=copies)

    def follow(self, params: Mapping[int, Tensor]) -> None:
        """Parameters were moved to another device: have their gradients there that were not sent yet."""
        self.arrived = {index: gradient.to(params[index].device) for index, gradient in self.arrived.items()}

    def continued(self) -> Iteration:
        """The next one, with the gradients that were not sent in this."""
        following = Iteration(self.number + 1)
        following.arrived, following.fresh = dict(self.arrived), set(self.fresh)
        following.streams = self.streams
        return following


@dataclass
class InFlight:
    """A part of a bucket that was sent, and what to do with what arrives."""

    scatter: ReduceScatter
    kept: set[int]  # parameters to whose reduced gradient this one is added
    here: list[bool] | None  # for which parameters this rank had a gradient; None: for all
    divisor: int
    iteration: Iteration
    number: int  # of the iteration when it was sent
    tag: int  # of its messages
    is_exchanged: bool = False  # whether all that can be started was
    superseded: bool = False  # thrown away, or sent again
    excused: Set[int] | None = frozenset()  # see ``Leaving``
    across: AcrossReplicas | None = None  # on a mesh: once it was met, its way across the replicas
    is_put: bool = False  # on accelerators: all was launched that puts it into the shard

    @property
    def part(self) -> BucketPart:
        return self.scatter.part

    @property
    def is_over(self) -> bool:
        return self.superseded or self.iteration.is_over
