"""One part of a bucket of gradients, as it travels: which elements, in which order, and how they are packed.

A bucket travels as one part. A parameter that is larger than a bucket travels in several: part i has the i-th share of
every rank's shard, so that all ranks have something to add up in each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import ceil

import torch
from torch import Tensor

from shardstep.layout.shares import share
from shardstep.layout.specs import Bucket


class BucketPart:
    """Ranges of one bucket, by rank: in the bucket, and in the buffer in which the part travels."""

    def __init__(self, bucket: Bucket, world_size: int, number: int, count: int, dtype: torch.dtype) -> None:
        """Part ``number`` of ``count``. ``dtype``: in which gradients travel."""
        self.bucket = bucket
        self.number = number
        self.is_last = number == count - 1
        self.dtype = dtype
        shards = [bucket.shard_range(rank) for rank in range(world_size)]
        self.ranges = [_within(low, share(high - low, count, number)) for low, high in shards]  # in the bucket
        if count == 1:
            self.spans, self.numel = self.ranges, bucket.numel
        else:
            ends = list(accumulate(high - low for low, high in self.ranges))
            self.spans = [(end - high + low, end) for end, (low, high) in zip(ends, self.ranges, strict=True)]
            self.numel = ends[-1]
        self._whole = count == 1
        self._gaps = _gaps(bucket)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def pack(self, gradients: Sequence[Tensor | None], target: Tensor) -> Tensor:
        """Copy the bucket's gradients, in its order (None: zeros), as far as they are of this part."""
        zeros = torch.zeros(1, dtype=self.dtype, device=target.device)
        with torch.no_grad():
            torch.cat(self._all(gradients, zeros) if self._whole else self._some(gradients[0], zeros), out=target)
        return target

    def _all(self, gradients: Sequence[Tensor | None], zeros: Tensor) -> list[Tensor]:
        sources = []
        for gradient, numel, gap in zip(gradients, self.bucket.numels, self._gaps, strict=True):
            sources.append(zeros.expand(numel) if gradient is None else gradient.detach().reshape(-1))
            if gap:  # padding is zero, so that it counts in no norm
                sources.append(zeros.expand(gap))
        return sources

    def _some(self, gradient: Tensor | None, zeros: Tensor) -> list[Tensor]:
        """Of a bucket that is one large parameter."""
        if gradient is None:
            return [zeros.expand(self.numel)]
        flat = gradient.detach().reshape(-1)
        sources = []
        for low, high in self.ranges:
            inside = flat[low:high]
            sources += [inside, zeros.expand(high - low - inside.numel())]
        return sources


def parts_of(bucket: Bucket, world_size: int, most_bytes: float, dtype: torch.dtype) -> list[BucketPart]:
    """The parts in which a bucket travels, each of about ``most_bytes`` at the most."""
    count = max(1, ceil(bucket.numel * dtype.itemsize / most_bytes)) if len(bucket.params) == 1 else 1
    return [BucketPart(bucket, world_size, number, count, dtype) for number in range(count)]


def _within(start: int, bounds: tuple[int, int]) -> tuple[int, int]:
    return start + bounds[0], start + bounds[1]


def _gaps(bucket: Bucket) -> list[int]:
    """The padding behind each parameter of a bucket."""
    ends = [*bucket.offsets[1:], bucket.numel]
    starts = zip(bucket.offsets, bucket.numels, strict=True)
    return [end - offset - numel for end, (offset, numel) in zip(ends, starts, strict=True)]
