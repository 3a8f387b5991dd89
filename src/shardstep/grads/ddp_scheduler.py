"""Collecting gradients from DDP, bucket by bucket, as its hook hands them over (``reduce_scatter_hook``).

DDP's buckets are not ours, and it rebuilds them after the first iteration: a gradient is taken by its parameter, and
our buckets are sent in our order.

[Note: who has param.grad]
Until its finalizing callback has run DDP reads and writes ``param.grad``, and checks that it is its own
(``gradient_as_bucket_view``). What stands for the sharded gradients is put there afterwards (``expose_deferred``). If
it is there when the next backward begins, autograd adds to it and DDP copies it into its bucket: it answers with what
has come since (``sharded_gradient.py``), whose sum is then added to the shard that is kept. So a parameter was used on
this rank if it has a gradient, and something came since.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from shardstep.grads.attendance import Roll
from shardstep.grads.iteration import IterationState, Round
from shardstep.grads.scheduler import BackwardScheduler
from shardstep.grads.sharded_gradient import Copied


class DdpScheduler(BackwardScheduler):
    """Is handed every gradient by DDP, once per round."""

    someone_has_joined = False  # in a Join context: whether a rank was without inputs in the last round

    def _begin_with(self, roll: Roll, has_inputs: bool = True) -> Round:
        self.someone_has_joined = roll.someone_has_joined
        return super()._begin_with(roll, has_inputs)

    def begin(self) -> None:
        """Collective. DDP hands over its first bucket."""
        self._shards.defer()  # first: what the earlier round brings must not be put on the parameters now
        self._complete_earlier()
        self._begin()

    def begin_without_inputs(self) -> None:
        """Collective. DDP takes part in the backward of other ranks, in a Join context, with zeros."""
        if not self._attendance.is_uneven:
            raise RuntimeError(
                "reduce_scatter_hook expects the optimizer in the Join context, too, because a rank without inputs "
                "takes part in its steps. Use Join([ddp, optimizer])."
            )
        self._complete_earlier()
        self._shards.restore_displaced()
        self._begin_shadow(self._attendance.answer_roll(self._reducer.sent))

    def take(self, gradients: Iterable[tuple[int, Tensor]]) -> None:
        """DDP has these gradients, of this rank alone."""
        current = self._iteration.round
        if current is None:  # another rank has aborted this iteration
            return
        for index, gradient in gradients:
            self._check_new(current, index)
            copied = self._shards.stand_in(index).take_copied()
            if copied is not Copied.NOT:
                self._shards.expose(index)  # DDP may have put its view in its place
            elif not self._shards.is_exposed(index):  # (it is if an earlier round brought it a moment ago)
                self._iteration.fresh.add(index)
            if self._sharded.params[index].grad is not None and copied is not Copied.NOTHING:  # it was used here
                # Nobody waits for what is frozen. Its bucket may be gone, and DDP's buffer filled anew before the next.
                self._iteration.arrived[index] = gradient if self._is_trained(index) else gradient.clone()
                self._shards.expose(index)
            self._mark(current, index)

    def take_zeros(self, gradients: Iterable[tuple[int, Tensor]]) -> None:
        """DDP has zeros for these parameters, because this rank is without inputs."""
        current = self._iteration.round
        if current is None:
            return
        for index, zeros in gradients:
            if not self._settings.find_unused and self._is_trained(index):  # else the others tell what is used
                self._iteration.arrived[index] = zeros
                self._shards.expose(index)
            self._mark(current, index)

    def _mark(self, current: Round, index: int) -> None:
        """DDP also hands over what was frozen after it was built: nobody waits for that."""
        if self._is_trained(index):
            super()._mark(current, index)
        else:
            current.seen.add(index)

    def _is_trained(self, index: int) -> bool:
        return self._sharded.params[index].requires_grad

    def take_last(self) -> None:
        """DDP has handed over its last bucket: send the rest, and bring in everything."""
        self._check_all_came()
        self._complete(self._patience)
        if self._iteration.state is IterationState.STALLED:  # DDP's buffers will be filled anew before it is sent
            self._iteration.keep_copies()

    def end_backward(self) -> None:
        """DDP is done with the gradients on the parameters."""
        current = self._iteration.round
        self._shards.expose_deferred([] if current is None else current.seen)

    def reduced(self) -> Sequence[int]:
        """The buckets of this round that were brought in, in order. As far as that needs no waiting."""
        current = self._iteration.round
        if current is None or self._reducer.used.is_told_late:
            return []
        brought_in = current.sequence[: current.sent - self._reducer.under_way]
        return [part.bucket.position for part in brought_in if part.is_last]

    @property
    def divisor(self) -> int | None:
        """By which sums of this round are divided; None if there is none."""
        return None if self._iteration.round is None else self._iteration.round.divisor

    def _sweep(self) -> None:
        """Take gradients that DDP was not to reduce: of backwards in its ``no_sync``, or set by hand."""
        if self._shards.is_deferring:  # what is on the parameters is DDP's, and has come
            return
        self._shards.restore_displaced()
        super()._sweep()
        for index, incoming in self._shards.take_incoming():
            self._keep(index, incoming)

    def _check_new(self, current: Round, index: int) -> None:
        if index in current.seen:
            raise RuntimeError(
                f"reduce_scatter_hook expects every gradient once in a backward, but that of {self._label(index)} came "
                "twice. Wrap the model in one DistributedDataParallel only, and give it the hook."
            )

    def _check_all_came(self) -> None:
        """RuntimeError if DDP has not handed over the gradient of a parameter that is trained."""
        current = self._iteration.round
        for index, is_trained in zip(self._sharded.params, self._plan.trained, strict=True):
            if current is not None and is_trained and index not in current.seen:
                raise RuntimeError(
                    f"{self._label(index)} expects its gradient from DDP, but DDP did not hand it over. Give the "
                    "optimizer parameters of the DDP module only, and wrap the model after unfreezing."
                )

    def _label(self, index: int) -> str:
        return self._sharded.layout.spec_of[index].label
