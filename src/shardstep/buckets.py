"""Parameters <-> flat buffers, on one rank. Torch, but no communication.

``Shard`` gives the local optimizer tensors to step. ``Exchange`` knows, for one bucket, which bytes every rank
contributes to its gather. ``BucketViews`` makes parameters views of one buffer per bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardstep import collectives
from shardstep.collectives import Group, Handle
from shardstep.layout import Bucket, Layout, Piece

# Between pairs of ranks a piece of at least this size is sent from where it lies; smaller ones are packed first.
DIRECT_BYTES = 64 * 1024


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

    def bind(self) -> None:
        """Point the tensors of cut parameters at the memory that the parameters have now."""
        for param, tensor, where in self._cut:
            if not param.is_contiguous():  # a range of elements must be a range of memory
                param.data = param.data.contiguous()
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

    Only pieces of active parameters take part. Made anew whenever the memory of a parameter or the set of
    active ones changes.
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
        self._dtype, self._device = params[bucket.params[0]].dtype, params[bucket.params[0]].device
        self._pairwise = collectives.sends_pairwise(group, self._device)
        self._in_place: Tensor | None = None  # gathered as it is: equal shards, nothing to pack
        self._direct: list[list[Tensor]] = [[] for _ in range(group.world_size)]  # by rank, bytes
        self._packed: list[list[Tensor]] = [[] for _ in range(group.world_size)]  # by rank, to and from staging
        self._written: list[Tensor] = []  # parameters that are received into without torch's noticing
        self._staging: Tensor | None = None
        self._arrived: list[tuple[Tensor, Tensor]] = []
        pieces = [
            [piece for piece in bucket.pieces(rank) if active[piece.param]] for rank in range(group.world_size)
        ]
        if not self._gathers_in_place(bucket, params, active, buffer):
            for rank, shard in enumerate(pieces):
                if buffer is not None:
                    self._direct[rank] = [_bytes(buffer[low:high]) for low, high in _runs(bucket, shard)]
                else:
                    self._place(rank, shard, params)
        if buffer is not None or self._in_place is not None or any(self._direct):
            self._written = [params[index] for index in bucket.params if active[index]]
        self._regions = self._measure_regions()
        self.empty = self._in_place is None and not any(self._direct) and not any(self._packed)

    def start(self) -> Handle:
        """Send my shard and receive the others. Follow with ``finish`` after waiting for the handle."""
        if self._in_place is not None:
            return collectives.gather_buffer(self._group, self._in_place)
        self._pack()
        if self._staging is None:
            return collectives.gather_shards(self._group, self._direct)
        if self._is_even():
            return collectives.gather_buffer(self._group, _bytes(self._staging))
        staged = [
            [_bytes(self._staging[low:high])] if low < high else [] for low, high in self._regions
        ]
        return collectives.gather_shards(
            self._group, [direct + packed for direct, packed in zip(self._direct, staged, strict=True)]
        )

    def finish(self) -> None:
        """Unpack what arrived in the staging buffer, and let the buffer go."""
        if self._arrived:
            targets, sources = zip(*self._arrived, strict=True)
            torch._foreach_copy_(targets, sources)
        if self._written:
            torch.autograd.graph.increment_version(self._written)
        self._staging, self._arrived = None, []

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

    def _place(self, rank: int, shard: Sequence[Piece], params: Mapping[int, Tensor]) -> None:
        for piece in shard:
            param = params[piece.param]
            if not param.is_contiguous():  # only whole pieces: cut parameters are contiguous
                self._packed[rank].append(param.detach())
                continue
            flat = _flat(param)[piece.start : piece.stop]
            if self._pairwise and flat.nbytes >= DIRECT_BYTES:
                self._direct[rank].append(_bytes(flat))
            else:
                self._packed[rank].append(flat)

    def _measure_regions(self) -> list[tuple[int, int]]:
        """Where each rank's packed pieces lie in the staging buffer. Equal regions where that wastes little."""
        sizes = [sum(tensor.numel() for tensor in tensors) for tensors in self._packed]
        largest = max(sizes)
        if not self._pairwise and sum(sizes) * 2 >= largest * len(sizes):
            return [(rank * largest, (rank + 1) * largest) for rank in range(len(sizes))]
        regions, end = [], 0
        for size in sizes:
            regions.append((end, end + size))
            end += size
        return regions

    def _is_even(self) -> bool:
        low, high = self._regions[0]
        return not self._pairwise and all(b - a == high - low for a, b in self._regions)

    def _pack(self) -> None:
        """Copy my small pieces into a new staging buffer and remember where the others will arrive."""
        if not any(self._packed):
            return
        self._staging = torch.empty(self._regions[-1][1], dtype=self._dtype, device=self._device)
        for rank, tensors in enumerate(self._packed):
            if not tensors:
                continue
            low = self._regions[rank][0]
            sizes = [tensor.numel() for tensor in tensors]
            views = self._staging[low : low + sum(sizes)].split(sizes)
            slots = [
                view if tensor.dim() == 1 else view.view(tensor.shape)
                for view, tensor in zip(views, tensors, strict=True)
            ]
            if rank == self._group.rank:
                torch._foreach_copy_(slots, tensors)
            else:
                self._arrived.extend(zip(tensors, slots, strict=True))


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
