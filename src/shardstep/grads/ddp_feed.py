"""DDP's buckets, handed to the optimizers whose parameters are in them. What no optimizer has is all-reduced as usual.

[Note: one order]
DDP hands over the same buckets in the same order on every rank, also on one without inputs (Join). Each goes to the
optimizers in their order, and each sends what is complete with it, on a process group of its own. So all ranks do the
same in the same order, and whoever waits, waits for what another rank does before it waits itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.futures import Future
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from shardstep.comm import collectives, torch_versions
from shardstep.comm.collectives import GradBucket
from shardstep.comm.process_group import Group
from shardstep.grads.ddp_buckets import BucketOrder, views_of
from shardstep.grads.ddp_reduced import DdpReducedGradients
from shardstep.params.model_search import params_of_ddp
from shardstep.params.sharded_parameters import ShardedParameters


class _Contents(NamedTuple):
    """What is in one of DDP's buckets."""

    buffer: Tensor
    params: list[Tensor]
    owned: list[list[tuple[int, Tensor]]]  # by optimizer: its parameters in it, and views of their gradients
    foreign: list[Tensor]  # views of the gradients of parameters that no optimizer has, in real numbers


class DdpFeed:
    """The optimizers of one DDP module. Called with each of DDP's buckets, in order."""

    def __init__(
        self,
        ddp: DistributedDataParallel | None,
        group: Group,
        members: Sequence[tuple[DdpReducedGradients, ShardedParameters]],
    ) -> None:
        """``group``: the ranks that DDP reduces over. ``members``: the optimizers' gradients and parameters."""
        self._ddp = weakref.ref(ddp) if ddp is not None else None
        self._group = group
        self._sources = [weakref.ref(source) for source, _ in members]  # who keep this object
        self._index_of = [sharded.index_of for _, sharded in members]
        self._order = BucketOrder(ddp)
        self._has_taken_over = False
        self._contents: dict[int, _Contents] = {}  # of DDP's buckets, by their number
        self._stop_watching: Callable[[], Any] | None = None
        if ddp is not None:
            self._before_forward(ddp, DdpFeed.begin_turn)
        if ddp is not None and ddp.gradient_as_bucket_view:  # its own forward begins with rebuilding buckets
            self._stop_watching = self._before_forward(ddp.module, DdpFeed.begin_forward)

    def _before_forward(self, module: Module, call: Callable[[DdpFeed], None]) -> Callable[[], Any]:
        """Have ``call`` called before every forward of a module, as long as this object lives. What ends it earlier."""
        handle = module.register_forward_pre_hook(_ForwardHook(weakref.ref(self), call))
        return weakref.finalize(self, handle.remove)

    @property
    def is_orphaned(self) -> bool:
        """Whether the DDP module is gone."""
        return self._ddp is not None and self._ddp() is None

    def connects(self, ddp: DistributedDataParallel, sources: Sequence[DdpReducedGradients]) -> bool:
        """Whether it is between this module and these optimizers, and no others."""
        mine = self._ddp() if self._ddp is not None else None
        return mine is ddp and set(map(id, self._living_sources())) == set(map(id, sources))

    def begin_turn(self) -> None:
        """DDP is about to run. RuntimeError if it must not, in a Join context."""
        ddp = self._ddp() if self._ddp is not None else None
        for source in self._living_sources():
            source.begin_turn(reduces=ddp is None or ddp.require_backward_grad_sync)

    def begin_forward(self) -> None:
        """The module inside DDP is about to run."""
        for source in self._living_sources():
            source.begin_forward()

    def _living_sources(self) -> list[DdpReducedGradients]:
        return [source for one in self._sources if (source := one()) is not None]

    # --- in backward ----------------------------------------------------------------------------------------------

    def take(self, bucket: GradBucket) -> Future[Tensor]:
        """Collective. Reduce a bucket: what optimizers have to their shards, the rest to where it is."""
        has_inputs = torch._C._current_graph_task_id() >= 0
        sources = self._living_sources()
        number, is_last = self._order.place(bucket)
        contents = self._contents_of(bucket, number, is_last) if has_inputs else self._look_into(bucket)
        if number == 0:
            self._take_over()
            for source in sources:
                source.begin(has_inputs)
        future = self._reduce_foreign(bucket, contents, sources[0].divisor)
        for source, gradients in zip(sources, contents.owned, strict=True):
            source.take(gradients, has_inputs)
        if is_last:
            for source in sources:
                source.take_last()
            if has_inputs:
                Variable._execution_engine.queue_callback(self._after_ddp)
        return future

    def _take_over(self) -> None:
        """DDP calls the hook, so it need not copy back what is all ours. (A hook may be made and never registered.)"""
        ddp = self._ddp() if self._ddp is not None else None
        if ddp is None or self._has_taken_over:
            return
        self._has_taken_over = True
        trained = (param for param in ddp.parameters() if param.requires_grad)
        if all(any(param in index_of for index_of in self._index_of) for param in trained):
            torch_versions.leave_gradients_to_us(ddp)

    def _after_ddp(self) -> None:
        """Called at the end of backward, before DDP's own callback, which came later: ask to be called once more."""
        Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        for source in self._living_sources():
            source.end_backward()

    def _reduce_foreign(self, bucket: GradBucket, contents: _Contents, divisor: int) -> Future[Tensor]:
        """Average what no optimizer has over the ranks, in DDP's buffer."""
        if not any(contents.owned):
            return collectives.all_reduce_mean(self._group, contents.buffer, divisor)
        if not contents.foreign:
            done: Future[Tensor] = Future()
            done.set_result(contents.buffer)
            return done
        sizes = [gradient.numel() for gradient in contents.foreign]
        packed = torch.cat([gradient.reshape(-1) for gradient in contents.foreign])
        reduced = collectives.all_reduce_mean(self._group, packed, divisor)

        def unpack(future: Future[Tensor]) -> Tensor:
            parts = future.value().split(sizes)
            for gradient, part in zip(contents.foreign, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
            return contents.buffer

        return reduced.then(unpack)

    # --- buckets --------------------------------------------------------------------------------------------------

    def _contents_of(self, bucket: GradBucket, number: int, is_last: bool) -> _Contents:
        """What is in a bucket. As long as DDP does not rebuild its buckets it is known from the last time."""
        buffer, params = bucket.buffer(), bucket.parameters()
        known = self._contents.get(number)
        if known is not None and _is_same(known, buffer, params):
            return known
        if known is not None and self._stop_watching is not None:  # it rebuilds them once
            self._stop_watching()
        contents = self._look_into(bucket)
        precision = buffer.dtype.to_real()
        if all(param.dtype.to_real() == precision for param in params):  # else they are copies, of this time
            self._contents[number] = contents
        if is_last:
            for later in [later for later in self._contents if later > number]:
                del self._contents[later]
        return contents

    def _look_into(self, bucket: GradBucket) -> _Contents:
        buffer, params = bucket.buffer(), bucket.parameters()
        owned: list[list[tuple[int, Tensor]]] = [[] for _ in self._index_of]
        if not any(param in index_of for param in params for index_of in self._index_of):
            return _Contents(buffer, params, owned, [buffer])
        if buffer.layout is not torch.strided:
            raise RuntimeError(
                f"reduce_scatter_hook expects dense gradients but got {buffer.layout}. Make the gradient dense (for an "
                "embedding: sparse=False)."
            )
        foreign = []
        for param, view in views_of(bucket, buffer):
            position = next((at for at, index_of in enumerate(self._index_of) if param in index_of), None)
            if position is None:
                foreign.append(torch.view_as_real(view) if view.is_complex() else view)
            else:
                owned[position].append((self._index_of[position][param], view.to(param.dtype)))
        return _Contents(buffer, params, owned, foreign)

    def forget_buckets(self) -> None:
        """Parameters were added to an optimizer: look into DDP's buckets anew."""
        self._contents.clear()

    def tensors(self) -> list[Tensor]:
        """The memory of DDP's buckets."""
        return [contents.buffer for contents in self._contents.values()]

    def check_params(self, params: Sequence[Tensor]) -> None:
        """ValueError if these are no parameters of the DDP module, or another optimizer has them."""
        ddp = self._ddp() if self._ddp is not None else None
        known = params_of_ddp(ddp) if ddp is not None else set(params)
        for param in params:
            is_taken = any(param in index_of for index_of in self._index_of)
            if isinstance(param, Tensor) and (param not in known or is_taken):
                raise ValueError(
                    "add_param_group expects parameters of the DDP module that no other optimizer of its hook has, but "
                    f"got another one, of shape {tuple(param.shape)}. Wrap the model with it, or drop it."
                )


class _ForwardHook:
    """Before the forward of a module. Does not keep the feed; a copy, or a saved module, has none."""

    def __init__(self, feed: weakref.ref[DdpFeed] | None, call: Callable[[DdpFeed], None] | None) -> None:
        self._feed, self._call = feed, call

    def __call__(self, module: Module, inputs: Any) -> None:
        feed = self._feed() if self._feed is not None else None
        if feed is not None and self._call is not None:
            self._call(feed)

    def __reduce__(self) -> tuple[type[_ForwardHook], tuple[None, None]]:
        return _ForwardHook, (None, None)


def _is_same(known: _Contents, buffer: Tensor, params: list[Tensor]) -> bool:
    same_memory = known.buffer.data_ptr() == buffer.data_ptr() and known.buffer.numel() == buffer.numel()
    return same_memory and len(known.params) == len(params) and all(map(is_, known.params, params))
