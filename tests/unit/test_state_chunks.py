"""How state travels: every byte once, in chunks of a bounded size, the same plan on both sides."""

from __future__ import annotations

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
def test_every_byte_travels_once_and_in_order_in_few_chunks_within_the_budget(plan):
    numbers, budget = plan
    reached, count = [0] * len(numbers), 0
    for chunk in chunks(numbers, budget):
        assert [which for which, _, _ in chunk] == sorted({which for which, _, _ in chunk})
        for which, low, high in chunk:
            assert low == reached[which], f"tensor {which}: gap or overlap at {reached[which]}"
            assert low < high
            reached[which] = high
        assert 0 < sum(high - low for _, low, high in chunk) <= budget
        count += 1
    assert reached == numbers
    # Small tensors: two neighbouring chunks together exceed the budget. Large ones: one chunk is not full.
    large = sum(1 for number in numbers if number >= min(MIB, budget))
    assert count <= 2 * sum(numbers) / budget + large + 1


def test_small_tensors_travel_together_and_large_ones_alone():
    assert len(list(chunks([4] * 10_000, 16 * MIB))) == 1
    planned = list(chunks([100, 40 * MIB, 100], 16 * MIB))
    assert all(len(chunk) == 1 for chunk in planned if any(which == 1 for which, _, _ in chunk))
    assert [(0, 0, 100), (2, 0, 100)] in planned
