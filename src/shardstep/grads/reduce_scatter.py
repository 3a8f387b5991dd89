"""The reduce-scatter of one bucket of gradients: pack, give every rank its shard, sum in rank order.

[Note: the order of a sum]
On the CPU every rank gets the others' parts of its shard and adds them up itself: rank 0's, then rank 1's, and so on,
then one division. An element's sum so depends on nothing but its summands: not on the size of buckets, not on when the
bucket was sent. Half precision is summed in float32 and rounded once. Native reduce-scatters promise no such order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.comm.collectives import Handle
from shardstep.comm.process_group import Group
from shardstep.layout.specs import Bucket

_HALF = (torch.float16, torch.bfloat16)


class ReduceScatter(NamedTuple):
    """A bucket of gradients under way."""

    headers: Handle  # what every rank says about its part; nothing on other backends than gloo
    packed: Tensor  # my part: the whole bucket
    data: Handle
    parts: list[Tensor]  # everybody's part of my shard, by rank; on other backends: the sum


class BucketReduceScatter:
    """How one bucket is reduced. Stateless: all that is under way is in what ``start`` returns."""

    def __init__(
        self,
        bucket: Bucket,
        params: Mapping[int, Tensor],
        group: Group,
        dtype: torch.dtype | None,
        reporting: Group | None = None,
    ) -> None:
        """``reporting``: the ranks that report to each other about the bucket, if not those of ``group``."""
        self._group = group
        self._reporting = reporting or group
        self._bucket = bucket
        like = params[bucket.params[0]]
        self.device = like.device
        self.dtype = dtype if dtype is not None else like.dtype  # in which gradients travel, and of the shard
        self._sum_dtype = torch.float32 if self.dtype in _HALF else self.dtype
        self.reports = collectives.sends_pairwise(group, like.device)  # whether headers go along
        self.ranges = [bucket.shard_range(rank) for rank in range(group.world_size)]
        self._part_bytes = bucket.numel * self.dtype.itemsize
        self._slot_bytes = slot_bytes(bucket.numel, self.dtype, group)
        self._gaps = _gaps(bucket)
        self._zeros = torch.zeros(max([1, *self._gaps]), dtype=self.dtype, device=like.device)

    @property
    def mine(self) -> tuple[int, int]:
        """The range of the bucket that this rank owns."""
        return self.ranges[self._group.rank]

    def start(
        self, source: Sequence[Tensor | None] | ReduceScatter, header: Tensor, slot: Tensor | None, tag: int
    ) -> ReduceScatter:
        """Pack the bucket's gradients, in its order (None: zeros), send everybody their part, and tell about it.

        ``source`` may be one that was not met: then it is reported once more. ``slot``: shared memory to pack
        into, if there is any. ``tag``: the same for scatters that are to meet.
        """
        if not self.reports:
            return self._start_native([] if isinstance(source, ReduceScatter) else source)
        if slot is not None and self._slot_bytes <= slot.numel():
            parts = self._parts(slot)
            mine = parts[self._group.rank]
            if isinstance(source, ReduceScatter):
                mine.copy_(source.packed)
            else:
                self._pack(source, mine)
            low, high = self.mine
            return ReduceScatter(self._report(header), mine, Handle(()), [part[low:high] for part in parts])
        if isinstance(source, ReduceScatter):
            return source._replace(headers=self._report(header))
        packed = self._pack(source, self._empty(self._bucket.numel))
        low, high = self.mine
        incoming = [
            packed[low:high] if rank == self._group.rank else self._empty(high - low)
            for rank in range(self._group.world_size)
        ]
        outgoing = [packed[start:stop].view(torch.uint8) for start, stop in self.ranges]
        data = collectives.swap_shards(self._group, outgoing, [part.view(torch.uint8) for part in incoming], tag)
        return ReduceScatter(self._report(header), packed, data, incoming)

    def finish(self, scatter: ReduceScatter, divisor: int) -> Tensor:
        """The mean of everybody's part of my shard, as a new tensor. The data has been waited for."""
        total = self.total(scatter)
        if divisor != 1:
            total.div_(divisor)
        return total.to(self.dtype)

    def total(self, scatter: ReduceScatter) -> Tensor:
        """The sum of everybody's part of my shard, as a new tensor. Of half precision in float32."""
        return _sum(scatter.parts, self._sum_dtype)

    def _empty(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self.dtype, device=self.device)

    def _report(self, header: Tensor) -> Handle:
        return collectives.share_headers(self._reporting, header)

    def _start_native(self, gradients: Sequence[Tensor | None]) -> ReduceScatter:
        shard = self._bucket.equal_shard
        numel = self._bucket.numel if shard is None else shard * self._group.world_size
        buffer = self._empty(numel)
        self._pack(gradients, buffer[: self._bucket.numel])
        buffer[self._bucket.numel :].zero_()
        bounds = self.ranges if shard is None else [(r * shard, (r + 1) * shard) for r in range(len(self.ranges))]
        shards = [buffer[low:high] for low, high in bounds]
        total = torch.empty_like(shards[self._group.rank])
        handle = collectives.reduce_shards(self._group, buffer, shards, total)
        return ReduceScatter(Handle(()), buffer, handle, [total[: self.mine[1] - self.mine[0]]])

    def _pack(self, gradients: Sequence[Tensor | None], target: Tensor) -> Tensor:
        sources = []
        for gradient, numel, gap in zip(gradients, self._bucket.numels, self._gaps, strict=True):
            sources.append(self._zeros[:1].expand(numel) if gradient is None else gradient.detach().reshape(-1))
            if gap:  # padding is zero, so that it counts in no norm
                sources.append(self._zeros[:gap])
        with torch.no_grad():
            torch.cat(sources, out=target)
        return target

    def _parts(self, slot: Tensor) -> list[Tensor]:
        """A slot has room for everybody's whole bucket, side by side."""
        size = slot.numel() // self._group.world_size // 64 * 64
        starts = (rank * size for rank in range(self._group.world_size))
        return [slot[start : start + self._part_bytes].view(self.dtype) for start in starts]


def slot_bytes(numel: int, dtype: torch.dtype, group: Group) -> int:
    """The size of a slot for a bucket: a part for every rank, each on a boundary of 64 bytes."""
    return -(-numel * dtype.itemsize // 64) * 64 * group.world_size


def _sum(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """See the note above. Only additions of two: fused forms round differently at the end of a vector."""
    if len(parts) == 1:
        return parts[0].to(dtype, copy=True)
    first, second, *others = parts
    if first.dtype == dtype:
        total = torch.add(first, second)
    else:
        total = first.to(dtype).add_(second)
    for part in others:
        total.add_(part)
    return total


def _gaps(bucket: Bucket) -> list[int]:
    """The padding behind each parameter of a bucket."""
    ends = [*bucket.offsets[1:], bucket.numel]
    starts = zip(bucket.offsets, bucket.numels, strict=True)
    return [end - offset - numel for end, (offset, numel) in zip(ends, starts, strict=True)]
