"""Gradients as DDP's buckets hold them during backward, reduced: for the hooks of ``ddp_hooks.py``.

DDP hands over its buckets one by one as backward fills them. When all parameters of one of *our* buckets are there,
that bucket can be stepped. Our buckets do not depend on DDP's: nothing is lost when DDP rebuilds its own.

[Note: the model's gradients]
``param.grad`` belongs to autograd and DDP until backward is over. The local optimizer has tensors of its own over the
parameters' memory, and their gradients are views of DDP's reduced bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shardstep.comm.byte_views import is_dense
from shardstep.comm.collectives import GradBucket
from shardstep.comm.consensus import RankConsensus
from shardstep.comm.process_group import open_side_group
from shardstep.grads.ddp_usage import ParameterUsage
from shardstep.grads.hook_state import HookState, SteppedByHook
from shardstep.grads.parameter_gradients import ParameterGradients
from shardstep.params.model_search import params_of_ddp
from shardstep.params.sharded_parameters import ShardedParameters


@dataclass
class _Backward:
    """What has come in one backward."""

    gradients: dict[int, Tensor | None]  # reduced, by parameter
    held: frozenset[int]  # parameters that DDP does not know about
    missing: dict[int, set[int]]  # by bucket of ours: the parameters that DDP has not reduced yet


class DdpBucketGradients(SteppedByHook, ParameterGradients):
    """Before a hook was called, and outside of backward, ``param.grad``; within backward, DDP's buckets."""

    def __init__(self, sharded: ShardedParameters, consensus: RankConsensus) -> None:
        """Collective: gathers have a process group of their own, apart from DDP's reductions."""
        super().__init__(sharded, consensus)
        sharded.gather_through(open_side_group(sharded.group))
        self._usages: list[ParameterUsage] = []  # of every hook that was made
        self._backward: _Backward | None = None

    @property
    def may_be_replaced(self) -> bool:  # type: ignore[override]
        return self._hook is HookState.NONE

    def attach(self, usage: ParameterUsage | None) -> None:
        """A hook was made. ``usage``: finds out which parameters are used, if some may not be."""
        self.made()
        if usage is not None:
            self._usages.append(usage)
        self.extend()

    def begin(self) -> None:
        """A backward has begun, and a step in it."""
        sharded = self._sharded
        active = dict(zip(sharded.params, sharded.active, strict=True))
        # A frozen parameter that holds a gradient all the same is stepped with it; DDP does not know about it.
        held: dict[int, Tensor | None] = {
            index: param.grad
            for index, param in sharded.params.items()
            if active[index] and not param.requires_grad and param.grad is not None
        }
        missing = {
            position: {index for index in sharded.layout.buckets[position].params if active[index]} - held.keys()
            for position in sharded.plan.active_buckets
        }
        self._backward = _Backward(held, frozenset(held), missing)

    def take(self, bucket: GradBucket, reduced: Tensor, usage: ParameterUsage | None) -> list[int]:
        """One of DDP's buckets was reduced. Return which buckets of ours are complete with it, in order.

        Collective if parameters may be unused, which ``usage`` finds out.
        """
        assert self._backward is not None
        index_of, backward = self._sharded.index_of, self._backward
        found = [
            (index_of[param], param, view.to(param.dtype))
            for param, view in views_of(bucket, reduced)
            if param in index_of and index_of[param] not in backward.held
        ]
        backward.gradients.update({index: view for index, _, view in found})
        if usage is not None:
            backward.gradients.update(usage.gradients(found))
        touched = set()
        for index, _, _ in found:
            position = self._sharded.layout.bucket_of[index]
            backward.missing.get(position, set()).discard(index)
            touched.add(position)
        complete = [position for position in sorted(touched) if backward.missing.get(position) == set()]
        for position in complete:
            del backward.missing[position]
        return complete

    def check_complete(self) -> None:
        """RuntimeError if DDP has not reduced the gradient of a parameter that is to be stepped."""
        assert self._backward is not None
        for _, missing in sorted(self._backward.missing.items()):
            if missing:
                label = self._sharded.layout.spec_of[min(missing)].label
                raise RuntimeError(
                    f"{label} expects its gradient from DDP, but DDP did not reduce it. Give the optimizer parameters "
                    "of the DDP module only, and wrap the model after unfreezing."
                )

    def bind(self, positions: Iterable[int]) -> None:
        if self._backward is None:
            super().bind(positions)
            return
        for position in positions:
            for piece in self._sharded.layout.buckets[position].pieces(self._sharded.rank):
                gradient = self._backward.gradients.get(piece.param)
                if gradient is not None and not piece.whole:
                    gradient = gradient.reshape(-1)[piece.start : piece.stop]
                self._sharded.pieces.set_gradient(piece.param, gradient)

    def release(self) -> None:
        super().release()
        self._backward = None

    def stepped(self) -> None:
        for usage in self._usages:
            usage.forget()

    def extend(self) -> None:
        for usage in self._usages:
            usage.extend()


class BucketOrder:
    """Which of DDP's buckets comes: its number in this backward, and whether it is the last.

    DDP tells. But in the first iteration of a static graph it hands over its buckets, one for every dtype and device,
    when backward is over, and calls each of them number 0: there the last is the one with which all parameters came.
    """

    def __init__(self, ddp: DistributedDataParallel | None) -> None:
        reduced = params_of_ddp(ddp) if ddp is not None and ddp.static_graph else set()
        self._awaited = {param for param in reduced if param.requires_grad}
        self._count = 0  # of buckets that were called number 0, until all parameters came

    def place(self, bucket: GradBucket) -> tuple[int, bool]:
        """Once for every bucket: its number, and whether it is the last one."""
        number, is_last = bucket.index(), bucket.is_last()
        if number or not self._awaited:  # it is a later iteration (perhaps the hook was registered in one)
            self._awaited.clear()
            return number, is_last
        self._awaited.difference_update(bucket.parameters())
        self._count += 1
        return self._count - 1, is_last or not self._awaited


def evaluated_once(closure: Callable[[], Any]) -> Callable[[], Any]:
    """Run a closure now. Called, the result gives what it returned, the first time, and then runs it again."""
    losses = [closure()]

    def evaluate() -> Any:
        return losses.pop() if losses else closure()

    return evaluate


def views_of(bucket: GradBucket, reduced: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The parameters of a bucket, each with its gradient: a view of the reduced buffer, laid out as DDP does.

    That is in the order of the parameter's own memory if it is dense. (``bucket.gradients()`` knows offsets only.) Of a
    buffer in another precision than the parameters' the views have its precision.
    """
    views = []
    buffer = bucket.buffer()
    for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        elements = _elements(param, reduced)
        offset = gradient.storage_offset() - buffer.storage_offset() + elements.storage_offset()
        stride = param.stride() if is_dense(param) else gradient.stride()
        views.append((param, elements.as_strided(gradient.size(), stride, offset)))
    return views


def _elements(param: Tensor, reduced: Tensor) -> Tensor:
    """The buffer in elements like the parameter's, which are what DDP counts offsets in.

    Complex ones DDP hands over as pairs of real numbers: communication backends know no others.
    """
    if not param.is_complex() or reduced.is_complex():
        return reduced
    return torch.view_as_complex(reduced.view(-1, 2))
