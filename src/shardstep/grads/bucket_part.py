"""One part of a bucket of gradients, as it travels: which elements, in which order, and how they are packed.

A bucket travels as one part. A parameter that is larger than a bucket travels in several: part i has the i-th share of
every rank's shard, so that all ranks have something to add up in each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from shardstep.layout.shares import share
from shardstep.layout.specs import Bucket

Span = tuple[int, int]
_MOST_PADDING = 0.05


class Segment(NamedTuple):
    """A run of the part that comes from one parameter's gradient, or is padding."""

    place: int | None  # of the parameter in the bucket; None: zeros
    start: int  # in the flattened gradient
    stop: int
    whole: bool  # all of the gradient


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
        self._segments = list(_all_of(bucket) if count == 1 else _ranges_of(bucket, self.ranges))
        self._selected: dict[tuple[Span, ...], list[Segment]] = {}
        self._padded: dict[int, list[Segment]] = {}  # by the size of regions
        self._zeros: Tensor | None = None  # of which padding is made

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @cached_property  # asked several times per step
    def equal_share(self) -> int | None:
        """The size to which the shares of all ranks can be padded; None: they are too different."""
        if self.bucket.equal_shard is not None:
            return self.bucket.equal_shard
        sizes = [high - low for low, high in self.spans]
        padded = max(sizes) * len(sizes)
        return max(sizes) if padded <= sum(sizes) * (1 + _MOST_PADDING) else None

    def without(self, rank: int) -> tuple[Span, Span]:
        """The spans of the part that are for other ranks than this one."""
        low, high = self.spans[rank]
        return (0, low), (high, self.numel)

    def pack(self, gradients: Sequence[Tensor | None], target: Tensor, *spans: Span) -> Tensor:
        """Copy the bucket's gradients, in its order (None: zeros), as far as they are of these spans (none: all)."""
        return self._copy(gradients, target, self._segments_of(spans))

    def pack_evenly(self, gradients: Sequence[Tensor | None], target: Tensor) -> Tensor:
        """Copy the gradients to equal regions, one for each rank's share, with zeros behind what is shorter."""
        stride = target.numel() // len(self.spans)
        if stride not in self._padded:
            self._padded[stride] = [one for low, high in self.spans for one in self._region(low, high, stride)]
        return self._copy(gradients, target, self._padded[stride])

    def _region(self, low: int, high: int, stride: int) -> Iterator[Segment]:
        yield from _between(self._segments, low, high)
        if high - low < stride:
            yield Segment(None, 0, stride - high + low, False)

    def _copy(self, gradients: Sequence[Tensor | None], target: Tensor, segments: Sequence[Segment]) -> Tensor:
        if self._zeros is None or self._zeros.device != target.device:
            self._zeros = torch.zeros(1, dtype=self.dtype, device=target.device)
        with torch.no_grad():
            sources = [_source(gradients, segment, self._zeros) for segment in segments]
            if sources:
                torch.cat(sources, out=target)
        return target

    def _segments_of(self, spans: tuple[Span, ...]) -> list[Segment]:
        if not spans:
            return self._segments
        if spans not in self._selected:
            self._selected[spans] = [one for low, high in spans for one in _between(self._segments, low, high)]
        return self._selected[spans]


def parts_of(bucket: Bucket, world_size: int, most_bytes: float, dtype: torch.dtype) -> list[BucketPart]:
    """The parts in which a bucket travels, each of about ``most_bytes`` at the most."""
    count = max(1, ceil(bucket.numel * dtype.itemsize / most_bytes)) if len(bucket.params) == 1 else 1
    return [BucketPart(bucket, world_size, number, count, dtype) for number in range(count)]


def _source(gradients: Sequence[Tensor | None], segment: Segment, zeros: Tensor) -> Tensor:
    gradient = None if segment.place is None else gradients[segment.place]
    if gradient is None:
        return zeros.expand(segment.stop - segment.start)
    flat = gradient.reshape(-1)
    return flat if segment.whole else flat[segment.start : segment.stop]


def _within(start: int, bounds: Span) -> Span:
    return start + bounds[0], start + bounds[1]


def _all_of(bucket: Bucket) -> Iterator[Segment]:
    """Every parameter and the padding behind it, which is zero so that it counts in no norm."""
    ends = [*bucket.offsets[1:], bucket.numel]
    for place, (offset, numel, end) in enumerate(zip(bucket.offsets, bucket.numels, ends, strict=True)):
        yield Segment(place, 0, numel, True)
        if end > offset + numel:
            yield Segment(None, 0, end - offset - numel, False)


def _ranges_of(bucket: Bucket, ranges: Sequence[Span]) -> Iterator[Segment]:
    """These ranges of a bucket that is one large parameter."""
    (numel,) = bucket.numels
    for low, high in ranges:
        inside = max(min(high, numel), low)
        yield Segment(0, low, inside, False)
        if high > inside:
            yield Segment(None, 0, high - inside, False)


def _between(segments: Sequence[Segment], low: int, high: int) -> Iterator[Segment]:
    """What of the segments is from element ``low`` to ``high`` of what they are together."""
    begin = 0
    for place, start, stop, whole in segments:
        end = begin + stop - start
        first, last = max(low, begin), min(high, end)
        if first < last:
            cut = (first, last) != (begin, end)
            yield Segment(place, start + first - begin, start + last - begin, whole and not cut)
        begin = end
