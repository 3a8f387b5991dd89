"""Ranges of flattened elements as boxes: every element once, in order, few boxes, each contiguous in memory."""

from __future__ import annotations

from itertools import pairwise
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


@st.composite
def divisions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int]]:
    """A shape, and where its elements are cut among ranks; some ranks have none."""
    shape = draw(shapes)
    inner = draw(st.lists(st.integers(0, prod(shape)), max_size=5))
    return shape, [0, *sorted(inner), prod(shape)]


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
@example(((3, 4, 5), 0, 60))
@example(((3, 4, 5), 7, 53))
@example(((3, 4, 5), 23, 24))
@example(((1, 1, 1), 0, 1))
@example(((1, 6), 2, 4))
@example(((6, 1), 2, 4))
@example(((2, 1, 3), 2, 4))
def test_the_boxes_hold_the_elements_of_the_range_each_once_and_in_order(case):
    shape, start, stop = case
    found = [inside(numbered(shape), box).flatten() for box in boxes_of(shape, start, stop)]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == list(range(start, stop))


@relaxed
@given(ranges())
def test_each_box_is_contiguous_in_memory_and_none_is_empty(case):
    shape, start, stop = case
    for box in boxes_of(shape, start, stop):
        values = inside(numbered(shape), box)
        assert values.numel() == box.numel == prod(box.sizes) > 0
        first = int(values.flatten()[0])
        assert values.flatten().tolist() == list(range(first, first + box.numel))


@relaxed
@given(ranges())
def test_there_are_at_most_two_boxes_per_dimension_but_one(case):
    shape, start, stop = case
    boxes = boxes_of(shape, start, stop)
    assert len(boxes) <= 2 * len(shape) - 1
    assert (len(boxes) == 0) == (start == stop)
    offsets = [box.offsets for box in boxes]
    assert len(set(offsets)) == len(offsets)  # DCP tells the parts of a tensor apart by their offsets


def test_the_bound_on_the_number_of_boxes_is_reached():
    assert len(boxes_of((3, 4, 5), 1, 59)) == 5
    assert len(boxes_of((3, 3, 3, 3), 1, 80)) == 7


@relaxed
@given(divisions())
def test_the_boxes_of_all_ranks_cover_the_tensor_and_never_overlap(case):
    shape, cuts = case
    written = torch.zeros(shape, dtype=torch.int64)
    keys = []
    for start, stop in pairwise(cuts):
        for box in boxes_of(shape, start, stop):
            inside(written, box).add_(1)
            keys.append(box.offsets)
    assert written.eq(1).all()
    assert len(keys) == len(set(keys)), "two ranks write under one key"


@given(shapes)
def test_the_whole_range_is_one_box(shape):
    assert boxes_of(shape, 0, prod(shape)) == [whole(shape)]
    assert whole(shape) == Box((0,) * len(shape), shape)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (0, 4)])
def test_scalars_and_empty_tensors_are_one_box_of_their_own_shape(shape):
    (box,) = boxes_of(shape, 0, prod(shape))
    assert box == whole(shape)
    assert box.numel == prod(shape)


def test_an_empty_range_has_no_boxes():
    assert boxes_of((3, 4), 5, 5) == []
    assert boxes_of((3, 4), 12, 12) == []


def test_large_tensors_cost_nothing():
    """A formula, not a loop over elements: a parameter of 2**40 elements cut at odd places."""
    shape = (2**14, 2**13, 2**13)
    boxes = boxes_of(shape, 12345, 2**40 - 54321)
    assert sum(box.numel for box in boxes) == 2**40 - 54321 - 12345
    assert len(boxes) == 5
