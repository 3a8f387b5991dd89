"""DDP's communication hooks that step inside backward: ``hook_with_zero_step`` and ``hook_with_zero_step_interleaved``.

DDP hands over its buckets one by one as backward fills them. The inner hook reduces a bucket; then the pieces of its
parameters can be updated, and when all parameters of one of *our* buckets are there, that bucket is updated and its
gather starts. Our buckets do not depend on DDP's: nothing is lost when DDP rebuilds its own after the first iteration.

[Note: whose thread, which order]
Everything happens on the thread that calls the hook. DDP's buckets are worked off in DDP's order and ours in the order
in which they become complete, so every rank starts the same gathers in the same order, however late a reduction is.
A rank that waits for a gather waits for a rank that has its reductions up to there and starts the gather at its next
call: nobody waits in a circle. The gathers have a process group of their own, apart from DDP's reductions.

[Note: the model's gradients]
``param.grad`` belongs to autograd and DDP until backward is over. The local optimizer has tensors of its own over the
parameters' memory, and their gradients are views of DDP's reduced bucket.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shardstep.comm import collectives
from shardstep.comm.collectives import GradBucket, Group
from shardstep.engine import failing_together, update_all, update_bucket
from shardstep.grads.gradient_hooks import GradientHooks
from shardstep.optimizer import ZeroRedundancyOptimizer
from shardstep.params.local_optimizer import copy_options, fire_post_hooks, fire_pre_hooks
from shardstep.state.wrappers import unwrapped

Hook = Callable[[Any, GradBucket], torch.futures.Future]


def hook_with_zero_step(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """A DDP hook that reduces with ``hook`` and steps ``zero`` when the last bucket is there.

    After backward the parameters are updated on all ranks, from the first iteration on; ``zero.step()`` may be called
    and does nothing more. Learning rates and other options are those of the moment at which backward runs.

    Args:
        hook: any DDP hook that reduces a bucket, e.g. ``allreduce_hook``.
        ddp: the wrapped model, to which the result is given with ``register_comm_hook``.
        zero: an optimizer over its parameters that was built with ``overlap_with_ddp=True``.
        shard_buckets: accepted as in torch, where it spreads DDP's buckets evenly over the ranks. Here the layout does
            that already, exactly and whatever DDP's buckets are, so it changes nothing.
    """
    return _as_function(_SteppingHook("hook_with_zero_step", hook, ddp, zero, interleaved=False))


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Like ``hook_with_zero_step``, but steps what has been reduced while backward still computes the rest."""
    return _as_function(_SteppingHook("hook_with_zero_step_interleaved", hook, ddp, zero, interleaved=True))


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
        zero = unwrapped(zero)
        if not isinstance(zero, ZeroRedundancyOptimizer) or not zero._overlap_with_ddp:
            raise ValueError(
                f"{name} expects an optimizer built with overlap_with_ddp=True. Add it to the arguments of "
                "ZeroRedundancyOptimizer."
            )
        if not isinstance(ddp, DistributedDataParallel):
            raise ValueError(f"{name} expects a DistributedDataParallel module but got {type(ddp).__name__}.")
        if interleaved and getattr(hook, "steps", False):
            raise ValueError(
                f"{name} expects a hook that only reduces, but got one that steps, too: the ranks would start the "
                "gathers of the two optimizers in different orders. Use hook_with_zero_step around it."
            )
        self._hook = hook
        self._zero = zero
        self._interleaved = interleaved
        if not zero._placed.lies_as_placed():
            raise ValueError(
                f"{name} expects parameters that lie in memory as they did when DDP was built, but "
                "parameters_as_bucket_view made some contiguous. Drop it, or call model.to(memory_format="
                "torch.contiguous_format) before DDP."
            )
        self._iteration: _Iteration | None = None
        self._usage: _Usage | None = None
        if ddp.find_unused_parameters or ddp.static_graph:
            self._usage = _Usage(zero, _group_for_usage(ddp, zero), ddp.gradient_as_bucket_view)
        zero._status.has_hook = True

    def __call__(self, state: Any, bucket: GradBucket) -> torch.futures.Future:
        self._zero._status.steps_in_backward = True  # only now: a hook that was never registered must not stop ``step``
        future = self._hook(state, bucket)
        if bucket.index() == 0 and self._iteration is not None:  # its backward was not completed
            self._iteration.abandon()
            self._iteration = None
        if self._iteration is None:
            if not self._zero._placed.lies_as_placed():
                raise RuntimeError(
                    "hook_with_zero_step expects parameters that lie in memory as they did when it was made, but a "
                    "memory format was changed. Wrap the model in DDP again."
                )
            self._iteration = _Iteration(self._zero, self._usage)
        iteration = self._iteration
        iteration.queue.append((bucket, future))
        if bucket.is_last():
            self._iteration = None
            iteration.finish()
        elif self._interleaved:
            iteration.work_off(done_only=True)
        return future


