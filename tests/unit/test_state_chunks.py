"""How state travels: every byte once, in chunks of a bounded size, the same plan on both sides."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardstep.state.chunks import chunks

MIB = 2**20
sizes = st.lists(
    st.one_of(st.just(0), st.integers(1, 100), st.integers(MIB - 2, MIB + 2), st.integers(0, 70 * MIB)), max_size=30
)
budgets = st.one_of(st.integers(1, 64), st.sampled_from([1000, MIB - 1, MIB, MIB + 1, 16 * MIB, 10**9]))


@st.composite
def plans(draw):
    """Sizes and a budget of like orders of magnitude, so that no plan has millions of chunks."""
    budget = draw(budgets)
    return [min(size, 50 * budget) for size in draw(sizes)], budget


@settings(deadline=None, max_examples=300)
@given(plans())
def test_every_byte_travels_once_and_in_order(plan):
    numbers, budget = plan
    reached = [0] * len(numbers)
    for chunk in chunks(numbers, budget):
        assert [which for which, _, _ in chunk] == sorted({which for which, _, _ in chunk})
        for which, low, high in chunk:
            assert low == reached[which], f"tensor {which}: gap or overlap at {reached[which]}"
            assert low < high
            reached[which] = high
    assert reached == numbers


@settings(deadline=None, max_examples=300)
@given(plans())
def test_no_chunk_is_empty_or_exceeds_the_budget(plan):
    for chunk in chunks(*plan):
        assert 0 < sum(high - low for _, low, high in chunk) <= plan[1]


@settings(deadline=None, max_examples=300)
@given(plans())
def test_there_are_at_most_twice_as_many_chunks_as_the_bytes_need_and_one_per_large_tensor(plan):
    """Small tensors: two neighbouring chunks together exceed the budget. Large ones: one chunk is not full."""
    numbers, budget = plan
    large = sum(1 for number in numbers if number >= min(MIB, budget))
    assert len(list(chunks(numbers, budget))) <= 2 * sum(numbers) / budget + large + 1


def test_many_small_tensors_travel_together():
    """Two scalars and a step per parameter, as Adam has: not one message each."""
    assert len(list(chunks([4] * 10_000, 16 * MIB))) == 1


@pytest.mark.parametrize("size", [MIB, 16 * MIB, 40 * MIB])
def test_large_tensors_travel_alone_and_are_never_packed(size):
    planned = list(chunks([100, size, 100], 16 * MIB))
    assert all(len(chunk) == 1 for chunk in planned if any(which == 1 for which, _, _ in chunk))
    assert [(0, 0, 100), (2, 0, 100)] in planned


def test_nothing_gives_no_chunks():
    assert list(chunks([], 10)) == []
    assert list(chunks([0, 0], 10)) == []
