"""Collecting gradients by hooks on the parameters, as autograd finishes them (``shard_gradients=True``).

[Note: the end of backward]
The first hook of a backward asks autograd to be called at its end, where buckets with unused parameters are sent and
everything is brought in. In a backward that runs inside another one (re-entrant checkpointing) that would be too early:
there the outer one is waited for. If no hook fires in the outer one, the rest is done at the first use of a gradient.

[Note: a gradient that comes in parts]
Inside re-entrant checkpointing autograd may finish a shared parameter several times in one backward. If its bucket was
already sent, the round is ended and a second one takes the rest; all ranks have the same graph and do the same. From
then on the bucket waits for the end of backward.

[Note: one thread at a time]
Autograd has a thread for every device. Those of a model on several devices call hooks at the same time, and each lets
go of the interpreter in the midst of sending. A lock keeps what is collected and the order of buckets whole.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd import Variable

from shardstep.grads.gradient_hooks import GradientHooks
from shardstep.grads.iteration import IterationState
from shardstep.grads.nested_backward import BackwardTracker
from shardstep.grads.scheduler import BackwardScheduler
from shardstep.grads.sharded_gradient import ShardedGradient


class HookedScheduler(BackwardScheduler):
    """Is called by autograd with every gradient that is finished."""

    def __init__(self, *parts: Any) -> None:
        """``parts``: those of ``BackwardScheduler``."""
        super().__init__(*parts)
        self._in_parts: set[int] = set()  # see the note
        self._backwards = BackwardTracker()
        self._lock = threading.RLock()  # see [Note: one thread at a time]
        self._hooks = GradientHooks(self, HookedScheduler._collect)

    def extend(self) -> None:
        self._hooks.extend(self._sharded.params)
        super().extend()

    def _collect(self, index: int, param: Tensor) -> None:
        """Autograd has finished the gradient of a parameter. Runs once per parameter and backward: keep it short."""
        with self._lock:
            if not self.syncs:
                self._complete_earlier()  # else what comes now would go along in it on this rank, and not on others
            gradient, stand_in = param.grad, self._shards.stand_in(index)
            if gradient is stand_in:
                self._keep(index, stand_in.take_incoming())
            elif gradient is None:  # an earlier hook of the user's took it
                return
            elif type(gradient) is ShardedGradient:
                raise self._belongs_to_another(index, gradient)
            elif self.syncs or self._settings.reduce_dtype is not None:
                if gradient.device != self._shards.devices[index]:
                    self.follow()
                self._take(index, param, gradient)
            # (Else it stays where autograd put it, as in DDP.)
            self._iteration.streams.note(self._sharded.layout.bucket_of[index], param.device)
            if self.syncs:
                self._count(index)

    def _belongs_to_another(self, index: int, gradient: ShardedGradient) -> RuntimeError:
        return RuntimeError(
            f"shard_gradients=True expects one optimizer that reduces a gradient, but that of "
            f"{self._sharded.layout.spec_of[index].label} was taken by another one that is still alive: "
            f"{gradient.whose}, built before this one ({self._sharded.whose()}). Delete the older optimizer and "
            "whatever holds it (a scheduler, a list), then call zero_grad on this one and go on."
        )

    def _count(self, index: int) -> None:
        """A gradient has come: send its bucket if it was the last."""
        self._follow_backward()
        if self._iteration.state is IterationState.LOST:
            self._iteration.arrived.clear()
            return
        current = self._open_round()
        if current.has_sent(self._sharded.layout.bucket_of[index]):  # before this part came
            self._in_parts.add(index)
            current.ends_early, earlier = True, current.seen | current.earlier
            self._send_rest(None)
            current = self._begin()
            current.earlier = earlier
        self._mark(current, index)

    def _follow_backward(self) -> None:
        """Be called at the end of this backward, and first end the round of an earlier one if that is still open."""
        backward = self._backwards.look()
        if backward is None:
            return
        if backward.follows_another and self._iteration.is_open:
            self._complete(None)
        if self._backwards.enter(backward):
            Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        with self._lock:
            if self.syncs:
                self._complete(self._patience)

    def _forget_backward(self) -> None:
        self._backwards.reset()

    def _awaited(self) -> list[int]:
        awaited = super()._awaited()
        for index in self._in_parts:
            awaited[self._sharded.layout.bucket_of[index]] += 1  # which never comes
        return awaited

    def _take_leftovers(self, indices: Iterable[int]) -> None:
        """Gradients that were not used in this backward, but in one without communication before it."""
        for index in indices:
            param = self._sharded.params[index]
            gradient = param.grad
            missing = index not in self._iteration.arrived and gradient is not None
            if missing and not isinstance(gradient, ShardedGradient):
                self._take(index, param, gradient)
