"""How state travels: every byte once and in order, in full chunks, the same plan on both sides."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardstep.state.collect import chunks

sizes = st.lists(st.one_of(st.just(0), st.integers(1, 100), st.integers(0, 5000)), max_size=30)


@settings(deadline=None, max_examples=300)
@given(sizes, st.integers(1, 1000))
def test_every_byte_travels_once_and_in_order_and_all_chunks_but_the_last_are_full(numbers, budget):
    reached, filled = [0] * len(numbers), []
    for chunk in chunks(numbers, budget):
        assert [which for which, _, _ in chunk] == sorted({which for which, _, _ in chunk})
        for which, low, high in chunk:
            assert low == reached[which], f"tensor {which}: gap or overlap at {reached[which]}"
            assert low < high
            reached[which] = high
        filled.append(sum(high - low for _, low, high in chunk))
    assert reached == numbers
    assert filled[:-1] == [budget] * (len(filled) - 1)
    assert all(0 < size <= budget for size in filled)
