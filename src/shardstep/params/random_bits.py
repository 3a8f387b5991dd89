"""Random numbers by counting: a function of (seed, step, parameter, element), whoever asks, in whatever order.

So ranks, cuts, buckets and a resumed run have no part in them. A number is an integer hash of the element's place under
two keys; two neighbours share one hash and take 16 bits each.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from shardstep.params.rounding import Room, spans

_WORD = 1 << 32


class Segment(NamedTuple):
    """A range of a flat buffer that holds elements of one parameter."""

    start: int
    stop: int
    first: int  # the element of the parameter at ``start``; both are even, or both are odd
    key: int  # of the parameter, 64 bits
    group: int  # of the parameter


class Draw(NamedTuple):
    """What a group's random numbers depend on besides the parameter."""

    seed: int
    step: int


def key_of(name: str | None, index: int) -> int:
    """64 bits that stand for a parameter: by name, or else by position."""
    text = f"position {index}" if name is None else f"name {name}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


class _Part(NamedTuple):
    """A range of the buffer, and which segments are in it."""

    where: slice
    segments: slice
    counts: Tensor | None  # pairs of elements per segment; None: there is one segment


class RandomBits:
    """The random numbers for one flat buffer: 16 for each element, as int32."""

    def __init__(self, segments: Sequence[Segment], numel: int, device: torch.device) -> None:
        split = [part for segment in segments for part in _at_word_boundaries(segment)]
        self._groups = [segment.group for segment in split]
        self._device = device
        rows = [
            [_signed((segment.first >> 1) - (segment.start >> 1)) for segment in split],
            [_signed(segment.key) for segment in split],
            [_signed((segment.key >> 32) + 0x9E3779B9 * (segment.first >> 33)) for segment in split],
        ]
        self._rows = torch.tensor(rows, dtype=torch.int32, device=device).view(3, len(split))
        self._parts = [part for where in spans(numel, device) for part in self._part(split, where)]

    def _part(self, segments: Sequence[Segment], where: slice) -> Iterator[_Part]:
        low = bisect_right([segment.stop for segment in segments], where.start)
        high = bisect_left([segment.start for segment in segments], where.stop)
        if low >= high:
            return
        if high - low == 1:
            yield _Part(where, slice(low, high), None)
            return
        # What lies between two segments is padding: whatever it gets.
        starts = [where.start, *(segment.start for segment in segments[low + 1 : high])]
        pairs = [start >> 1 for start in starts] + [(where.stop + 1) >> 1]
        counts = [after - before for before, after in pairwise(pairs)]
        yield _Part(where, slice(low, high), torch.tensor(counts, device=self._device))

    def draw(self, draws: Sequence[Draw], room: Room) -> Iterator[tuple[slice, Tensor]]:
        """Range by range, its random numbers, in the second row of ``room``. ``draws``: by group."""
        if not self._groups:
            return
        keys = self._keys(draws)
        for where, segments, counts in self._parts:
            first, stop = where.start >> 1, (where.stop + 1) >> 1
            chosen = keys[:, segments]
            if counts is not None:
                chosen = chosen.repeat_interleave(counts, dim=1, output_size=stop - first)
            base, key, other = chosen
            bits, moved = room.row(0, 2 * (stop - first)).chunk(2)
            torch.arange(stop - first, out=bits)
            bits.add_(base + _signed(first)).bitwise_xor_(key)
            _fold(bits, 16, moved).mul_(_FIRST).bitwise_xor_(other)
            _fold(bits, 15, moved).mul_(_SECOND)
            _fold(bits, 16, moved)
            count = where.stop - where.start
            numbers = room.row(1, count)
            yield where, numbers.copy_(bits.view(torch.int16)[:count]).bitwise_and_(0xFFFF)

    def _keys(self, draws: Sequence[Draw]) -> Tensor:
        """By segment: where it counts from, and two keys."""
        words = [_words_of(draws[group]) for group in dict.fromkeys(self._groups)]
        if len(set(words)) == 1:
            one, other = words[0]
            mixed = [self._rows[1].bitwise_xor(one), self._rows[2].bitwise_xor(other)]
        else:
            by_segment = [_words_of(draws[group]) for group in self._groups]
            table = torch.tensor(by_segment, dtype=torch.int32, device=self._device)
            mixed = [self._rows[1].bitwise_xor(table[:, 0]), self._rows[2].bitwise_xor(table[:, 1])]
        for row in mixed:
            moved = torch.empty_like(row)
            _fold(row, 16, moved).mul_(_SECOND)
            _fold(row, 13, moved).mul_(_FIRST)
            _fold(row, 16, moved)
        return torch.stack([self._rows[0], *mixed])


def _at_word_boundaries(segment: Segment) -> Iterator[Segment]:
    """Parts in each of which the upper word of the number of a pair of elements is the same."""
    start, first = segment.start, segment.first
    while start < segment.stop:
        room = ((first >> 33) + 1 << 33) - first
        stop = min(segment.stop, start + room)
        yield segment._replace(start=start, stop=stop, first=first)
        start, first = stop, first + room


def _words_of(draw: Draw) -> tuple[int, int]:
    """Two words that depend on all bits of the seed and the step."""
    text = f"{draw.seed} {draw.step}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return _signed(int.from_bytes(digest[:4], "little")), _signed(int.from_bytes(digest[4:], "little"))


def _signed(value: int) -> int:
    """The lower 32 bits as torch's int32 has them."""
    value %= _WORD
    return value - _WORD if value >= _WORD // 2 else value


# Multipliers of a hash that changes every bit of its result with about half of the probability if one bit changes.
_FIRST, _SECOND = _signed(0x7FEB352D), _signed(0x846CA68B)


def _fold(bits: Tensor, by: int, moved: Tensor) -> Tensor:
    """In place: the upper bits into the lower ones. ``moved``: memory for it.

    torch's shift of a negative number fills up with ones: they go, or the numbers would not be evenly distributed.
    """
    return bits.bitwise_xor_(torch.bitwise_right_shift(bits, by, out=moved).bitwise_and_((1 << 32 - by) - 1))
