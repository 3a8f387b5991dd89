"""What a rank keeps of the gradients when they are sharded, and what can be done with it.

``rounds.py`` fills the shards during backward, the optimizer steps with them. A ``ShardedGradient`` on each parameter
stands for them: whoever sets ``param.grad`` to None has forgotten the gradient, here too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.comm.collectives import Group
from shardstep.comm.reads import Reads
from shardstep.grads.norms import norm_over_ranks
from shardstep.grads.sharded_gradient import ShardedGradient
from shardstep.layout.specs import Bucket, Piece
from shardstep.params.sharded_parameters import Placement


@dataclass
class BucketGradients:
    """The reduced gradients of one bucket, as far as this rank owns it."""

    bucket: Bucket
    pieces: list[Piece]  # mine
    start: int  # where my range of the bucket starts
    dtype: torch.dtype  # in which gradients travel and are kept
    shard: Tensor | None = None  # my range of the bucket
    holding: set[int] = field(default_factory=set)  # the parameters of the bucket that have a reduced gradient

    def add(self, total: Tensor, present: set[int], kept: set[int]) -> None:
        """A reduced bucket arrived: add it to the gradients of ``kept``, and put it in place of all others."""
        if self.shard is None or not kept:
            self.shard = total
        else:
            for piece in self.pieces:
                if piece.param not in kept:
                    self._span(self.shard, piece).zero_()
            self.shard.add_(total)
        self.holding = kept | present

    def forget(self, indices: set[int]) -> None:
        """These parameters have no gradient any more."""
        self.holding = self.holding - indices
        if not self.holding or self.shard is None:
            self.shard = None
            return
        for piece in self.pieces:
            if piece.param in indices:
                self._span(self.shard, piece).zero_()

    def span(self, piece: Piece) -> Tensor | None:
        """The gradient of one of this rank's pieces; None if there is none."""
        return None if self.shard is None or piece.param not in self.holding else self._span(self.shard, piece)

    def _span(self, shard: Tensor, piece: Piece) -> Tensor:
        return shard[piece.offset - self.start : piece.offset - self.start + piece.numel]


