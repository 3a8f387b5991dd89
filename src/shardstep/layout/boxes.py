"""A range of a tensor's flattened elements, as boxes of the tensor itself.

Checkpoints hold tensors in their own shape, and readers (torch's DTensor among them) ask for boxes of them. A piece of
a parameter is a range of its flattened elements: that is at most ``2 * dimensions - 1`` boxes, each of which is
contiguous in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangle of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is the tensor."""
    return Box((0,) * len(shape), tuple(shape))


def boxes_of(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The boxes that make up the elements from ``start`` to ``stop``, in the order of the elements."""
    if start == 0 and stop == prod(shape):
        return [whole(shape)]
    return list(_cut(tuple(shape), start, stop, ())) if start < stop else []


def _cut(shape: tuple[int, ...], start: int, stop: int, above: tuple[int, ...]) -> Iterator[Box]:
    """``above``: where this slice of the tensor lies in the dimensions that were fixed already."""
    fixed = (1,) * len(above)
    if len(shape) == 1:
        yield Box((*above, start), (*fixed, stop - start))
        return
    row, below = prod(shape[1:]), shape[1:]
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:  # inside one row
        yield from _cut(below, start - last * row, stop - last * row, (*above, last))
        return
    if start < first * row:
        yield from _cut(below, start - (first - 1) * row, row, (*above, first - 1))
    if first < last:
        yield Box((*above, first, *[0] * len(below)), (*fixed, last - first, *below))
    if stop > last * row:
        yield from _cut(below, 0, stop - last * row, (*above, last))
