"""Parameters <-> flat buffers, on one rank. Torch, but no communication.

``Shard`` gives the local optimizer tensors to step. ``Exchange`` knows, for one bucket, which bytes every rank
contributes to its gather. ``BucketViews`` makes parameters views of one buffer per bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from shardstep import collectives
from shardstep.collectives import Group, Handle
from shardstep.layout import Bucket, Layout, Piece

# Between pairs of ranks a piece of at least this size is sent from where it lies; smaller ones are packed first.
DIRECT_BYTES = 64 * 1024
# A staging buffer of at most this size is kept from step to step: making thousands of small views anew costs more
# than the copies themselves.
KEPT_BYTES = 4 * 1024 * 1024


class Shard:
    """This rank's pieces as tensors.

    A piece that covers its parameter *is* the parameter. A piece of a cut parameter is a tensor of its own
    over the same memory, with a slice of the gradient.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.pieces: dict[int, Piece] = {}  # parameter index -> my piece of it (a rank has one at the most)
        self.tensors: dict[int, Tensor] = {}
        self._cut: list[tuple[Tensor, Tensor, slice]] = []  # parameter, tensor of my piece, range

    def extend(self, layout: Layout, params: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Take over what a longer layout adds. Return the new tensors by parameter index, ascending."""
        pieces = {piece.param: piece for piece in layout.pieces(self._rank)}
        added = {}
        for index in sorted(pieces.keys() - self.pieces.keys()):
            piece, param = pieces[index], params[index]
            if piece.whole:
                added[index] = param
            else:
                where = slice(piece.start, piece.stop)
                added[index] = torch.nn.Parameter(_flat(param)[where], requires_grad=param.requires_grad)
                self._cut.append((param, added[index], where))
            self.pieces[index] = piece
        self.tensors.update(added)
        return added

    def forget(self, indices: Sequence[int]) -> None:
        """Undo ``extend``."""
        for index in indices:
            self.pieces.pop(index, None)
            tensor = self.tensors.pop(index, None)
            self._cut = [cut for cut in self._cut if cut[1] is not tensor]

    @property
    def cut_params(self) -> list[Tensor]:
        """The parameters of which this rank has a part."""
        return [param for param, _, _ in self._cut]

    def bind(self) -> None:
        """Point the tensors of cut parameters at the memory that the parameters have now."""
        for param, tensor, where in self._cut:
            tensor.data = _flat(param)[where]

    def bind_gradients(self) -> None:
        """Give the tensors of cut parameters their slice of the gradient."""
        for param, tensor, where in self._cut:
            gradient = param.grad
            if gradient is None:
                tensor.grad = None
                continue
            if gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"step expects dense gradients but got {gradient.layout} for a parameter of shape "
                    f"{tuple(param.shape)}. Make the gradient dense (for an embedding: sparse=False)."
                )
            tensor.grad = gradient.detach().reshape(-1)[where]

    def release_gradients(self) -> None:
        """Let go of the gradients, so that ``zero_grad`` frees them."""
        for _, tensor, _ in self._cut:
            tensor.grad = None


class BucketViews:
    """One flat buffer per bucket, with every parameter a view of its range of it."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self._views: dict[int, Tensor] = {}

    def extend(self, layout: Layout, params: Mapping[int, Tensor]) -> None:
        """Make buffers for the buckets that a longer layout adds, and move their parameters into them."""
        for bucket in layout.buckets[len(self.buffers) :]:
            like = params[bucket.params[0]]
            numel = max(bucket.numel, (bucket.equal_shard or 0) * layout.world_size)
            buffer = torch.zeros(numel, dtype=like.dtype, device=like.device)
            self.buffers.append(buffer)
            for index, offset, size in zip(bucket.params, bucket.offsets, bucket.numels, strict=True):
                self._views[index] = buffer[offset : offset + size].view(params[index].shape)
        self.bind(params)

    def bind(self, params: Mapping[int, Tensor]) -> None:
        """Make every parameter that is no view of its buffer one again, with the value that it has."""
        for index, view in self._views.items():
            param = params[index]
            if param.data_ptr() != view.data_ptr() or param.stride() != view.stride():
                view.copy_(param.data)
                param.data = view


class Exchange:
    """The gather of one bucket: pack what is small, send the rest from where it lies, unpack what arrived.

    Only pieces of active parameters take part. Made anew whenever the set of active parameters changes, or the memory
    of one of those that are ``addressed``.
    """

    def __init__(
        self,
        bucket: Bucket,
        params: Mapping[int, Tensor],
        active: Mapping[int, bool],
        group: Group,
        buffer: Tensor | None,
    ) -> None:
        self._group = group
        self._like = params[bucket.params[0]]
        self._pairwise = collectives.sends_pairwise(group, self._like.device)
        self._in_place: Tensor | None = None  # gathered as it is: equal shards, nothing to pack
        self._direct: list[list[Tensor]] = [[] for _ in range(group.world_size)]  # by rank, bytes
        packed: list[list[Piece]] = [[] for _ in range(group.world_size)]  # by rank
        if not self._gathers_in_place(bucket, params, active, buffer):
            for rank in range(group.world_size):
                shard = [piece for piece in bucket.pieces(rank) if active[piece.param]]
                if buffer is not None:
                    self._direct[rank] = [_bytes(buffer[low:high]) for low, high in _runs(bucket, shard)]
                else:
                    self._direct[rank], packed[rank] = self._sort_by_size(shard, params)
        # Received into without torch's noticing: whoever still holds a graph over them has to be told.
        by_hand = self._in_place is not None or any(self._direct)
        self._written = [params[index] for index in bucket.params if active[index]] if by_hand else []
        self._staging = _Staging(packed, params, group.rank, even=not self._pairwise) if any(packed) else None
        self.addressed = self._written + (self._staging.addressed if self._staging is not None else [])
        self.empty = not by_hand and self._staging is None

    def start(self) -> Handle:
        """Send my shard and receive the others. Follow with ``finish`` after waiting for the handle."""
        if self._in_place is not None:
            return collectives.gather_buffer(self._group, self._in_place)
        if self._staging is None:
            return collectives.gather_shards(self._group, self._direct)
        staged = self._staging.pack(self._like)
        if self._staging.even:
            return collectives.gather_buffer(self._group, _bytes(staged))
        regions = [[_bytes(staged[low:high])] if low < high else [] for low, high in self._staging.regions]
        return collectives.gather_shards(self._group, list(map(list.__add__, self._direct, regions)))

    def finish(self) -> None:
        """Put what arrived where it belongs."""
        if self._staging is not None:
            self._staging.unpack()
        if self._written:
            torch.autograd.graph.increment_version(self._written)

    def _gathers_in_place(
        self, bucket: Bucket, params: Mapping[int, Tensor], active: Mapping[int, bool], buffer: Tensor | None
    ) -> bool:
        """Whether the backend can gather the memory of the bucket, or of its only parameter, as it is."""
        shard = bucket.equal_shard
        if self._pairwise or shard is None or not all(active[index] for index in bucket.params):
            return False
        if buffer is not None:
            self._in_place = _bytes(buffer)
        elif len(bucket.params) == 1 and shard * self._group.world_size == bucket.numel:
            param = params[bucket.params[0]]
            self._in_place = _bytes(_flat(param)) if param.is_contiguous() else None
        return self._in_place is not None

    def _sort_by_size(self, shard: Sequence[Piece], params: Mapping[int, Tensor]) -> tuple[list[Tensor], list[Piece]]:
        """What of a shard is sent from where it lies, as bytes, and what is packed first."""
        direct, packed = [], []
        for piece in shard:
            param = params[piece.param]
            nbytes = piece.numel * param.element_size()
            if self._pairwise and nbytes >= DIRECT_BYTES and param.is_contiguous():
                direct.append(_bytes(_flat(param)[piece.start : piece.stop]))
            else:
                packed.append(piece)
        return direct, packed


class _Staging:
    """A buffer into which the small pieces of a bucket are packed, rank by rank.

    Packing and unpacking are one call each: no Python work per piece. A small buffer is kept from step to step.
    """

    def __init__(self, packed: Sequence[Sequence[Piece]], params: Mapping[int, Tensor], rank: int, even: bool) -> None:
        sizes = [sum(piece.numel for piece in pieces) for pieces in packed]
        # Equal regions (for a native all-gather) where they waste at most half of the buffer.
        self.even = even and sum(sizes) * 2 >= max(sizes) * len(sizes)
        lengths = [max(sizes)] * len(sizes) if self.even else sizes
        ends = list(accumulate(lengths))
        self.regions = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        self._mine_sizes, self._rank = sizes[rank], rank
        theirs = [piece for owner, pieces in enumerate(packed) if owner != rank for piece in pieces]
        # A whole parameter is copied to as itself, whatever memory it has; only ranges of one depend on its address.
        self._targets = [
            params[piece.param] if piece.whole else _flat(params[piece.param])[piece.start : piece.stop]
            for piece in theirs
        ]
        mine = [params[piece.param] for piece in packed[rank]]
        self._contiguous = all(param.is_contiguous() for param in mine)
        self._sources = [
            _flat(param)[piece.start : piece.stop] if self._contiguous or not piece.whole else param.detach()
            for param, piece in zip(mine, packed[rank], strict=True)
        ]
        self.addressed = mine + [params[piece.param] for piece in theirs if not piece.whole]
        self._buffer: Tensor | None = None
        self._slots: list[Tensor] = []  # where the targets' values arrive
        self._packed = packed

    def pack(self, like: Tensor) -> Tensor:
        """Copy this rank's pieces into the buffer and return it."""
        if self._buffer is None:
            self._allocate(like)
        buffer = self._buffer
        assert buffer is not None
        low = self.regions[self._rank][0]
        region = buffer[low : low + self._mine_sizes]
        if self._sources and self._contiguous:
            torch.cat(self._sources, out=region)  # several times faster than a foreach copy on the CPU
        elif self._sources:
            slots = region.split([source.numel() for source in self._sources])
            torch._foreach_copy_([s.view(t.shape) for s, t in zip(slots, self._sources, strict=True)], self._sources)
        return buffer

    def unpack(self) -> None:
        """Copy what arrived to the parameters of the other ranks."""
        if self._targets:
            with torch.no_grad():
                torch._foreach_copy_(self._targets, self._slots)
        if self._buffer is not None and self._buffer.nbytes > KEPT_BYTES:
            self._buffer, self._slots = None, []

    def _allocate(self, like: Tensor) -> None:
        self._buffer = torch.empty(self.regions[-1][1], dtype=like.dtype, device=like.device)
        slots: list[Tensor] = []
        for owner, pieces in enumerate(self._packed):
            if owner != self._rank and pieces:
                sizes = [piece.numel for piece in pieces]
                low = self.regions[owner][0]
                slots += self._buffer[low : low + sum(sizes)].split(sizes)
        self._slots = [slot.view(target.shape) for slot, target in zip(slots, self._targets, strict=True)]


def _runs(bucket: Bucket, shard: Sequence[Piece]) -> list[tuple[int, int]]:
    """The fewest ranges of the buffer that hold these pieces and no other parameter."""
    position = {index: place for place, index in enumerate(bucket.params)}
    runs: list[tuple[int, int]] = []
    previous = None
    for piece in shard:
        place = position[piece.param]
        if previous is not None and place == previous + 1:
            runs[-1] = runs[-1][0], piece.offset + piece.numel
        else:
            runs.append((piece.offset, piece.offset + piece.numel))
        previous = place
    return [run for run in runs if run[0] < run[1]]


def _flat(param: Tensor) -> Tensor:
    """The elements of a contiguous parameter, 1D, over the same memory and version counter."""
    return param.detach().view(-1)


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)
