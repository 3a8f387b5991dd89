"""Ranges of flattened elements as boxes: every element once, in order, few boxes, each contiguous in memory."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardstep.layout.boxes import Box, boxes_of, whole

relaxed = settings(deadline=None, max_examples=300)
shapes = st.lists(st.integers(1, 6), min_size=1, max_size=5).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """A shape, and a range of its elements, which may be empty or everything."""
    shape = draw(shapes)
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(prod(shape)).view(shape)


def inside(tensor: Tensor, box: Box) -> Tensor:
    """What a reader gets that asks for the box: slices, dimension by dimension."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        assert 0 <= offset <= offset + size <= tensor.shape[dim], f"{box} is not inside {tuple(tensor.shape)}"
        tensor = tensor.narrow(dim, offset, size)
    return tensor


@relaxed
@given(ranges())
@example(((3, 4, 5), 7, 53))
@example(((2, 1, 3), 2, 4))
def test_the_boxes_of_a_range_are_few_contiguous_and_hold_its_elements_in_order(case):
    shape, start, stop = case
    boxes = boxes_of(shape, start, stop)
    found = [inside(numbered(shape), box).flatten().tolist() for box in boxes]
    assert [value for values in found for value in values] == list(range(start, stop))
    for box, values in zip(boxes, found, strict=True):
        assert len(values) == box.numel == prod(box.sizes) > 0
        assert values == list(range(values[0], values[0] + box.numel)), "contiguous in memory"
    assert len(boxes) <= 2 * len(shape) - 1
    assert len({box.offsets for box in boxes}) == len(boxes), "DCP tells the parts of a tensor apart by their offsets"
    assert (len(boxes) == 0) == (start == stop)


@pytest.mark.parametrize("shape", [(3, 4), (1,), (), (0,), (3, 0, 2)])
def test_the_whole_range_is_one_box(shape):
    assert boxes_of(shape, 0, prod(shape)) == [whole(shape)] == [Box((0,) * len(shape), shape)]


def test_large_tensors_cost_nothing():
    """A formula, not a loop over elements: a parameter of 2**40 elements cut at odd places."""
    boxes = boxes_of((2**14, 2**13, 2**13), 12345, 2**40 - 54321)
    assert sum(box.numel for box in boxes) == 2**40 - 54321 - 12345
    assert len(boxes) == 5
