"""Who takes part when gradients are reduced. All ranks do, except in a Join context (``join.py``)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import NamedTuple, Protocol


class Activity(IntEnum):
    """What a rank does now."""

    JOINED = 0  # nothing of its own
    STEP = 1
    ROUND = 2  # of reductions
    CLIP = 3
    UNSCALE = 4


class Call(NamedTuple):
    """What one rank does now, as whole numbers."""

    kind: int
    iteration: int = 0  # of a round, see iteration.py
    aborted: int = 0
    sent: int = 0
    first: int = 0  # arguments, as the bits of floats
    second: int = 0

    @classmethod
    def of(cls, kind: Activity, first: float, second: float) -> Call:
        return cls(kind, 0, 0, 0, *struct.unpack("qq", struct.pack("dd", first, second)))

    @property
    def arguments(self) -> tuple[float, float]:
        return struct.unpack("dd", struct.pack("qq", self.first, self.second))  # type: ignore[return-value]


class Progress(NamedTuple):
    """How far a rank has come, for the ranks to compare after an iteration was aborted."""

    sent: int  # buckets, so far
    pattern: int  # of its calls of zero_grad, see zero_grads.py


class Roll(NamedTuple):
    """What the ranks know of each other at the start of a round of reductions."""

    divisor: int  # by which sums are divided
    iteration: int | None = None  # in a Join context: the one that the ranks with inputs are in
    most_sent: int | None = None  # if an iteration was aborted: how many buckets the rank ahead has sent
    someone_has_joined: bool = False  # in a Join context: whether a rank is without inputs
    all_alike: bool = False  # whether the ranks have compared, and all have come as far in the same way


class JoinEnded(RuntimeError):
    """A rank has run out of inputs, and the Join context is to end early, on all ranks."""


_ONE_STEP = (
    "a Join context expects every forward of DDP to be followed by a backward that is reduced and by one step, because "
    "a rank without inputs takes part in both, but {}. Do not accumulate gradients (nor skip a step) there, or use "
    "shard_gradients=True without DDP, where each is announced."
)


def step_is_missing(got: str) -> RuntimeError:
    """For accumulation in a Join context with DDP. ``got``: what happened instead."""
    return RuntimeError(_ONE_STEP.format(got))


@contextmanager
def expecting_a_step(under_ddp: bool) -> Iterator[None]:
    """Around a collective in which a rank without inputs waits for the others; under DDP, for their step."""
    try:
        yield
    except RuntimeError as error:
        if not under_ddp:
            raise
        raise step_is_missing(f"no rank came to step here ({error})") from error


class Attendance(Protocol):
    """Asked before every collective of the gradients, so that ranks without inputs take part."""

    @property
    def is_uneven(self) -> bool:
        """Whether to ask, before a collective, which ranks have inputs."""

    @property
    def may_be_incomplete(self) -> bool:
        """Whether ranks may be without inputs now, so that what nobody announces to them is not possible."""

    def call_roll(self, iteration: int, aborted: bool, progress: Progress) -> Roll:
        """Collective. Before a round. JoinEnded if it is not to begin."""

    def answer_roll(self, sent: int) -> Roll:
        """Collective. Before a round, on a rank without inputs that takes part in it."""

    def announce_clipping(self, max_norm: float, order: float) -> None:
        """Collective. Before the norm of all gradients is computed."""

    def announce_unscaling(self, scale: float, index: int) -> None:
        """Collective. Before gradients like those of parameter ``index`` are multiplied."""
