"""What a rank keeps of the gradients when they are sharded.

The reducer fills the shards during backward, the optimizer steps with them. A ``ShardedGradient`` on each parameter
stands for them: whoever sets ``param.grad`` to None has forgotten the gradient, here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from operator import attrgetter, is_

import torch
from torch import Tensor

from shardstep.grads.sharded_gradient import Copied, Owner, ShardedGradient
from shardstep.layout.specs import Bucket, Piece
from shardstep.params.sharded_parameters import ShardedParameters

_grad = attrgetter("grad")
_shape = attrgetter("shape")


@dataclass
class BucketShard:
    """The reduced gradients of one bucket, as far as this rank owns it."""

    bucket: Bucket
    pieces: list[Piece]  # mine
    start: int  # my range of the bucket
    stop: int
    dtype: torch.dtype  # in which gradients travel and are kept
    device: torch.device
    shard: Tensor | None = None  # my range of the bucket
    holding: set[int] = field(default_factory=set)  # the parameters of the bucket that have a reduced gradient
    uncertain: set[int] = field(default_factory=set)  # those of them that, for all this rank knows, nobody has used
    capacity: int = (
        0  # how many elements the shard's memory has room for, if more than my range: what arrives is padded
    )
    keeps_memory: bool = False  # of the shard, when there is none
    kept: Tensor | None = None

    def room(self, low: int, high: int) -> Tensor:
        """The memory for a part of my range: what arrives may be put there."""
        if self.shard is None:
            self.shard = self.kept
        if self.shard is None:
            numel = self.stop - self.start
            self.shard = torch.empty(max(numel, self.capacity), dtype=self.dtype, device=self.device)[:numel]
            self.kept = self.shard if self.keeps_memory else None
        return self.shard[low - self.start : high - self.start]

    def add(self, low: int, high: int, total: Tensor, kept: set[int]) -> None:
        """A part of my range arrived: add it to the gradients of ``kept``, and put it in place of all others."""
        room = self.room(low, high)
        for piece in self.pieces:
            if piece.param not in kept:
                self.room(piece.offset, piece.offset + piece.numel).zero_()
        room.add_(total)

    def on_device(self, bucket: Bucket, device: torch.device) -> BucketShard:
        """The same, of parameters that were moved. ``bucket``: theirs now."""
        shard = None if self.shard is None else self.shard.to(device)
        kept = shard if self.keeps_memory else None
        return replace(self, bucket=bucket, device=device, shard=shard, kept=kept)

    def forget(self, indices: set[int]) -> None:
        """These parameters have no gradient any more."""
        self.holding, self.uncertain = self.holding - indices, self.uncertain - indices
        if not self.holding or self.shard is None:
            self.shard = None
            return
        for piece in self.pieces:
            if piece.param in indices:
                self._span(self.shard, piece).zero_()

    @cached_property
    def indices(self) -> list[int]:
        """The parameters of my pieces, in the order of the bucket."""
        return [piece.param for piece in self.pieces]

    @cached_property
    def _sizes(self) -> list[int]:
        """In which sizes my range is cut: padding, a piece, padding, a piece... There need not be any padding."""
        sizes, end = [], self.start
        for piece in self.pieces:
            sizes += [piece.offset - end, piece.numel]
            end = piece.offset + piece.numel
        return [*sizes, self.stop - end]

    def spans(self, shard: Tensor) -> Sequence[Tensor]:
        """The gradients of all my pieces in ``shard``, 1D. One call, however many there are."""
        return shard.split(self._sizes)[1::2]

    def span(self, piece: Piece) -> Tensor | None:
        """The gradient of one of this rank's pieces; None if there is none."""
        return None if self.shard is None or piece.param not in self.holding else self._span(self.shard, piece)

    def _span(self, shard: Tensor, piece: Piece) -> Tensor:
        return shard[piece.offset - self.start : piece.offset - self.start + piece.numel]