class GradientShards:
    """This rank's shards of the reduced gradients of one optimizer.

    ``bring_in`` is called before they are used: it ends the reductions that are under way (collective).
    """

    def __init__(
        self, placement: Placement, group: Group, side: Group, reads: Reads, dtype: torch.dtype | None
    ) -> None:
        self.placement = placement
        self.group = group
        self.reads = reads
        self.side = side  # reductions have a process group of their own, see docs/design.md
        self.buckets: list[BucketGradients] = []
        self.bring_in: Callable[[], None] = lambda: None
        self.announce_unscaling: Callable[[float, int], None] | None = None  # in a Join context: ranks that joined
        self._dtype = dtype
        self._stand_ins: dict[int, ShardedGradient] = {}

    def extend(self) -> None:
        """Take over what the placement has added."""
        layout, params, rank = self.placement.layout, self.placement.params, self.group.rank
        for index, param in params.items():
            if index not in self._stand_ins:
                label = layout.spec_of[index].label
                self._stand_ins[index] = ShardedGradient(param, weakref.proxy(self), index, label)
        for bucket in layout.buckets[len(self.buckets) :]:
            dtype = self._dtype or params[bucket.params[0]].dtype
            pieces = list(bucket.pieces(rank))
            self.buckets.append(BucketGradients(bucket, pieces, bucket.shard_range(rank)[0], dtype))

    # --- on the parameters ----------------------------------------------------------------------------------------

    def stand_in(self, index: int) -> ShardedGradient:
        """What stands for the sharded gradient as ``param.grad``."""
        return self._stand_ins[index]

    def is_exposed(self, index: int) -> bool:
        """Whether the parameter's gradient is the sharded one."""
        return self.placement.params[index].grad is self._stand_ins[index]

    def expose(self, index: int) -> None:
        """Make the parameter's gradient the sharded one."""
        self.placement.params[index].grad = self._stand_ins[index]

    def hide(self) -> list[int]:
        """Take the sharded gradients off the parameters. Return whose were taken."""
        exposed = [index for index in self._stand_ins if self.is_exposed(index)]
        for index in exposed:
            self.placement.params[index].grad = None
        return exposed

    def clear(self, keep: Iterable[int] = ()) -> None:
        """Forget all gradients; those of ``keep`` become zeros and stay on the parameters."""
        for state in self.buckets:
            state.holding = state.holding.intersection(keep)
            if state.shard is not None:
                state.shard = torch.zeros_like(state.shard) if state.holding else None
            for index in state.holding:
                self.expose(index)
        for stand_in in self._stand_ins.values():
            stand_in.incoming = None

    # --- for the optimizer ----------------------------------------------------------------------------------------

    def bind_gradients(self) -> None:
        """Give the tensors of this rank's pieces their reduced gradients. Collective."""
        self.bring_in()
        tensors = self.placement.shard.tensors
        for state in self.buckets:
            if state.shard is None or not state.pieces:
                continue
            dtype = tensors[state.pieces[0].param].dtype
            shard = state.shard if state.shard.dtype == dtype else state.shard.to(dtype)
            start, holding = state.start, state.holding
            for piece in state.pieces:
                tensor = tensors[piece.param]
                if piece.param in holding and self.is_exposed(piece.param):
                    low = piece.offset - start
                    tensor.grad = shard[low : low + piece.numel].view(tensor.shape)
                else:
                    tensor.grad = None

    def shards(self) -> list[Tensor]:
        """This rank's reduced gradients: a flat tensor per bucket that has some. What else is in them is zero."""
        return [state.shard for state in self._remembered() if state.shard is not None and state.shard.numel()]

    def _remembered(self) -> list[BucketGradients]:
        """The buckets, without the gradients that were taken off their parameters by somebody else."""
        for state in self.buckets:
            hidden = {index for index in state.holding if not self.is_exposed(index)}
            if hidden:
                state.forget(hidden)
        return self.buckets

    def full(self, index: int) -> Tensor | None:
        """Collective. The whole gradient of a parameter, on every rank; None if it has none."""
        self.bring_in()
        layout, param = self.placement.layout, self.placement.params[index]
        state = self.buckets[layout.bucket_of[index]]
        if index not in state.holding or not self.is_exposed(index):
            return None
        whole = torch.empty(param.numel(), dtype=state.dtype, device=param.device)
        local = self.local(index)
        for rank, piece in layout.pieces_of(index):
            span = whole[piece.start : piece.stop]
            if rank == self.group.rank and local is not None:
                span.copy_(local)
            collectives.move(self.group, span.view(torch.uint8), rank, None)
        return whole.view(param.shape)

    # --- for ShardedGradient --------------------------------------------------------------------------------------

    def complete(self) -> None:
        self.bring_in()

    def local(self, index: int) -> Tensor | None:
        piece = self.placement.shard.pieces.get(index)
        return None if piece is None else self.buckets[piece.bucket].span(piece)

    def norm_of(self, index: int, order: float, dtype: torch.dtype) -> Tensor:
        if self.announce_unscaling is not None:
            raise RuntimeError(
                "in a Join context the norm of a sharded gradient cannot be had: a rank that has joined is not asked. "
                "Use optimizer.clip_grad_norm_ to clip."
            )
        local = self.local(index)
        pieces = [] if local is None else [local]
        wide = torch.float64 if dtype.to_real() == torch.float64 else torch.float32
        what = f"the norm of the gradient of {self.placement.layout.spec_of[index].label}"
        return norm_over_ranks(self.reads, what, pieces, order, self._stand_ins[index].device, wide).to(dtype)

    def unscale(self, like: Tensor, found_inf: Tensor, inverse_scale: Tensor) -> None:
        if self.announce_unscaling is not None:
            first = next(index for index, stand_in in self._stand_ins.items() if stand_in is like)
            self.announce_unscaling(float(inverse_scale), first)
        self.unscale_like(like, found_inf, inverse_scale)

    def unscale_like(self, like: Tensor, found_inf: Tensor, inverse_scale: Tensor) -> None:
        """Collective. See ``unscale``."""
        # All shards of this kind, not only those asked for: a rank may not have known of gradients that others had.
        shards = []
        for state in self._remembered():
            param = self.placement.params[state.bucket.params[0]]
            if (param.device, param.dtype) == (like.device, like.dtype) and state.shard is not None:
                shards.append(state.shard)
        if shards:
            torch._amp_foreach_non_finite_check_and_unscale_(shards, found_inf, inverse_scale)
        found = self.reads.gather("unscaling the gradients (GradScaler)", found_inf.view(()))
        found_inf.copy_(found.amax().view_as(found_inf))