class _Usage:
    """Which parameters were used in an iteration, here and elsewhere. DDP finds out too, but does not tell in time."""

    def __init__(self, zero: ZeroRedundancyOptimizer, group: Group, as_view: bool) -> None:
        self._group = group
        self._as_view = as_view
        self._here: set[int] = set()
        here, me = self._here, weakref.proxy(zero)
        watch = GradientHooks(zero, lambda _, index, param: here.add(index))
        zero._when_extended.append(lambda: watch.extend(me._placed.params))
        watch.extend(zero._placed.params)

    def forget(self) -> None:
        """The iteration is over."""
        self._here.clear()

    def gradients(self, found: Sequence[tuple[int, Tensor, Tensor]]) -> list[tuple[int, Tensor | None]]:
        """Collective. The gradients to step with, for (index, parameter, reduced gradient).

        A parameter that no rank has used keeps the gradient that it has, as in DDP: usually none.
        """
        here = [int(index in self._here) for index, _, _ in found]
        used = list(map(any, zip(*collectives.all_gather_ints(self._group, here), strict=True))) if found else []
        return [
            (index, reduced if is_used or (self._as_view and param.grad is not None) else param.grad)
            for (index, param, reduced), is_used in zip(found, used, strict=True)
        ]


def _group_for_usage(ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> Group:
    """All ranks that DDP reduces over, which may be more than share the optimizer."""
    group = collectives.open_group(ddp.process_group)
    wire = zero._placed.wire
    return wire if collectives.same_ranks(group, wire) else collectives.open_side_group(group)


class _Iteration:
    """One step, spread over the calls of one backward."""

    def __init__(self, zero: ZeroRedundancyOptimizer, usage: _Usage | None) -> None:
        self.queue: deque[tuple[GradBucket, torch.futures.Future]] = deque()  # reduced or about to be
        self._zero = zero
        self._usage = usage
        zero._begin_step()
        self._placement = placement = zero._placed
        self._gathers = zero._new_gathers()
        active = dict(zip(placement.params, placement.active, strict=True))
        # A frozen parameter that holds a gradient all the same is stepped with it; DDP does not know about it.
        self._gradients: dict[int, Tensor | None] = {
            index: param.grad
            for index, param in placement.params.items()
            if active[index] and not param.requires_grad and param.grad is not None
        }
        self._held = set(self._gradients)
        self._missing = {
            position: {index for index in placement.layout.buckets[position].params if active[index]}
            - self._gradients.keys()
            for position in placement.active_buckets
        }
        with failing_together(placement, zero._board, self._gathers):
            copy_options(zero.param_groups, zero.optim.param_groups)
            self._kwargs = fire_pre_hooks(zero.optim, {})
        # The same on every rank, so that all start the same gathers at the same time, whatever they own.
        self._splits = placement.splittable and not self._kwargs

    def work_off(self, done_only: bool) -> None:
        """Step with what was reduced, in DDP's order; ``done_only``: as far as that needs no waiting."""
        with torch.no_grad(), self._guarded():
            while self.queue and not (done_only and not self.queue[0][1].done()):
                bucket, future = self.queue.popleft()
                reduced = future.wait()
                self._take(bucket, reduced[0] if isinstance(reduced, (list, tuple)) else reduced)

    def finish(self) -> None:
        """The last bucket is there: step with everything and bring all ranks up to date."""
        zero, placement = self._zero, self._placement
        self.work_off(done_only=False)
        with torch.no_grad(), self._guarded():
            for position, missing in sorted(self._missing.items()):
                if missing:
                    label = placement.layout.spec_of[min(missing)].label
                    raise RuntimeError(
                        f"{label} expects its gradient from DDP, but DDP did not reduce it. Give the optimizer "
                        "parameters of the DDP module only, and wrap the model after unfreezing."
                    )
                self._bind(position)
                if self._splits:  # it needs nothing from DDP
                    self._step(position)
            if not placement.splits or not self._splits:  # all of it, or the empty groups of a rank that owns nothing
                update_all(zero.optim, None, self._kwargs)
            for position in placement.active_buckets if not self._splits else ():
                self._gathers.start(position)
            self._gathers.finish()
            fire_post_hooks(zero.optim, self._kwargs)
        placement.shard.release_gradients()
        copy_options(zero.optim.param_groups, zero.param_groups, placement.notes)
        if self._usage is not None:
            self._usage.forget()
        zero._end_step()

    def abandon(self) -> None:
        """Let go of everything. The next step compares how far each rank came."""
        self._gathers.land()
        self._placement.shard.release_gradients()

    def _take(self, bucket: GradBucket, reduced: Tensor) -> None:
        """The parameters of one of DDP's buckets have their gradients."""
        index_of = self._placement.index_of
        found = [
            (index_of[param], param, view)
            for param, view in _views(bucket, reduced)
            if param in index_of and index_of[param] not in self._held
        ]
        given = [(index, view) for index, _, view in found] if self._usage is None else self._usage.gradients(found)
        touched = set()
        for index, gradient in given:
            self._gradients[index] = gradient
            position = self._placement.layout.bucket_of[index]
            self._missing.get(position, set()).discard(index)
            touched.add(position)
        for position in sorted(touched) if self._splits else ():
            if position in self._missing and not self._missing[position]:
                del self._missing[position]
                self._bind(position)
                self._step(position)

    def _step(self, position: int) -> None:
        """Step what this rank owns of one of our buckets, and start its gather."""
        if self._placement.splits:
            update_bucket(self._placement, self._zero.optim, position)
        self._gathers.start(position)

    def _bind(self, position: int) -> None:
        """Give this rank's tensors of one of our buckets their gradients."""
        placement = self._placement
        for piece in placement.layout.buckets[position].pieces(placement.wire.rank):
            gradient, tensor = self._gradients.get(piece.param), placement.shard.tensors[piece.param]
            if gradient is None or piece.whole:
                tensor.grad = gradient
            else:
                tensor.grad = gradient.reshape(-1)[piece.start : piece.stop]

    def _guarded(self) -> Any:
        return failing_together(self._placement, self._zero._board, self._gathers)


def _views(bucket: GradBucket, reduced: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The parameters of a bucket, each with its gradient: a view of the reduced buffer, laid out as DDP does.

    That is in the order of the parameter's own memory if it is dense. (``bucket.gradients()`` knows offsets only.)
    """
    views = []
    buffer = bucket.buffer()
    for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        offset = gradient.storage_offset() - buffer.storage_offset() + reduced.storage_offset()
        stride = param.stride() if _is_dense(param) else gradient.stride()
        view = reduced.as_strided(gradient.size(), stride, offset)
        views.append((param, view if view.dtype == param.dtype else view.to(param.dtype)))
    return views


def _is_dense(param: Tensor) -> bool:
    """Whether the elements lie side by side, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