class GradientShards:
    """This rank's shards of the reduced gradients of one optimizer, and what stands for them on the parameters."""

    def __init__(self, sharded: ShardedParameters, dtype: torch.dtype | None, keep_memory: bool) -> None:
        """``keep_memory``: of the shards, from one iteration to the next."""
        self._sharded = sharded
        self._dtype = dtype
        self._keep_memory = keep_memory
        self.buckets: list[BucketShard] = []
        self.devices: dict[int, torch.device] = {}  # by parameter: where its gradient is
        self._stand_ins: dict[int, ShardedGradient] = {}
        self._deferred: set[int] | None = None  # while DDP has the parameters' gradients: what it will make room for
        self._displaced: list[tuple[int, Tensor]] = []  # by what DDP has put there when it rebuilt its buckets
        self._bound: list[int] = []  # parameters on which their own reduced gradient is, for the time of a step

    def extend(self, owner: Owner) -> None:
        """Take over the parameters that were added. ``owner`` answers for what stands for their gradients."""
        layout, params, rank = self._sharded.layout, self._sharded.params, self._sharded.rank
        whose = self._sharded.whose()
        for index, param in params.items():
            if index not in self._stand_ins:
                self._stand_ins[index] = ShardedGradient(param, owner, index, layout.spec_of[index].label, whose)
                self.devices[index] = param.device
        for bucket in layout.buckets[len(self.buckets) :]:
            dtype = self._dtype or params[bucket.params[0]].dtype
            pieces = list(bucket.pieces(rank))
            device = params[bucket.params[0]].device
            my_range = bucket.shard_range(rank)
            self.buckets.append(BucketShard(bucket, pieces, *my_range, dtype, device, keeps_memory=self._keep_memory))

    def follow(self) -> None:
        """The parameters were moved to another device: have their gradients there."""
        params, buckets = self._sharded.params, self._sharded.layout.buckets
        pairs = zip(self.buckets, buckets, strict=True)
        self.buckets = [shard.on_device(bucket, params[bucket.params[0]].device) for shard, bucket in pairs]
        for index, param in params.items():
            before = self._stand_ins[index]
            is_exposed = param.grad is before
            self._stand_ins[index] = before.on_device(param.device)
            self.devices[index] = param.device
            if is_exposed:
                param.grad = self._stand_ins[index]

    # --- on the parameters ----------------------------------------------------------------------------------------

    def stand_in(self, index: int) -> ShardedGradient:
        """What stands for the sharded gradient as ``param.grad``."""
        return self._stand_ins[index]

    def fitting_stand_in(self, index: int) -> ShardedGradient:
        """The same, to be put on the parameter. One that came off while the model was elsewhere has stayed there."""
        param, stand_in = self._sharded.params[index], self._stand_ins[index]
        if stand_in.device != param.device:
            stand_in = self._stand_ins[index] = stand_in.on_device(param.device)
        return stand_in

    def index_of(self, stand_in: Tensor) -> int:
        return next(index for index, other in self._stand_ins.items() if other is stand_in)

    def is_exposed(self, index: int) -> bool:
        """Whether the parameter's gradient is the sharded one, or will be when DDP is done."""
        if self._deferred is not None and index in self._deferred:
            return True
        return self._sharded.params[index].grad is self._stand_ins[index]

    def _exposed(self, indices: Iterable[int]) -> list[int]:
        """Those of these parameters that are exposed. A pass in C: it runs in every step."""
        indices, params = list(indices), self._sharded.params
        on_params = map(_grad, map(params.__getitem__, indices))
        exposed = list(compress(indices, map(is_, on_params, map(self._stand_ins.__getitem__, indices))))
        return exposed if not self._deferred else [*exposed, *self._deferred.intersection(indices).difference(exposed)]

    def expose(self, index: int) -> None:
        """Make the parameter's gradient the sharded one: now, or when DDP is done with the gradients."""
        if self._deferred is not None:
            self._deferred.add(index)
            return
        param, stand_in = self._sharded.params[index], self.fitting_stand_in(index)
        if param.grad is not stand_in:
            stand_in.incoming = None  # of an earlier one, which somebody took off the parameter
            param.grad = stand_in

    @property
    def is_deferring(self) -> bool:
        """Whether DDP has the parameters' gradients now."""
        return self._deferred is not None

    def defer(self) -> None:
        """DDP has the parameters' gradients until ``expose_deferred``."""
        if self._deferred is None:
            self._deferred = set()

    def expose_deferred(self, among: Iterable[int]) -> None:
        """DDP is done with the gradients of the parameters ``among``: put on them what there is, and nothing else.

        What DDP leaves on a parameter that was not used here is of no use: we know ourselves if another rank has used
        it, or will when that has arrived.
        """
        deferred, self._deferred = self._deferred or set(), None
        for index in among:
            if index in deferred:
                self.expose(index)
            else:
                self._sharded.params[index].grad = None

    def displace(self, index: int, by: Tensor) -> None:
        """DDP is about to put ``by`` on the parameter instead of the sharded gradient."""
        self._displaced.append((index, by))

    def restore_displaced(self) -> None:
        """Put sharded gradients back where DDP has put something else."""
        displaced, self._displaced = self._displaced, []
        for index, by in displaced:
            if self._sharded.params[index].grad is by:
                self._sharded.params[index].grad = self._stand_ins[index]

    def hide(self) -> list[int]:
        """Take the sharded gradients off the parameters. Return whose were taken."""
        self.restore_displaced()
        exposed = self._exposed(self._stand_ins)
        for index in exposed:
            self._sharded.params[index].grad = None
        return exposed

    def clear(self, keep: Iterable[int] = ()) -> None:
        """Forget all gradients; those of ``keep`` become zeros and stay on the parameters."""
        self._deferred = None
        for state in self.buckets:
            state.holding, state.uncertain = state.holding.intersection(keep), set()
            if state.shard is not None:
                state.shard = torch.zeros_like(state.shard) if state.holding else None
            for index in state.holding:
                self.expose(index)
        for stand_in in self._stand_ins.values():
            stand_in.incoming, stand_in.copied = None, Copied.NOT

    def take_incoming(self) -> list[tuple[int, Tensor]]:
        """What autograd has added to the gradients since they were reduced, by parameter."""
        added = [(index, stand_in) for index, stand_in in self._stand_ins.items() if stand_in.incoming is not None]
        return [(index, incoming) for index, one in added if (incoming := one.take_incoming()) is not None]

    def make_certain(self, used: set[int]) -> list[int]:
        """The ranks have told which parameters any of them has used. Return those of which it was not known here."""
        found: list[int] = []
        for state in self.buckets:
            uncertain, state.uncertain = state.uncertain, set()
            found += sorted(uncertain & used)
            if uncertain - used:
                state.forget(uncertain - used)
                self._withdraw(uncertain - used)
        return found

    def _withdraw(self, indices: set[int]) -> None:
        """Nobody has used these parameters: take off what stood for their gradients until that was known."""
        for index in indices:
            if self._deferred is not None:
                self._deferred.discard(index)
            elif self._sharded.params[index].grad is self._stand_ins[index]:
                self._sharded.params[index].grad = None

    # --- the shards -----------------------------------------------------------------------------------------------

    def bind(self, position: int) -> None:
        """Give the tensors of this rank's pieces of one bucket their gradients."""
        state, pieces, params = self.buckets[position], self._sharded.pieces, self._sharded.params
        if state.shard is None or not state.pieces:
            return
        dtype = pieces.gradient_dtype(state.indices[0], state.shard.dtype)
        shard = state.shard if state.shard.dtype == dtype else state.shard.to(dtype)
        tensors = list(map(pieces.tensors.__getitem__, state.indices))
        gradients = list(map(Tensor.view, state.spans(shard), map(_shape, tensors)))
        present = state.holding.intersection(self._exposed(state.indices))
        self._bound += [
            index
            for index, tensor in zip(state.indices, tensors, strict=True)
            if tensor is params[index] and index in present
        ]
        if len(present) == len(state.indices):
            pieces.set_gradients(state.indices, gradients)
            return
        for index, gradient in zip(state.indices, gradients, strict=True):
            pieces.set_gradient(index, gradient if index in present else None)

    def release(self) -> None:
        """Undo ``bind``. A parameter that is its own piece gets back what stands for its gradient."""
        self._sharded.pieces.release_gradients()
        bound, self._bound = self._bound, []
        for index in bound:
            self._sharded.params[index].grad = self._stand_ins[index]

    def local(self, index: int) -> Tensor | None:
        """This rank's piece of a parameter's reduced gradient, 1D; None if it has none."""
        piece = self._sharded.pieces.pieces.get(index)
        return None if piece is None else self.buckets[piece.bucket].span(piece)

    def has(self, index: int) -> bool:
        """Whether there is a reduced gradient of this parameter, here or elsewhere."""
        bucket = self.buckets[self._sharded.layout.bucket_of[index]]
        return index in bucket.holding and self.is_exposed(index)

    def dtype_of(self, index: int) -> torch.dtype:
        return self.buckets[self._sharded.layout.bucket_of[index]].dtype

    def tensors(self, like: Tensor | None = None) -> list[Tensor]:
        """This rank's reduced gradients: a flat tensor per bucket that has some. What else is in them is zero.

        ``like``: of parameters of its device and dtype only.
        """
        found = []
        for state in self._remembered():
            param = self._sharded.params[state.bucket.params[0]]
            matches = like is None or (param.device, param.dtype) == (like.device, like.dtype)
            if matches and state.shard is not None and state.shard.numel():
                found.append(state.shard)
        return found

    def memory(self) -> list[Tensor]:
        """All memory of shards, also what is kept for the next ones."""
        return [*self.tensors(), *(state.kept for state in self.buckets if state.kept is not None)]

    def _remembered(self) -> list[BucketShard]:
        """The buckets, without gradients that were taken off their parameters by somebody else."""
        exposed = set(self._exposed(self._stand_ins))
        for state in self.buckets:
            hidden = state.holding - state.uncertain - exposed
            if hidden:
                state.forget(hidden)
        return self.buckets
