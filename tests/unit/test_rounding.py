"""float32 to 16 bits: every lower half, every kind of number, and back."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from shardstep.params.rounding import follow, join, round_nearest, round_stochastic, rounds_to, split

LOWER = torch.arange(1 << 16, dtype=torch.int64)
# Upper halves: zero, the least and the largest denormal, the least normal, 1, the last before 2, the largest; infinity.
FINITE = [sign | upper for sign in (0, 0x8000) for upper in (0, 1, 0x7F, 0x80, 0x3F80, 0x3FFF, 0x7F7F)]
UPPER = [*FINITE, 0x7F80, 0xFF80]
INF = float("inf")
both_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def _float32(bits: Tensor) -> Tensor:
    """From 32 bits in an int64."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def _same(found: Tensor, expected: Tensor) -> bool:
    """The same bits, or both NaN."""
    kind = torch.int32 if found.dtype == torch.float32 else torch.int16
    return bool(((found.view(kind) == expected.view(kind)) | (found.isnan() & expected.isnan())).all())


def _rounded(values: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    out = torch.empty(values.shape, dtype=dtype)
    round_nearest(values, out)
    return out


def _joined(param: Tensor, remainder: Tensor) -> Tensor:
    master = torch.empty(param.shape)
    join(param, remainder, master)
    return master


def _followed(values: Tensor, param: Tensor) -> Tensor:
    followed = values.clone()
    follow(followed, param)
    return followed


def _at_random(values: Tensor, random: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(values, dtype=dtype)
    round_stochastic(values, random.to(torch.int16).expand(values.shape), out)
    return out


# --- to nearest, and what was changed since ---------------------------------------------------------------------------


def test_every_lower_half_rounds_to_nearest_with_ties_away_from_zero():
    for upper in UPPER:
        values = _float32((upper << 16) + LOWER)
        nan, expected = values.isnan(), (upper + (LOWER >= 0x8000)).to(torch.int32).to(torch.int16)
        assert torch.equal(_rounded(values).view(torch.int16)[~nan], expected[~nan])
        assert _rounded(values)[nan].isnan().all()
        assert nan.sum() == (0 if upper in FINITE else 0xFFFF)


def test_float16_rounds_to_nearest_with_ties_away_from_zero():
    """Against exact fractions, at every spacing: points between a float16 and the next, and the ties."""
    halves = torch.arange(0, 0x7C00, 259, dtype=torch.int16).view(torch.float16)
    following = (halves.view(torch.int16) + 1).view(torch.float16).double().clamp(max=65536.0)
    for low, high in zip(halves.double(), following, strict=True):
        for part in (0.0, 0.25, 0.49, 0.5, 0.51, 0.99):
            value = (low + (high - low) * part).float()
            exact, below, above = (Fraction(one.item()) for one in (value, low, high))
            nearest = above if exact - below >= above - exact else below
            expected = INF if nearest >= 65536 else float(nearest)
            assert _rounded(torch.stack([value, -value]), torch.float16).tolist() == [expected, -expected]
    odd = torch.tensor([0.0, -0.0, 1e-9, -1e-9, 2.0**-25, 65519.0, 65520.0, -1e30, INF, float("nan")])
    expected = torch.tensor([0.0, -0.0, 0.0, -0.0, 2.0**-24, 65504.0, INF, -INF, INF, float("nan")])
    assert _same(_rounded(odd, torch.float16), expected.to(torch.float16))


def test_the_remainder_leads_back_to_every_bit():
    halves = [((upper << 16) + LOWER) for upper in UPPER]
    halves += [((LOWER << 16) + lower) for lower in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    for values in map(_float32, halves):
        param, remainder = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
        split(values, param, remainder)
        assert _same(param, _rounded(values))
        assert _same(_joined(param, remainder), values)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3.0, INF, -INF, 3.3895e38, 1e-39])
def test_a_parameter_that_was_changed_keeps_the_lower_half_and_is_what_the_master_rounds_to(value):
    remainder = (LOWER - 0x8000).to(torch.int16)
    param = torch.full((1 << 16,), value, dtype=torch.bfloat16)
    master = _joined(param, remainder)
    assert _same(_rounded(master), param)
    # Below zero, and above infinity, there is no lower half to keep.
    kept = remainder >= 0 if value == 0 else remainder <= 0 if abs(value) == INF else LOWER >= 0
    assert torch.equal(master.view(torch.int32).to(torch.int16)[kept], remainder[kept])
    assert _same(master[~kept], param.float()[~kept])


def test_whether_a_parameter_was_changed_is_seen_for_every_lower_half():
    """Element by element: what it was rounded to is unchanged, and each of its two neighbours is a change."""
    for upper in FINITE:
        values = _float32((upper << 16) + LOWER)
        param = _rounded(values)
        assert rounds_to(values, param)
        for step in (1, -1):
            neighbour = (param.view(torch.int16) + step).view(torch.bfloat16)
            for place in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
                changed, expected = param.clone(), values.clone()
                changed[place] = neighbour[place]
                expected[place] = changed[place].float()
                assert not rounds_to(values, changed), place
                assert _same(_followed(values, changed), expected)


@both_dtypes
def test_what_is_not_finite_or_very_small_is_unchanged_if_nobody_changed_it(dtype):
    values = torch.tensor([0.0, -0.0, 1e-45, -1e-40, INF, -INF, 3.4e38, float("nan"), 1.0])
    param = _rounded(values, dtype)
    assert _same(_followed(values, param), values)
    changed = values.clone()
    param[4] = changed[4] = 2.0
    assert _same(_followed(values, param), changed)


# --- at random --------------------------------------------------------------------------------------------------------


@both_dtypes
def test_stochastic_rounding_goes_up_as_often_as_it_should(dtype):
    """With each of the 65536 random numbers once: the share that goes up is exact to one in 65536 (float16: 8192)."""
    spacing = 2.0 ** (-7 if dtype == torch.bfloat16 else -10)
    for part in (0.0, 0.1, 0.5, 0.75):
        for sign in (1, -1):
            out = _at_random(torch.full((1 << 16,), sign * (1 + part * spacing)), LOWER, dtype)
            assert set(out.unique().tolist()) <= {sign * 1.0, sign * (1 + spacing)}
            assert abs((out != sign).double().mean().item() - part) <= 2 / 65536 * 8


def test_stochastic_rounding_of_small_float16():
    for times in (0.0, 0.25, 1.5, 700.125, 1023.5):
        out = _at_random(torch.full((1 << 16,), times * 2.0**-24), LOWER, torch.float16)
        assert abs(out.double().mean().item() * 2**24 - times) <= 2 / 65536


@both_dtypes
def test_stochastic_rounding_leaves_what_is_representable_and_never_invents_infinity(dtype):
    exact = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    beyond, largest = torch.tensor([3.4e38, -3.4e38, INF]), torch.finfo(dtype).max
    # (Added on the bits, a NaN with all of them set would become zero, which nothing tells from a result.)
    nan = torch.cat([_float32(torch.tensor([bits])) for bits in (0x7FFFFFFF, 0xFFFFFFFF, 0x7FFF8001, 0x7F800001)])
    for number in torch.tensor([0, 1, 0x8000, 0xFFFF]):
        assert _same(_at_random(exact.float(), number, dtype), exact)
        assert _at_random(beyond, number, dtype).tolist() == [largest, -largest, INF]
        assert _at_random(torch.cat([nan, torch.ones(1)]), number, dtype).isnan().tolist() == [True] * 4 + [False]
