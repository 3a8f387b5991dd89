"""Random numbers by counting: what they depend on, and on nothing else."""

from __future__ import annotations

import torch

from shardstep.params.random_bits import Counters, Draw, RandomBits, Segment, key_of

DRAWS = [Draw(0, 0), Draw(0, 0)]
BLOCK = 1 << 17


def numbers(segments, numel, draws=DRAWS):
    """All 16 bits of each, as a number from 0; -1 where there is no segment."""
    out = torch.full((numel,), -1, dtype=torch.int32)
    cpu, low = torch.device("cpu"), segments[0].start
    ranges = [slice(start, min(start + BLOCK, numel)) for start in range(low, numel, BLOCK)]
    for where, random in zip(ranges, RandomBits(segments, ranges, cpu).draw(draws, Counters(BLOCK, cpu)), strict=True):
        out[where] = random.to(torch.int32) & 0xFFFF
    return out


def whole(count, first=0, key=5, group=0, draws=DRAWS):
    return numbers([Segment(0, count, first, key, group)], count, draws)


def test_a_number_depends_on_the_element_and_not_on_where_it_lies():
    expected = whole(200_001)
    for cut in (0, 1, 2, 63, 64, 65_537, 131_072, 150_001):
        shift = 64 + cut % 2  # an odd element lies on an odd place
        segments = [Segment(shift, shift + 200_001 - cut, cut, 5, 0)]
        found = numbers(segments, shift + 200_001 - cut)[shift:]
        assert torch.equal(found, expected[cut:]), cut


def test_parameters_side_by_side_have_their_own_numbers():
    sizes = [1, 5, 300, 70_000, 33, 2]
    segments, start = [], 0
    for position, size in enumerate(sizes):
        segments.append(Segment(start, start + size, 2 * position, key_of(None, position), position % 2))
        start += -(-size // 64) * 64
    draws = [Draw(3, 7), Draw(4, 9)]
    found = numbers(segments, start, draws)
    for position, (segment, size) in enumerate(zip(segments, sizes, strict=True)):
        alone = whole(size, 2 * position, key_of(None, position), position % 2, draws)
        assert torch.equal(found[segment.start : segment.stop], alone), position


def test_seed_step_name_and_the_upper_half_of_the_number_of_an_element_count():
    usual = whole(1000)
    others = [
        whole(1000, draws=[Draw(1, 0)]),
        whole(1000, draws=[Draw(0, 1)]),
        whole(1000, key=6),
        whole(1000, key=5 + (1 << 40)),
        whole(1000, first=1 << 33),
        whole(1000, first=1 << 40),
    ]
    for found in others:
        # Of 1000 pairs of numbers of 16 bits, more than 3 alike have a chance of 1 in 10^9.
        assert (found == usual).sum() <= 3
    assert torch.equal(usual, whole(1000))


def test_counting_goes_on_across_32_bits():
    border = 1 << 33  # elements, so 2^32 pairs
    across = whole(600, first=border - 300)
    assert torch.equal(across[:300], whole(300, first=border - 300))
    assert torch.equal(across[300:], whole(300, first=border))
    assert not torch.equal(across[300:], whole(300, first=0))


def test_all_numbers_of_16_bits_come_about_equally_often():
    """4 million numbers, 64 of each on average: chi-square has 65535 degrees, a deviation of sqrt(2 * 65535) = 362."""
    counts = torch.bincount(whole(1 << 22).to(torch.int64), minlength=1 << 16).to(torch.float64)
    assert len(counts) == 1 << 16
    chi_square = ((counts - 64) ** 2 / 64).sum().item()
    assert abs(chi_square - 65535) < 4.5 * 362


def test_neighbours_are_independent():
    """Correlations of 4 million pairs have a deviation of 1/2048."""
    values = whole(1 << 22).to(torch.float64)
    values = (values - values.mean()) / values.std()
    for lag in (1, 2, 3, 64, 65_536):
        assert abs((values[:-lag] * values[lag:]).mean().item()) < 4.5 / 2048


def test_names_and_positions_have_keys_of_their_own():
    keys = {key_of(name, index) for name in ("a", "b", "0", None) for index in (0, 1)}
    assert len(keys) == 5  # with a name the position does not count
    assert all(0 <= key < 1 << 64 for key in keys)
