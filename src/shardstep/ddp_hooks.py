"""DDP's communication hooks that step inside backward: ``hook_with_zero_step`` and ``hook_with_zero_step_interleaved``.

DDP hands over its buckets one by one as backward fills them. The inner hook reduces a bucket; when all parameters of
one of *our* buckets are there (``grads/ddp_buckets.py``), the engine updates it and starts its gather.

[Note: whose thread, which order]
Everything happens on the thread that calls the hook. DDP's buckets are worked off in DDP's order and ours in the order
in which they become complete, so every rank starts the same gathers in the same order, however late a reduction is.
A rank that waits for a gather waits for a rank that has its reductions up to there and starts the gather at its next
call: nobody waits in a circle. The gathers have a process group of their own, apart from DDP's reductions.

[Note: streams]
On an accelerator a future of a reduction is done as soon as it is enqueued, and waiting for it makes the current stream
wait. So the step has a stream of its own: it waits for the reduction and updates, and the gather follows on another
one, while the stream of backward computes on. That one waits for both in the last call, when it has nothing left to
compute. What the two share stays referenced until then: DDP's buckets, the parameters, the state. State that is made in
the first step belongs to the step's stream, and that waits for the stream of backward before it does anything: whoever
has read the state there has read it before its memory is given to somebody else.

With ``reduce_scatter_hook`` we reduce, too. There a bucket is stepped when its reduction was brought in to make room
for the next ones, which depends on counts only: all ranks reduce and gather in one and the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from shardstep.comm import process_group
from shardstep.comm.collectives import GradBucket
from shardstep.comm.process_group import Group
from shardstep.comm.streams import SideStreams
from shardstep.engine import Step
from shardstep.grads.ddp_buckets import BucketOrder, DdpBucketGradients
from shardstep.grads.ddp_reduced import DdpReducedGradients
from shardstep.grads.ddp_usage import ParameterUsage, UsageOfIteration
from shardstep.optimizer import ZeroRedundancyOptimizer
from shardstep.params.sharded_parameters import ShardedParameters
from shardstep.sharded_ddp import connect_stepping_hook, reduce_scatter_hook
from shardstep.state.dicts import unwrapped

# Any: what register_comm_hook was given for the hook, which is between the two of them.
Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def hook_with_zero_step(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """A DDP hook that reduces with ``hook`` and steps ``zero`` when the last bucket is there.

    After backward the parameters are updated on all ranks, from the first iteration on; ``zero.step()`` may be called
    and does nothing more. Learning rates and other options are those of the moment at which backward runs.

    Args:
        hook: any DDP hook that reduces a bucket, e.g. ``allreduce_hook``. With ``reduce_scatter_hook``, which gets
            ``zero`` as its state, each rank gets the sum of its share only: as much is sent as by DDP alone.
        ddp: the wrapped model, to which the result is given with ``register_comm_hook``.
        zero: an optimizer over its parameters that was built with ``overlap_with_ddp=True``.
        shard_buckets: accepted as in torch, where it spreads DDP's buckets evenly over the ranks. Here the layout does
            that already, exactly and whatever DDP's buckets are, so it changes nothing.
    """
    return _as_function(_stepping("hook_with_zero_step", hook, ddp, zero, interleaved=False))


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Like ``hook_with_zero_step``, but steps what has been reduced while backward still computes the rest.

    Args:
        hook: any DDP hook that reduces a bucket and does not step, e.g. ``allreduce_hook`` or
            ``reduce_scatter_hook``.
        ddp: the wrapped model, to which the result is given with ``register_comm_hook``.
        zero: an optimizer over its parameters that was built with ``overlap_with_ddp=True``.
        shard_buckets: accepted as in torch; changes nothing.
    """
    return _as_function(_stepping("hook_with_zero_step_interleaved", hook, ddp, zero, interleaved=True))


def _stepping(name: str, hook: Hook, ddp: Any, zero: Any, interleaved: bool) -> _SteppingHook:
    kind = _ScatteringHook if hook is reduce_scatter_hook else _SteppingHook
    return kind(name, hook, ddp, zero, interleaved)


