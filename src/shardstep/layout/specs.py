"""Which piece of which parameter lies where, in which bucket, owned by which rank.

Plain immutable data: no torch, no communication. Every rank computes the same layout from the same
parameter specs (see ``partition.py``), so a world of 1024 ranks is tested by calling a function.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple


class ParamSpec(NamedTuple):
    """What the layout needs to know about one parameter; the same on every rank."""

    index: int  # position over all groups, as in a state dict
    shape: tuple[int, ...]
    numel: int
    dtype: str
    itemsize: int
    device: str  # type and order of appearance ("cuda#0"), because the number differs between ranks
    trainable: bool = True
    granularity: str = "element"  # "element": may be cut anywhere; "tensor": stays whole
    group: int = 0
    name: str | None = None
    master: str = "none"  # what is kept beside it, see params/master_modes.py

    @property
    def label(self) -> str:
        """How messages call the parameter."""
        return f"parameter {self.index}" + (f" ({self.name!r})" if self.name is not None else "")


class Piece(NamedTuple):
    """A contiguous range of one parameter's flattened elements, owned by one rank.

    Attributes:
        param: the parameter's position over all groups, as in a state dict.
        start: the first element, counted in the flattened parameter.
        stop: the element after the last.
        bucket: the position of its bucket in ``Layout.buckets``.
        offset: where it starts in the bucket, in elements.
        whole: whether it covers its parameter.
        numel: how many elements it has.
    """

    param: int  # index of the parameter
    start: int  # range in the flattened parameter
    stop: int
    bucket: int
    offset: int  # where the range starts in the bucket
    whole: bool  # covers its parameter

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Bucket(NamedTuple):
    """A contiguous buffer of one device and dtype, cut into one shard per rank.

    Exactly one of ``owners`` and ``cuts`` is set. Padding (between parameters, after the last one)
    exists here and nowhere else.
    """

    position: int  # in the layout
    device: str
    dtype: str
    itemsize: int
    params: tuple[int, ...]  # indices, in the order in which they lie in the buffer
    offsets: tuple[int, ...]  # where each starts, ascending
    numels: tuple[int, ...]
    numel: int  # elements from the first to the last, padding between parameters included
    owners: tuple[int, ...] | None = None  # "tensor": the owner of each parameter, ascending
    cuts: Sequence[int] | None = None  # "element": world_size + 1 bounds; the last may exceed numel

    def shard_range(self, rank: int) -> tuple[int, int]:
        """The range of the buffer that ``rank`` owns."""
        if self.cuts is not None:
            return min(self.cuts[rank], self.numel), min(self.cuts[rank + 1], self.numel)
        first, last = self._owned(rank)
        if first == last:
            return 0, 0
        return self.offsets[first], self.offsets[last - 1] + self.numels[last - 1]

    @property
    def equal_shard(self) -> int | None:
        """Elements per shard if all shards are equal once the end is padded, else None."""
        return self.cuts.step if isinstance(self.cuts, range) else None

    def pieces(self, rank: int) -> Iterator[Piece]:
        """The pieces of ``rank``, in buffer order."""
        if self.cuts is None:
            for i in range(*self._owned(rank)):
                yield Piece(self.params[i], 0, self.numels[i], self.position, self.offsets[i], True)
            return
        start, stop = self.shard_range(rank)
        for i in range(max(bisect_right(self.offsets, start) - 1, 0), len(self.params)):
            offset, numel = self.offsets[i], self.numels[i]
            if offset >= stop:
                return
            low, high = max(start, offset), min(stop, offset + numel)
            if low < high:
                yield Piece(self.params[i], low - offset, high - offset, self.position, low, high - low == numel)

    def cut_params(self, world_size: int) -> Iterator[int]:
        """The parameters that lie across a cut (one that lies across several comes several times)."""
        for position in self.cuts[1:world_size] if self.cuts is not None else ():
            i = bisect_right(self.offsets, position) - 1
            if self.offsets[i] < position < self.offsets[i] + self.numels[i]:
                yield self.params[i]

    def _owned(self, rank: int) -> tuple[int, int]:
        assert self.owners is not None
        return bisect_left(self.owners, rank), bisect_right(self.owners, rank)


@dataclass(frozen=True)
class Layout:
    """All buckets of an optimizer. Ask it; never change it: ``partition.extend`` makes a longer one.

    Attributes:
        world_size: how many ranks share the parameters.
        specs: shape, dtype, device, name and group of every parameter.
        buckets: what travels as one, in the order in which it was placed.
    """

    world_size: int
    specs: tuple[ParamSpec, ...] = ()
    buckets: tuple[Bucket, ...] = ()

    def on_devices(self, labels: Mapping[int, str]) -> Layout:
        """The same layout for parameters that were moved. ``labels``: by parameter, as in ``ParamSpec.device``."""
        specs = tuple(spec._replace(device=labels[spec.index]) for spec in self.specs)
        buckets = tuple(bucket._replace(device=labels[bucket.params[0]]) for bucket in self.buckets)
        return replace(self, specs=specs, buckets=buckets)

    @cached_property
    def spec_of(self) -> dict[int, ParamSpec]:
        """Parameter index -> spec. (An index may be missing: a parameter listed twice has one spec.)"""
        return {spec.index: spec for spec in self.specs}

    @cached_property
    def bucket_of(self) -> dict[int, int]:
        """Parameter index -> position of its bucket."""
        return {index: bucket.position for bucket in self.buckets for index in bucket.params}

    @cached_property
    def cut_params(self) -> frozenset[int]:
        """The parameters that are cut between ranks."""
        return frozenset(index for bucket in self.buckets for index in bucket.cut_params(self.world_size))

    def pieces(self, rank: int) -> list[Piece]:
        """The shard of ``rank``: all its pieces, in bucket order."""
        return [piece for bucket in self.buckets for piece in bucket.pieces(rank)]

    def pieces_of(self, index: int) -> list[tuple[int, Piece]]:
        """Who owns which part of one parameter: (rank, piece), by ascending range."""
        bucket = self.buckets[self.bucket_of[index]]
        found = [
            (rank, piece) for rank in range(self.world_size) for piece in bucket.pieces(rank) if piece.param == index
        ]
        return sorted(found, key=lambda owned: owned[1].start)

    def owned_elements(self, rank: int, trainable_only: bool = False) -> int:
        """How many elements ``rank`` owns."""
        return sum(
            piece.numel for piece in self.pieces(rank) if not trainable_only or self.spec_of[piece.param].trainable
        )

    def owned_bytes(self, rank: int) -> int:
        """How many bytes of parameters ``rank`` owns."""
        return sum(piece.numel * self.spec_of[piece.param].itemsize for piece in self.pieces(rank))

    @cached_property
    def digest(self) -> str:
        """A fingerprint: equal on two ranks exactly when their layouts are."""
        return hashlib.sha256(repr((self.world_size, self.specs, self.buckets)).encode()).hexdigest()
