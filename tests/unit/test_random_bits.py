"""Random numbers by counting: what they depend on, and statistics.

The numbers are always the same, so a test that has passed once does not fail by chance. Bounds are in standard
deviations; those for the worst of many are what the worst of as many normal numbers exceeds once in a thousand.
"""

from __future__ import annotations

from itertools import combinations
from math import sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardstep.params.random_bits import Counters, Draw, RandomBits, Segment, key_of

CPU = torch.device("cpu")
WORST_OF_30000 = 5.6


def drawn(segments, draws, block):
    """The 16 bits of each element as a number, drawn in ranges of ``block`` elements."""
    low, numel = segments[0].start, segments[-1].stop
    out = torch.empty(numel, dtype=torch.int32)
    ranges = [slice(start, min(start + block, numel)) for start in range(low, numel, block)]
    ranges = [where for where in ranges if any(one.start < where.stop and where.start < one.stop for one in segments)]
    for where, bits in zip(ranges, RandomBits(segments, ranges, CPU).draw(draws, Counters(block, CPU)), strict=True):
        out[where] = bits.to(torch.int32) & 0xFFFF
    return out


def numbers(count, key=5, seed=0, step=0, first=0):
    """Of ``count`` elements of a parameter, from element ``first`` on."""
    start = first % 2
    return drawn([Segment(start, start + count, first, key, 0)], [Draw(seed, step)], count)[start:]


@given(
    sizes_and_firsts=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=4),
    block=st.sampled_from([64, 128, 1 << 17]),
)
def test_a_number_depends_on_parameter_and_element_and_not_on_where_it_lies(sizes_and_firsts, block):
    segments, draws, start = [], [Draw(3, 7), Draw(4, 9)], 0
    for i, (size, first) in enumerate(sizes_and_firsts):
        begin = start + first % 2  # an odd element lies on an odd place
        segments.append(Segment(begin, begin + size, first, key_of(None, i), i % 2))
        start = -(-segments[-1].stop // 64) * 64
    found = drawn(segments, draws, block)
    for begin, stop, first, key, group in segments:
        whole = numbers(first + stop - begin, key, *draws[group])
        assert torch.equal(found[begin:stop], whole[first:])


def test_counting_goes_on_across_32_bits():
    border = 1 << 33  # elements, so 2^32 pairs
    across = numbers(600, first=border - 300)
    assert torch.equal(across[:300], numbers(300, first=border - 300))
    assert torch.equal(across[300:], numbers(300, first=border))


def test_names_and_positions_have_keys_of_their_own():
    keys = {key_of(name, index) for name in ("a", "b", "0", None) for index in (0, 1)}
    assert len(keys) == 5  # with a name the position does not count
    assert all(0 <= key < 1 << 64 for key in keys)


# --- statistics -------------------------------------------------------------------------------------------------------


def as_signs(found):
    """By element and bit: -1 or 1."""
    return ((found[:, None] >> torch.arange(16)) & 1).to(torch.float32) * 2 - 1


def worst_correlation(one, other):
    """Of every bit with every bit, in standard deviations."""
    return (as_signs(one).T @ as_signs(other)).abs().max().item() / sqrt(len(one))


def excess(found):
    """How unevenly numbers fall into 65536 bins: a chi-squared, in standard deviations from its mean."""
    counts, expected = torch.bincount(found.long(), minlength=65536).double(), len(found) / 65536
    return (((counts - expected) ** 2 / expected).sum().item() - 65535) / sqrt(2 * 65535)


def test_numbers_are_even_alone_and_in_pairs_and_say_nothing_about_later_ones():
    found = numbers(1 << 20)
    one, other = found[0::2], found[1::2]  # that share a hash
    assert as_signs(found).sum(0).abs().max().item() / 1024 < 4.5
    assert abs(excess(found)) < 4.5
    for left, right in ((one, other), (other[:-1], one[1:])):
        assert abs(excess((left >> 8 << 8) | (right >> 8))) < 4.5
        assert abs(excess(((left & 255) << 8) | (right & 255))) < 4.5
    for lag in (1, 2, 3, 4, 64, 1024, 65536):
        assert worst_correlation(found[: 1 << 17], found[lag : lag + (1 << 17)]) < 5, lag


WAYS = {
    "steps": [{"step": step} for step in range(12)],
    "seeds": [{"seed": seed} for seed in (*range(10), -1, 2**63)],
    "names": [{"key": key_of(f"layers.{i}.weight", i)} for i in range(12)],
    "positions": [{"key": key_of(None, i)} for i in range(12)],
    "places": [{"first": first} for first in (0, 1 << 20, 1 << 32, (1 << 33) - (1 << 18), 1 << 33, 3 << 33, 1 << 40)],
}


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_steps_seeds_parameters_and_places_are_independent(ways):
    found = [numbers(1 << 15, **way) for way in ways]
    for one, other in combinations(found, 2):
        assert worst_correlation(one, other) < WORST_OF_30000
        assert (one == other).sum() < 10  # of 32768, where half of one is expected
