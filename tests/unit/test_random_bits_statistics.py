"""Random numbers by counting: statistics of bits, pairs, neighbours, steps, seeds, parameters and places.

The numbers are always the same, so a test that has passed once does not fail by chance. Bounds are in standard
deviations; those for the worst of many are what the worst of as many normal numbers exceeds once in a thousand.
"""

from __future__ import annotations

from itertools import combinations
from math import sqrt

import pytest
import torch

from shardstep.params.random_bits import Counters, Draw, RandomBits, Segment, key_of

CPU = torch.device("cpu")
COUNT = 1 << 17
WORST_OF_30000 = 5.6


def numbers(count=COUNT, key=None, seed=0, step=0, first=0, start=None):
    """``count`` numbers of a parameter from element ``first`` on, which lies at ``start`` of its buffer."""
    start = first % 2 if start is None else start
    segment = Segment(start, start + count, first, key_of("weight", 0) if key is None else key, 0)
    bits = RandomBits([segment], [slice(start, start + count)], CPU)
    (found,) = bits.draw([Draw(seed, step)], Counters(count + 2, CPU))
    return found.to(torch.int32) & 0xFFFF


def as_signs(found):
    """By element and bit: -1 or 1."""
    return ((found[:, None] >> torch.arange(16)) & 1).to(torch.float32) * 2 - 1


def worst_correlation(one, other):
    """Of every bit with every bit, in standard deviations."""
    return (as_signs(one).T @ as_signs(other)).abs().max().item() / sqrt(len(one))


def excess(found, bins=65536):
    """How unevenly numbers fall into bins: a chi-squared, in standard deviations from its mean."""
    counts = torch.bincount(found.long() * bins >> 16, minlength=bins).double()
    expected = len(found) / bins
    return (((counts - expected) ** 2 / expected).sum().item() - (bins - 1)) / sqrt(2 * (bins - 1))


def test_numbers_are_even_alone_and_in_pairs():
    found = numbers(1 << 20)
    one, other = found[0::2], found[1::2]  # that share a hash
    assert as_signs(found).sum(0).abs().max().item() / 1024 < 4.5
    assert abs(excess(found)) < 4.5
    assert abs(excess(found, 256)) < 4.5
    for left, right in ((one, other), (other[:-1], one[1:])):
        assert abs(excess((left >> 8 << 8) | (right >> 8))) < 4.5
        assert abs(excess(((left & 255) << 8) | (right & 255))) < 4.5


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 64, 768, 1024, 4096, 65536])
def test_numbers_say_nothing_about_later_ones(lag):
    found = numbers(COUNT + lag)
    assert worst_correlation(found[:-lag], found[lag:]) < 5


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


@pytest.mark.parametrize("part", [0.5, 0.1, 0.01])
def test_sums_vary_as_those_of_independent_numbers_do(part):
    """Over steps, and over neighbours and columns within a step."""
    below = [(numbers(1 << 14, step=step) < part * 65536).double() for step in range(256)]
    one = (numbers(1 << 20) < part * 65536).double()
    for rows in (torch.stack(below), one.view(64, -1), one.view(-1, 64).T, one.view(1024, -1), one.view(-1, 1024).T):
        sums = rows.sum(0)
        variance = len(rows) * part * (1 - part)
        assert abs(sums.var().item() / variance - 1) < 5 * sqrt((2 + 1 / variance) / len(sums))
