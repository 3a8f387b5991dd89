"""ZeRO-2: the optimizer reduces the gradients itself, during backward.

A *round* is one reduction of every bucket that has a parameter to train, in one fixed order: usually one round per
backward. Hooks on the parameters collect gradients as autograd finishes them; when all of a bucket (and of those before
it in the order) are there, it is packed and sent; what arrives is summed into this rank's shard.

[Note: the end of backward]
The first hook of a backward asks autograd to be called at its end, where buckets with unused parameters are sent and
everything is brought in. In a backward that runs inside another one (re-entrant checkpointing) that would be too early:
there the outer one is waited for. If no hook fires in the outer one, the rest is done at the first use of a gradient.

[Note: a gradient that comes in parts]
Inside re-entrant checkpointing autograd may finish a shared parameter several times in one backward. If its bucket was
already sent, the round is ended and a second one takes the rest; all ranks have the same graph and do the same. From
then on the bucket waits for the end of backward.

[Note: when a rank is missing]
If a rank raises in its forward or backward, the others wait for it in theirs. They must come back, so that the program
can decide on all ranks to skip the batch: a hook waits for a limited time only, then keeps what it could not send and
lets backward end. ``zero_grad`` begins a new iteration; what was sent before it is recognised as old wherever it is met
(see ``parcels.py``). On accelerators nothing is told with a bucket: there ``zero_grad`` without a step since the last
one makes the ranks compare how many buckets each has sent before the next round, and throw the surplus away.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable

from shardstep.comm import collectives
from shardstep.comm.consensus import Board
from shardstep.grads.gradient_hooks import GradientHooks
from shardstep.grads.reducer import Parcels
from shardstep.grads.sharded_gradient import ShardedGradient
from shardstep.grads.shards import GradientShards
from shardstep.params import groups

# How long a rank that is ahead waits inside its backward for the others, in seconds. See the note above.
PATIENCE = 5.0
_requires_grad = attrgetter("requires_grad")
_grad = attrgetter("grad")


@dataclass(frozen=True)
class ReduceSettings:
    """The arguments of the optimizer that are about reducing gradients."""

    reduce_dtype: torch.dtype | None = None
    in_flight: int = 2
    overlap: bool = True
    find_unused: bool = False

    def check_params(self, params: Iterable[Tensor]) -> None:
        """ValueError if gradients of these parameters cannot be reduced as wished."""
        if self.reduce_dtype is not None and any(isinstance(param, Tensor) and param.is_complex() for param in params):
            raise ValueError(
                f"reduce_dtype expects real parameters but got complex ones, of which {self.reduce_dtype} would lose "
                "the imaginary part. Drop reduce_dtype."
            )

    def check(self, shard_gradients: bool, overlap_with_ddp: bool) -> None:
        """ValueError if the arguments do not go together."""
        if shard_gradients and overlap_with_ddp:
            raise ValueError(
                "shard_gradients=True and overlap_with_ddp=True exclude each other: in the first the optimizer reduces "
                "the gradients, in the second DDP does. Drop one of them."
            )
        if not shard_gradients and self != ReduceSettings():
            raise ValueError(
                "reduce_dtype, gradient_buckets_in_flight, overlap_backward and find_unused_parameters expect an "
                "optimizer that reduces the gradients itself. Add shard_gradients=True, or drop them."
            )
        if self.reduce_dtype is not None and not getattr(self.reduce_dtype, "is_floating_point", False):
            raise ValueError(
                f"reduce_dtype expects a floating point dtype but got {self.reduce_dtype!r}. Use torch.float32."
            )
        if not isinstance(self.in_flight, int) or self.in_flight < 1:
            raise ValueError(
                f"gradient_buckets_in_flight expects a number of at least 1 but got {self.in_flight!r}. Use 2."
            )

    def facts(self) -> dict[str, str]:
        """For the ranks to agree on."""
        return {
            "reduce_dtype": str(self.reduce_dtype),
            "gradient_buckets_in_flight": str(self.in_flight),
            "find_unused_parameters": str(self.find_unused),
        }


class Meeting(NamedTuple):
    """What the ranks know of each other at the start of a round."""

    divisor: int  # by which sums are divided
    epoch: int | None = None  # in a Join context: the iteration that the ranks with inputs are in
    most_sent: int | None = None  # if an iteration was given up: how many parcels the rank ahead has sent


class Rounds:
    """Collects the gradients of one optimizer and has them reduced, round by round, into the shards."""

    def __init__(
        self,
        shards: GradientShards,
        board: Board,
        settings: ReduceSettings,
        meet: Callable[[bool, int], Meeting],
    ) -> None:
        self._shards = shards
        self._placement = shards.placement
        self._dtype = settings.reduce_dtype
        self._overlap = settings.overlap
        self._meet = meet  # called at the start of a round
        self.sync = True  # False within no_sync
        self._arrived: dict[int, Tensor] = {}  # gradients that no parcel took yet
        self._parcels = Parcels(
            shards, board, settings.reduce_dtype, settings.in_flight, settings.find_unused, self._arrived.__contains__
        )
        self._fresh: set[int] = set()  # parameters with a new gradient, to which nothing earlier is added
        self._in_parts: set[int] = set()  # see the note
        self._order: list[int] = []  # of all buckets
        self._trained: list[bool] = []
        self._sequence: list[int] = []  # the buckets of a round
        self._counts: list[int] = []  # by bucket: how many of its parameters are trained
        self._waiting: list[int] = []  # by bucket: how many of them have not come in this round
        self._seen: set[int] = set()  # the parameters that have
        self._open = False  # within a round
        self._next = 0  # how many buckets of the round were sent
        self._divisor = shards.group.world_size
        self._tells = False  # whether something is told with each bucket
        self._stalled = False  # patience ran out in this backward
        self._given_up = False  # an iteration was: compare before the next round
        self._between_steps = True  # no step since the last zero_grad
        self._task = -1  # the backward that was last asked about
        self._outermost = -1  # the one at whose end we are called
        self._outer: FrameType | None = None  # the call of backward, if it is on this thread
        self._checked = False  # that nobody else reduces these gradients
        self._hooks = GradientHooks(self, Rounds._collect)
        self.extend()

    def extend(self) -> None:
        """Take over what was added to the placement: hooks on parameters, buckets. Collective."""
        self._shards.extend()
        self._hooks.extend(self._placement.params)
        self._parcels.extend()
        devices = [param.device for param in self._placement.params.values()]
        self._tells = all(collectives.sends_pairwise(self._shards.side, device) for device in devices)
        # Backward finishes parameters from the last to the first, so a bucket is ready with its first parameter.
        buckets = self._placement.layout.buckets
        self._order = sorted(range(len(buckets)), key=lambda position: -min(buckets[position].params))
        self._trained = []

    @property
    def epoch(self) -> int:
        """The iteration, counted by ``zero_grad``."""
        return self._parcels.epoch

    @property
    def sent(self) -> int:
        """How many parcels this rank has sent so far."""
        return self._parcels.sent

    def tensors(self) -> list[Tensor]:
        """The gradients that are not in the shards: not sent yet, or under way."""
        return [*self._arrived.values(), *self._parcels.tensors()]

    # --- collecting -----------------------------------------------------------------------------------------------

    def _collect(self, index: int, param: Tensor) -> None:
        """Autograd has finished the gradient of a parameter. Runs once per parameter and backward: keep it short."""
        gradient, stand_in = param.grad, self._shards.stand_in(index)
        if gradient is stand_in:
            self._keep(index, stand_in.take_incoming())
        elif gradient is None:  # an earlier hook of the user's took it
            return
        elif self.sync or self._dtype is not None:
            self._take(index, param, gradient)
        else:
            return  # stays where autograd put it, as in DDP
        if self.sync:
            self._count(index)

    def _take(self, index: int, param: Tensor, gradient: Tensor) -> None:
        """Take a gradient off its parameter. Nothing was there before it, so it counts alone."""
        self._arrived.pop(index, None)
        self._fresh.add(index)
        self._keep(index, gradient)
        param.grad = self._shards.stand_in(index)

    def _keep(self, index: int, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"shard_gradients=True expects dense gradients but got {gradient.layout} for "
                f"{self._placement.layout.spec_of[index].label}. Drop shard_gradients, or make the gradient dense (for "
                "an embedding: sparse=False)."
            )
        if self._dtype is not None and not self.sync:
            gradient = gradient.to(self._dtype)  # what is added up here is added up in the precision of the shards
        earlier = self._arrived.get(index)
        self._arrived[index] = gradient if earlier is None else earlier + gradient

    def _count(self, index: int) -> None:
        self._follow_backward()
        if not self._open:
            self._begin()
        position = self._placement.layout.bucket_of[index]
        if self._waiting[position] < 0:  # it was sent before this part came
            self._in_parts.add(index)
            self._send_rest(None)
            self._begin()
        if index not in self._seen:
            self._seen.add(index)
            self._waiting[position] -= 1
            if self._waiting[position] == 0 and self._overlap and not self._stalled:
                self._send_ready()

    def _follow_backward(self) -> None:
        """Be called at the end of this backward, and first end the round of an earlier one if that is still open."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        nested, outer = _outer_backward()
        if self._open and outer is not None and self._outer not in (None, outer):
            self._complete(None)  # that one is over
            self._task = task
        self._outer = outer
        if nested or task == self._outermost:
            return
        if self._open and self._outermost >= 0:
            self._complete(None)
        self._task = self._outermost = task
        Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        if self.sync:
            self._complete(PATIENCE)

    # --- a round --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Who is waited for?"""
        self._parcels.check()
        if not self._checked:  # the model may have been wrapped after the optimizer was built
            groups.check_not_in_ddp(self._placement.params.values())
            self._checked = True
        trained = list(map(_requires_grad, self._placement.params.values()))
        if trained != self._trained:
            self._plan(trained)
        try:
            meeting = self._meet(self._given_up and not self._tells, self.sent)
        except RuntimeError:  # Join ends early, on all ranks: this iteration was not begun on those without inputs
            self._parcels.epoch -= 1
            raise
        self._given_up = False
        self._divisor = meeting.divisor
        if meeting.epoch is not None:
            self.continue_at(meeting.epoch)
        if meeting.most_sent is not None:
            self.catch_up(meeting.most_sent)
        self._waiting = list(self._counts)
        for index in self._in_parts:
            self._waiting[self._placement.layout.bucket_of[index]] += 1  # which never comes
        self._seen.clear()
        self._open, self._next, self._stalled = True, 0, False

    def _plan(self, trained: list[bool]) -> None:
        self._trained = trained
        wanted = {index for index, is_trained in zip(self._placement.params, trained, strict=True) if is_trained}
        buckets = self._placement.layout.buckets
        self._counts = [sum(index in wanted for index in bucket.params) for bucket in buckets]
        self._sequence = [position for position in self._order if self._counts[position]]

    def complete(self) -> None:
        """Collective. Reduce what has not been reduced yet, and bring in everything."""
        self._parcels.check()
        if self._parcels.is_lost:
            raise RuntimeError(
                "another rank has given up this iteration (it called zero_grad without a step), so its gradients are "
                "not to be had. Call zero_grad on every rank and go on with the next batch."
            )
        if set(map(type, map(_grad, self._placement.params.values()))) - {type(None), ShardedGradient}:
            self._sweep()
        if self._arrived and not self._open:
            self._begin()
        self._complete(None)

    def _sweep(self) -> None:
        """Take gradients that were never reduced: after no_sync only, or set by hand."""
        for index, param in self._placement.params.items():
            if param.grad is not None and not isinstance(param.grad, ShardedGradient):
                self._take(index, param, param.grad)

    def _complete(self, patience: float | None) -> None:
        self._stalled = self._stalled and patience is not None
        self._send_rest(patience)
        if not self._stalled:
            self._stalled = not self._parcels.bring_in(patience)
        if not self._stalled:
            self._task = self._outermost = -1
            self._outer = None

    def _send_ready(self) -> None:
        while self._next < len(self._sequence) and self._waiting[self._sequence[self._next]] == 0:
            if not self._send_next(PATIENCE):
                return
        self._open = self._next < len(self._sequence)

    def _send_rest(self, patience: float | None) -> None:
        while self._open and self._next < len(self._sequence):
            if self._stalled or not self._send_next(patience):
                return
        self._open = False

    def _send_next(self, patience: float | None) -> bool:
        """Send the next bucket of the round. False if there was no room for it and patience ran out."""
        position = self._sequence[self._next]
        state = self._shards.buckets[position]
        if self._parcels.is_lost:
            self._arrived.clear()
            self._next = len(self._sequence)
            return True
        if not self._parcels.make_room(position, patience):
            self._stalled = True
            return False
        for index in state.bucket.params:  # not used in this backward, but in one without communication before it
            gradient = self._placement.params[index].grad
            if index not in self._arrived and gradient is not None and not isinstance(gradient, ShardedGradient):
                self._take(index, self._placement.params[index], gradient)
        gradients = [self._arrived.pop(index, None) for index in state.bucket.params]
        kept = {index for index in state.holding if index not in self._fresh and self._shards.is_exposed(index)}
        self._parcels.send(position, gradients, kept, self._divisor)
        self._fresh.difference_update(state.bucket.params)
        self._waiting[position] = -1
        self._next += 1
        return True

    # --- starting over --------------------------------------------------------------------------------------------

    def stepped(self) -> None:
        """A step was made of these gradients."""
        self._between_steps = False

    def clear(self, keep: Iterable[int] = ()) -> None:
        """Forget all gradients; those of ``keep`` become zeros instead.

        If no step was made of them, the other ranks may have sent more, or fewer, parcels than this one.
        """
        self._given_up = self._given_up or self._between_steps or self._parcels.any_flying or self._open
        self._between_steps = True
        self._arrived.clear()
        self._fresh.clear()
        self._open = self._stalled = False
        self._task = self._outermost = -1
        self._outer = None
        self._parcels.give_up(self.epoch + 1)
        self._shards.clear(keep)

    def catch_up(self, most_sent: int) -> None:
        """Send as many parcels as the rank that has sent most, and wait for all of them, to throw them away."""
        self._parcels.give_up(self.epoch)
        if not self._sequence:
            self._plan(list(map(_requires_grad, self._placement.params.values())))
        while self.sent < most_sent:
            position = self._sequence[self._next % len(self._sequence)]
            self._parcels.make_room(position, None)
            self._parcels.send(position, [None] * len(self._shards.buckets[position].bucket.params), set(), 1)
            self._next += 1
            self._parcels.give_up(self.epoch)
        self._parcels.drain()
        self._parcels.give_up(self.epoch + 1)

    def continue_at(self, epoch: int) -> None:
        """Count iterations from here: ranks that have joined did not call ``zero_grad`` as often as the others."""
        self._parcels.epoch = epoch

    def shadow(self, meeting: Meeting) -> None:
        """Collective. Take part in a round of the ranks that have inputs, with nothing to add (see uneven.py).

        They forget their gradients when a new iteration begins; so does this one.
        """
        if meeting.epoch is not None and meeting.epoch != self.epoch:
            self._shards.hide()
            self.clear()
            self._parcels.give_up(meeting.epoch)
        self._arrived.clear()  # what this rank had not reduced when it ran out of inputs
        for param in self._placement.params.values():
            if param.grad is not None and not isinstance(param.grad, ShardedGradient):
                param.grad = None
        meet, self._meet = self._meet, lambda given_up, sent: meeting
        try:
            self._begin()
        finally:
            self._meet = meet
        self._complete(None)


def _outer_backward() -> tuple[bool, FrameType | None]:
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
