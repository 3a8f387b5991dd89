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
    """A range of the buffer, and the stretches in it that have keys of their own."""

    where: slice
    columns: slice  # of the keys
    counts: Tensor | None  # pairs of elements per stretch; None: there is one


class Counters:
    """Memory that numbers are made in, for ranges of up to ``numel`` elements. Who makes some overwrites the last."""

    def __init__(self, numel: int, device: torch.device) -> None:
        pairs = numel // 2 + 1
        self.steps = torch.arange(pairs, dtype=torch.int32, device=device).mul_(_STEP)
        self.memory = torch.empty(2, pairs, dtype=torch.int32, device=device)


class RandomBits:
    """The random numbers for one flat buffer: 16 bits for each element of some ranges, the next range at a time."""

    def __init__(self, segments: Sequence[Segment], ranges: Sequence[slice], device: torch.device) -> None:
        """``ranges``: each with a part of at least one segment in it."""
        split = [part for segment in segments for part in _at_word_boundaries(segment)]
        starts, ends = [segment.start for segment in split], [segment.stop for segment in split]
        self._device = device
        self._groups: list[int] = []  # by column
        self._parts: list[_Part] = []
        columns: list[tuple[int, int, int]] = []
        for where in ranges:
            inside = split[bisect_right(ends, where.start) : bisect_left(starts, where.stop)]
            first = len(columns)
            columns += [_column(segment, where) for segment in inside]
            self._groups += [segment.group for segment in inside]
            self._parts.append(_Part(where, slice(first, len(columns)), self._counts(inside, where)))
        self._columns = torch.tensor(columns, dtype=torch.int32, device=device).view(len(columns), 3).T.contiguous()

    def _counts(self, inside: Sequence[Segment], where: slice) -> Tensor | None:
        """What lies between two segments is padding: whatever it gets."""
        if len(inside) == 1:
            return None
        starts = [where.start, *(segment.start for segment in inside[1:]), where.stop + 1]
        counts = [(after >> 1) - (before >> 1) for before, after in pairwise(starts)]
        return torch.tensor(counts, device=self._device)

    def draw(self, draws: Sequence[Draw], counters: Counters) -> Iterator[Tensor]:
        """Range by range, its random numbers (int16), in the memory of ``counters``. ``draws``: by group."""
        if not self._parts:
            return
        keys = self._keys(draws)
        for where, columns, counts in self._parts:
            pairs = _pairs(where)
            chosen = keys[:, columns]
            if counts is not None:
                chosen = chosen.repeat_interleave(counts, dim=1, output_size=pairs)
            begin, key = chosen
            bits, moved = counters.memory[:, :pairs]
            torch.add(counters.steps[:pairs], begin, out=bits)
            _fold(bits, 16, moved).mul_(_FIRST).bitwise_xor_(key)
            _fold(bits, 15, moved).mul_(_SECOND)
            offset = where.start & 1
            yield _fold(bits, 16, moved).view(torch.int16)[offset : offset + where.stop - where.start]

    def _keys(self, draws: Sequence[Draw]) -> Tensor:
        """By column: where its counter begins, and the second key."""
        words = {group: _words_of(draws[group]) for group in dict.fromkeys(self._groups)}
        if len(set(words.values())) == 1:
            one, other = next(iter(words.values()))
            mixed = [self._columns[1].bitwise_xor(one), self._columns[2].bitwise_xor(other)]
        else:
            table = torch.tensor([words[group] for group in self._groups], dtype=torch.int32, device=self._device)
            mixed = [self._columns[1].bitwise_xor(table[:, 0]), self._columns[2].bitwise_xor(table[:, 1])]
        for row in mixed:
            moved = torch.empty_like(row)
            _fold(row, 16, moved).mul_(_SECOND)
            _fold(row, 13, moved).mul_(_FIRST)
            _fold(row, 16, moved)
        return torch.stack([mixed[0].add_(self._columns[0]), mixed[1]])


def _column(segment: Segment, where: slice) -> tuple[int, int, int]:
    """Of a segment in a range: how far its counter is at the beginning of the range, and its two keys."""
    pair = (segment.first >> 1) - (segment.start >> 1) + (where.start >> 1)
    word = segment.first >> 33
    # Both keys: with the same beginning, numbers under two second keys are not quite independent.
    one, other = segment.key + 0x85EBCA6B * word, (segment.key >> 32) + 0x9E3779B9 * word
    return _signed(pair * _STEP), _signed(one), _signed(other)


def _pairs(where: slice) -> int:
    """How many pairs of neighbours a range touches."""
    return ((where.stop + 1) >> 1) - (where.start >> 1)


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


# Multipliers of a hash that changes every bit of its result with about half of the probability if one bit changes, and
# an odd number by which a counter steps, so that neighbours differ in many bits.
_FIRST, _SECOND, _STEP = _signed(0x7FEB352D), _signed(0x846CA68B), _signed(0x9E3779B9)


def _fold(bits: Tensor, by: int, moved: Tensor) -> Tensor:
    """In place: the upper bits into the lower ones. ``moved``: memory for it.

    torch's shift of a negative number fills up with ones: they go, or the numbers would not be evenly distributed.
    """
    return bits.bitwise_xor_(torch.bitwise_right_shift(bits, by, out=moved).bitwise_and_((1 << 32 - by) - 1))