def _as_function(stepping: _SteppingHook) -> Hook:
    """DDP wants a function, and reads its annotations, which are texts in this file."""

    def stepping_hook(state, bucket):  # type: ignore[no-untyped-def]
        return stepping(state, bucket)

    stepping_hook.__name__ = stepping_hook.__qualname__ = stepping.name
    stepping_hook.steps = True  # type: ignore[attr-defined]
    return stepping_hook


class _SteppingHook:
    """One hook of one DDP module. Called by DDP with each of its buckets, in order."""

    def __init__(self, name: str, hook: Hook, ddp: Any, zero: Any, interleaved: bool) -> None:
        self.name = name
        self._hook = hook
        self._interleaved = interleaved
        self._zero = _checked(name, zero, isinstance(self, _ScatteringHook))
        self._engine = self._zero.engine
        if not isinstance(ddp, DistributedDataParallel):
            raise ValueError(f"{name} expects a DistributedDataParallel module but got {type(ddp).__name__}.")
        if interleaved and getattr(hook, "steps", False):
            raise ValueError(
                f"{name} expects a hook that only reduces, but got one that steps, too: the ranks would start the "
                "gathers of the two optimizers in different orders. Use hook_with_zero_step around it."
            )
        sharded = self._engine.sharded
        sharded.check_lies_as_placed(name)
        _check_reduces_for_all(name, ddp, sharded)
        self._order = BucketOrder(ddp)
        self._usage: ParameterUsage | None = None
        self._source = self._connect(ddp)
        self._step: Step | None = None
        self._is_watched = False  # whether the gradients of the first step are changed afterwards
        self._streams = SideStreams()  # of the steps, see [Note: streams]
        self._devices: list[torch.device] = []  # that have streams
        self._queue: deque[tuple[GradBucket, torch.futures.Future[torch.Tensor]]] = deque()  # reduced or about to be

    def _connect(self, ddp: DistributedDataParallel) -> Any:
        """The source of gradients that this hook feeds."""
        source = self._engine.source
        assert isinstance(source, DdpBucketGradients)
        self._usage = _usage(ddp, self._engine.sharded)
        source.attach(self._usage)
        return source

    def __call__(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._source.called()
        number, is_last = self._order.place(bucket)
        if number == 0:
            self._abort()
        with self._step.failing_together() if self._step is not None else nullcontext():
            future = self._hook(state, bucket)  # around reduce_scatter_hook it waits for other ranks
        step = self._step if self._step is not None else self._begin()
        self._queue.append((bucket, future))
        if is_last:
            self._step = None
            try:
                with self._streams.after_current(self._devices):
                    self._finish(step)
            finally:
                self._streams.join(self._devices)
            self._end_backward()
            if not self._is_watched and torch._C._current_graph_task_id() >= 0:  # once: a loop does the same every time
                self._is_watched, queue = True, Variable._execution_engine.queue_callback
                queue(partial(queue, self._source.watch))  # DDP's own callback comes between the two
        elif self._interleaved and (self._usage is None or self._usage.is_known):
            try:
                with self._streams.after_current(self._devices):
                    self._work_off(step, done_only=True)
            except BaseException:  # who handles it finds parameters that are no longer written to
                self._streams.join(self._devices)
                raise
        return future

    def _begin(self) -> Step:
        """The first bucket of a backward."""
        if not self._engine.sharded.lies_as_placed():
            raise RuntimeError(
                "hook_with_zero_step expects parameters that lie in memory as they did when it was made, but a memory "
                "format was changed. Build DDP and the optimizer again."
            )
        self._step = self._engine.begin(self._zero.param_groups)
        self._devices = self._engine.sharded.devices_with_streams()
        self._begin_gradients()
        return self._step

    def _begin_gradients(self) -> None:
        self._source.begin()

    def _work_off(self, step: Step, done_only: bool) -> None:
        """Step with what was reduced, in DDP's order; ``done_only``: as far as that needs no waiting."""
        with torch.no_grad(), step.failing_together():
            while self._queue and not (done_only and not self._queue[0][1].done()):
                bucket, future = self._queue.popleft()
                reduced = future.wait()
                reduced = reduced[0] if isinstance(reduced, (list, tuple)) else reduced
                complete = self._source.take(bucket, reduced, self._usage)
                for position in complete if step.update is None else ():
                    self._source.bind([position])
                    step.advance(position)

    def _finish(self, step: Step) -> None:
        """The last bucket is there: step with everything and bring all ranks up to date."""
        if self._usage is not None:
            with step.failing_together():
                self._usage.find_out()
        self._work_off(step, done_only=False)
        with torch.no_grad():
            with step.failing_together():
                self._source.check_complete()
                self._source.bind(step.waiting)
            self._engine.end(step, self._zero.param_groups, self._source)

    def _end_backward(self) -> None:
        """The step was made, and the stream of backward has waited for it."""

    def _abort(self) -> None:
        """A backward that was not completed left a step open. The next one compares how far each rank came."""
        step, self._step = self._step, None
        self._queue.clear()
        if step is not None:
            self._engine.abort(step, self._source)
            self._streams.join(self._devices)


class _ScatteringHook(_SteppingHook):
    """Around ``reduce_scatter_hook``: what is stepped are the shards that it has reduced."""

    def _connect(self, ddp: DistributedDataParallel) -> DdpReducedGradients:
        feed = connect_stepping_hook(self.name, ddp, self._zero)
        self._hook = lambda state, bucket: feed.take(bucket)  # whatever DDP's state is
        source = self._engine.source
        assert isinstance(source, DdpReducedGradients)
        source.made()
        return source

    def _begin_gradients(self) -> None:
        """They have come with the bucket."""

    def _end_backward(self) -> None:
        self._source.join()  # in stream order it has: so the next backward need not, which may be in another graph

    def _work_off(self, step: Step, done_only: bool) -> None:
        self._queue.clear()
        with torch.no_grad(), step.failing_together():
            waiting = set(step.waiting) if step.update is None else set()
            for position in self._source.reduced():
                if position in waiting:
                    self._source.bind_reduced([position])
                    step.advance(position)


def _checked(name: str, zero: Any, scatters: bool) -> ZeroRedundancyOptimizer:
    zero = unwrapped(zero)
    source = zero.engine.source if isinstance(zero, ZeroRedundancyOptimizer) else None
    if isinstance(source, DdpReducedGradients) and not (scatters and source.has_hook):
        raise ValueError(f"{name} expects an optimizer without another hook. Make one hook for an optimizer.")
    if not isinstance(source, (DdpBucketGradients, DdpReducedGradients)):
        raise ValueError(
            f"{name} expects an optimizer built with overlap_with_ddp=True. Add it to the arguments of "
            "ZeroRedundancyOptimizer."
        )
    return zero


def _check_reduces_for_all(name: str, ddp: DistributedDataParallel, sharded: ShardedParameters) -> None:
    """ValueError if DDP averages over some ranks of the optimizer only: the others' parameters would drift apart."""
    everyone, reduced = sharded.ranks.everyone, process_group.open_group(ddp.process_group)
    left_out = sorted(set(process_group.ranks_of(everyone)) - set(process_group.ranks_of(reduced)))
    if left_out:
        raise ValueError(
            f"{name} expects DDP to reduce over all ranks of the optimizer, but its process_group lacks global "
            f"{process_group.rank_numbers(left_out)}. Build DDP over all ranks of the mesh, or of the process_group."
        )


def _usage(ddp: DistributedDataParallel, sharded: ShardedParameters) -> ParameterUsage | None:
    """Who finds out which parameters are used, if some may not be."""
    if not (ddp.find_unused_parameters or ddp.static_graph):
        return None
    group, as_view = _group_for_usage(ddp, sharded), ddp.gradient_as_bucket_view
    if all(param.device.type == "cpu" for param in sharded.params.values()):
        return ParameterUsage(sharded, group, as_view)
    return UsageOfIteration(sharded, group, as_view, is_static=ddp.static_graph)


def _group_for_usage(ddp: DistributedDataParallel, sharded: ShardedParameters) -> Group:
    """All ranks that DDP reduces over, which may be more than share the optimizer."""
    group = process_group.open_group(ddp.process_group)
    wire = sharded.wire
    return wire if process_group.same_ranks(group, wire) else process_group.open_side_group(group)
