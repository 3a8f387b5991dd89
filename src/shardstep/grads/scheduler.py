"""ZeRO-2: what is reduced when, during backward.

A *round* is one reduction of every bucket that has a parameter to train, in one fixed order: usually one round per
backward. Gradients are collected as they come, from autograd (``hooked_scheduler.py``) or from DDP
(``ddp_scheduler.py``); when all of a bucket (and of those before it in the order) are there, it is packed and sent;
what arrives is summed into this rank's shard.

[Note: when a rank is missing]
If a rank raises in its forward or backward, the others wait for it in theirs. They must come back, so that the program
can decide on all ranks to skip the batch: a hook waits for a limited time only, then keeps what it could not send and
lets backward end. ``zero_grad`` begins a new iteration; what was sent before it is recognised as old wherever it is met
(see ``reducer.py``). On accelerators nothing is reported with a bucket: there a ``zero_grad`` that is none of the usual
ones (see ``zero_grads.py``) makes the ranks compare how many buckets each has sent before the next round, and throw the
surplus away.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.grads.attendance import Attendance, JoinEnded, Progress, Roll
from shardstep.grads.iteration import Iteration, IterationState, Leaving, Round, RoundPlan
from shardstep.grads.reducer import GradientReducer
from shardstep.grads.settings import ReduceSettings
from shardstep.grads.sharded_gradient import ShardedGradient
from shardstep.grads.shards import GradientShards
from shardstep.grads.zero_grads import ZeroGradRule
from shardstep.params.relocation import Relocation
from shardstep.params.sharded_parameters import ShardedParameters

# How long a rank that is ahead waits inside its backward for the others, in seconds. See the note above.
PATIENCE = 5.0
_requires_grad = attrgetter("requires_grad")
_grad = attrgetter("grad")


class BackwardScheduler:
    """Collects the gradients of one optimizer and has them reduced, round by round, into the shards."""

    def __init__(
        self,
        sharded: ShardedParameters,
        shards: GradientShards,
        reducer: GradientReducer,
        settings: ReduceSettings,
        attendance: Attendance,
        relocation: Relocation,
    ) -> None:
        self._sharded = sharded
        self._shards = shards
        self._reducer = reducer
        self._settings = settings
        self._attendance = attendance
        self._relocation = relocation
        self.syncs = True  # False within no_sync
        self._order: list[int] = []  # of all buckets
        self._plan = RoundPlan([], [], [])
        self._zero_grads = ZeroGradRule()
        self._turn = 0  # of the sequence: where this rank was when an iteration was aborted
        self.steps_in_backward = False  # then backward waits for the other ranks as long as the group does

    def extend(self) -> None:
        """Take over the buckets that were added. Collective."""
        self._reducer.extend()
        # Backward finishes parameters from the last to the first, so a bucket is ready with its first parameter.
        buckets = self._sharded.layout.buckets
        self._order = sorted(range(len(buckets)), key=lambda position: -min(buckets[position].params))
        self._plan = RoundPlan([], [], [])

    def follow(self) -> bool:
        """Collective. If the parameters were moved to another device: follow them. Whether they were."""
        if not self._relocation.is_due:
            return False
        self._relocation.agree()
        if self._reducer.is_busy or self._reducer.under_way or self._iteration.is_open:
            self._complete(None)  # it was sent, or is to be, from where they have been
        self._reducer.settle()
        self.throw_leftovers_away()
        self._relocation.follow()
        self._shards.follow()
        self._iteration.follow(self._sharded.params)
        self._reducer.extend()
        self._plan = RoundPlan([], [], [])
        return True

    @property
    def _iteration(self) -> Iteration:
        return self._reducer.iteration

    @property
    def _patience(self) -> float | None:
        """How long to wait for the other ranks within backward, in seconds. None: as long as the group does."""
        return None if self.steps_in_backward else PATIENCE

    # --- collecting -----------------------------------------------------------------------------------------------

    def _take(self, index: int, param: Tensor, gradient: Tensor) -> None:
        """Take a gradient off its parameter. Nothing was there before it, so it counts alone."""
        self._iteration.arrived.pop(index, None)
        self._iteration.fresh.add(index)
        self._keep(index, gradient)
        param.grad = self._shards.fitting_stand_in(index)

    def _keep(self, index: int, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"shard_gradients=True expects dense gradients but got {gradient.layout} for "
                f"{self._sharded.layout.spec_of[index].label}. Drop shard_gradients, or make the gradient dense (for "
                "an embedding: sparse=False)."
            )
        if self._settings.reduce_dtype is not None and not self.syncs:
            # What is added up here is added up in the precision of the shards.
            gradient = gradient.to(self._settings.reduce_dtype)
        arrived = self._iteration.arrived
        earlier = arrived.get(index)
        if earlier is None:
            arrived[index] = gradient
            return
        position = self._sharded.layout.bucket_of[index]
        with self._iteration.streams.using(position, gradient.device):
            arrived[index] = earlier + gradient

    def _mark(self, current: Round, index: int) -> None:
        """The gradient of a parameter has come: send its bucket if it was the last."""
        if index in current.seen:
            return
        current.seen.add(index)
        position = self._sharded.layout.bucket_of[index]
        current.waiting[position] -= 1
        if current.waiting[position] == 0 and self._settings.overlap:
            self._send_ready()

    # --- a round --------------------------------------------------------------------------------------------------

    def _open_round(self) -> Round:
        current = self._iteration.round
        return current if current is not None and self._iteration.is_open else self._begin()

    def _begin(self) -> Round:
        """Begin a round: who takes part, and who is waited for?"""
        self._reducer.check()
        self.follow()
        iteration = self._iteration
        compares = iteration.after_abort and not self._reducer.reports
        try:
            state = Progress(self._reducer.sent, self._zero_grads.pattern)
            roll = self._attendance.call_roll(iteration.number, compares, state)
        except JoinEnded:  # this iteration was not begun on the ranks without inputs
            iteration.number -= 1
            raise
        return self._begin_with(roll)

    def _begin_with(self, roll: Roll, has_inputs: bool = True) -> Round:
        self._iteration.after_abort = False
        if roll.iteration is not None:
            self._iteration.number = roll.iteration
        if roll.most_sent is not None:
            self.catch_up(roll.most_sent)  # in the order of the round that was aborted
        if roll.all_alike:
            self._zero_grads.ranks_are_alike()
        self._replan()
        self._reducer.used.begin_round()
        self._zero_grads.round_begins()
        iteration = self._iteration
        iteration.round, self._turn = Round(self._plan.sequence, self._awaited(), roll.divisor, has_inputs), 0
        iteration.become(IterationState.REDUCING)
        return iteration.round

    def _awaited(self) -> list[int]:
        """By bucket: how many gradients have to come before it is sent."""
        return list(self._plan.counts)

    def _replan(self) -> None:
        """Which parameters are trained may have changed."""
        trained = list(map(_requires_grad, self._sharded.params.values()))
        if trained == self._plan.trained:
            return
        wanted = {index for index, is_trained in zip(self._sharded.params, trained, strict=True) if is_trained}
        counts = [sum(index in wanted for index in bucket.params) for bucket in self._sharded.layout.buckets]
        sequence = [part for position in self._order if counts[position] for part in self._reducer.parts[position]]
        self._plan = RoundPlan(trained, counts, sequence)

    def complete(self) -> None:
        """Collective. Reduce what has not been reduced yet, and bring in everything."""
        self._check()
        if not self._shards.is_deferring:  # (while DDP has the gradients, the round is that of this backward)
            self._complete_earlier()
        self._sweep()
        self.settle()

    def settle(self) -> None:
        """Collective. Bring in what is under way, and what had to wait."""
        self._check()
        if self._iteration.arrived and not self._iteration.is_open:
            self._begin()
        self._complete(None)
        self._reducer.settle()

    def stepped(self) -> None:
        """A step was made of these gradients."""
        self._zero_grads.stepped()

    def _check(self) -> None:
        """RuntimeError if there are no gradients to be had in this iteration."""
        self._reducer.check()
        if self._iteration.state is IterationState.LOST:
            raise RuntimeError(
                "another rank has aborted this iteration (it called zero_grad without a step), so its gradients are "
                "not available. Call zero_grad on every rank and go on with the next batch."
            )

    def _sweep(self) -> None:
        """Take gradients that were never reduced: after no_sync only, or set by hand."""
        if not set(map(type, map(_grad, self._sharded.params.values()))) - {type(None), ShardedGradient}:
            return
        for index, param in self._sharded.params.items():
            if param.grad is not None and not isinstance(param.grad, ShardedGradient):
                self._take(index, param, param.grad)

    def _complete_earlier(self) -> None:
        """End the round of an earlier backward, that could not wait for the other ranks."""
        if self._iteration.is_open:
            self._complete(None)

    def _complete(self, patience: float | None) -> None:
        iteration = self._iteration
        if patience is None and iteration.state is IterationState.STALLED:
            iteration.become(IterationState.REDUCING)
        self._send_rest(patience)
        if iteration.state is IterationState.STALLED:
            return
        if self._reducer.bring_in(patience):
            self._forget_backward()
        else:
            iteration.become(IterationState.STALLED)

    def _send_ready(self) -> None:
        """Send the buckets whose turn it is and whose gradients are all there."""
        iteration = self._iteration
        current = iteration.round
        assert current is not None
        while iteration.state is IterationState.REDUCING and not current.is_sent and current.is_ready:
            self._send_next(current, self._patience)
        if current.is_sent:
            iteration.become(IterationState.COLLECTING)

    def _send_rest(self, patience: float | None) -> None:
        iteration = self._iteration
        current = iteration.round
        while current is not None and iteration.state is IterationState.REDUCING and not current.is_sent:
            self._send_next(current, patience)
        if iteration.state is IterationState.REDUCING:
            iteration.become(IterationState.COLLECTING)

    def _send_next(self, current: Round, patience: float | None) -> None:
        """Send the next part of the round. If there is no room for it and patience runs out: STALLED."""
        iteration, part = self._iteration, current.next
        if not self._reducer.make_room(part, patience):
            iteration.become(IterationState.STALLED)
            return
        if iteration.is_over:  # another rank has aborted it, as came out while room was made
            return
        position = part.bucket.position
        if current.leaving is None:
            current.leaving = self._take_bucket(position)
        with iteration.streams.using(position, self._shards.buckets[position].device):
            self._reducer.send(part, current.leaving, current.divisor)
        if part.is_last:
            iteration.streams.forget(position)
        current.mark_sent()
        self._turn = current.sent
        if current.is_sent:
            self._reducer.used.end_round(part)

    def _take_bucket(self, position: int) -> Leaving:
        """The gradients of a bucket that is sent now."""
        iteration, shard = self._iteration, self._shards.buckets[position]
        self._take_leftovers(shard.bucket.params)
        gradients = [iteration.arrived.pop(index, None) for index in shard.bucket.params]
        kept = {index for index in shard.holding if index not in iteration.fresh and self._shards.is_exposed(index)}
        kept |= shard.uncertain  # another rank may have used them in an earlier round; else there are zeros
        iteration.fresh.difference_update(shard.bucket.params)
        current = iteration.round
        if current is None:
            return Leaving(gradients, kept)
        return Leaving(gradients, kept, current.has_inputs, None if current.ends_early else current.earlier)

    def _take_leftovers(self, indices: Iterable[int]) -> None:
        """A bucket of these parameters is about to be sent: take gradients that did not come by themselves."""
        return

    def _forget_backward(self) -> None:
        """All is done that was to be done at the end of backward, or nothing is to be done any more."""
        return

    # --- starting over --------------------------------------------------------------------------------------------

    def clear(self, keep: Iterable[int] = ()) -> None:
        """Forget all gradients; those of ``keep`` become zeros instead. A new iteration begins.

        If no step was made of them, the other ranks may have sent more, or fewer, buckets than this one.
        """
        before = self._iteration
        aborted = self._zero_grads.is_abort()
        self._reducer.start_iteration(Iteration(before.number + 1, before.after_abort or aborted))
        if aborted:
            self._reducer.hold([shard.shard for shard in self._shards.buckets if shard.shard is not None])
        else:
            self._reducer.give_back()
        self._forget_backward()
        self._shards.clear(keep)

    def catch_up(self, most_sent: int) -> None:
        """Send as many buckets as the rank that has sent most, and wait for all of them, to throw them away."""
        if not self._plan.sequence:
            self._replan()
        self._reducer.discard()
        sequence = self._plan.sequence
        while self._reducer.sent < most_sent:
            part = sequence[self._turn % len(sequence)]
            self._reducer.make_room(part, None)
            self._reducer.send_for_nothing(part)
            self._turn += 1
            if self._turn % len(sequence) == 0:
                self._reducer.used.end_round(part)
        self._reducer.discard()
        self._reducer.drain()
        self._reducer.join()
        self._reducer.start_iteration(self._iteration.continued())

    def throw_leftovers_away(self) -> None:
        """Collective. What aborted iterations have left under way belongs to buckets that will be others."""
        sent = collectives.all_gather_ints(self._sharded.ranks.everyone, [self._reducer.sent])
        self.catch_up(max(row[0] for row in sent))

    def shadow(self, roll: Roll) -> None:
        """Collective. Take part in a round of the ranks that have inputs, with nothing to add (see join.py)."""
        self._begin_shadow(roll)
        self._complete(None)

    def _begin_shadow(self, roll: Roll) -> Round:
        """They forget their gradients when a new iteration begins; so does this one."""
        if roll.iteration is not None and roll.iteration != self._iteration.number:
            self._shards.hide()
            self.clear()
        self._iteration.arrived.clear()  # what this rank had not reduced when it ran out of inputs
        for param in self._sharded.params.values():
            if not isinstance(param.grad, ShardedGradient):
                param.grad = None
        self._reducer.check()
        return self._begin_with(roll, has_inputs=False)
