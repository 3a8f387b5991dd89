"""float32 to 16 bits: every lower half, every kind of number, and back."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from shardstep.params.rounding import follow, join, round_nearest, round_stochastic, rounds_to, split

LOWER = torch.arange(1 << 16, dtype=torch.int64)
UPPER = {
    "zero": 0x0000,
    "the least denormal": 0x0001,
    "the largest denormal": 0x007F,
    "the least normal": 0x0080,
    "one": 0x3F80,
    "before a power of two": 0x3FFF,
    "the largest": 0x7F7F,
    "infinity": 0x7F80,
}
both_signs = pytest.mark.parametrize("sign", [0, 0x8000])
every_kind = pytest.mark.parametrize("upper", UPPER.values(), ids=UPPER)
both_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def _float32(bits: Tensor) -> Tensor:
    """From 32 bits in an int64."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def _bits16(values: Tensor) -> Tensor:
    return values.view(torch.int16).to(torch.int64) & 0xFFFF


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


def _at_random(values: Tensor, number: int | Tensor, dtype: torch.dtype) -> Tensor:
    random = number if isinstance(number, Tensor) else torch.full(values.shape, number)
    out = torch.empty_like(values, dtype=dtype)
    round_stochastic(values, random.to(torch.int16), out)
    return out


# --- to nearest -------------------------------------------------------------------------------------------------------


@both_signs
@every_kind
def test_every_lower_half_rounds_to_nearest_with_ties_away_from_zero(upper, sign):
    values = _float32(((sign | upper) << 16) + LOWER)
    expected, nan = (sign | upper) + (LOWER >= 0x8000), values.isnan()
    assert torch.equal(_bits16(_rounded(values))[~nan], expected[~nan])
    assert _rounded(values)[nan].isnan().all()
    assert nan.sum() == (0xFFFF if upper == 0x7F80 else 0)


def test_float16_rounds_to_nearest_with_ties_away_from_zero():
    """Against exact fractions, at every spacing: points between a float16 and the next, and the ties."""
    low = torch.arange(0, 0x7C00, 259, dtype=torch.int16).view(torch.float16)
    high = (low.view(torch.int16) + 1).view(torch.float16).to(torch.float64).clamp(max=65536.0)
    low = low.to(torch.float64)
    for part in (0.0, 0.25, 0.49, 0.5, 0.51, 0.99):
        values = (low + (high - low) * part).to(torch.float32)
        for index, value in enumerate(values):
            exact, below, above = (Fraction(one.item()) for one in (value, low[index], high[index]))
            nearest = above if exact - below >= above - exact else below
            expected = float("inf") if nearest >= 65536 else float(nearest)
            assert _rounded(torch.stack([value, -value]), torch.float16).tolist() == [expected, -expected]


def test_float16_keeps_signs_infinities_and_nan():
    values = torch.tensor([0.0, -0.0, 1e-9, -1e-9, 2.0**-25, -(2.0**-25), 65519.0, 65520.0, -1e30, float("inf")])
    expected = [0.0, -0.0, 0.0, -0.0, 2.0**-24, -(2.0**-24), 65504.0, float("inf"), -float("inf"), float("inf")]
    assert _same(_rounded(values, torch.float16), torch.tensor(expected, dtype=torch.float16))
    assert _rounded(_float32(torch.tensor([0x7F800001, 0xFFFFFFFF])), torch.float16).isnan().all()


# --- remainders, and parameters that were changed ---------------------------------------------------------------------


def _comes_back(values: Tensor) -> bool:
    param, remainder = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    split(values, param, remainder)
    return _same(_joined(param, remainder), values) and _same(param, _rounded(values))


def test_the_remainder_leads_back_to_every_bit():
    for upper in UPPER.values():
        assert _comes_back(_float32((upper << 16) + LOWER))
        assert _comes_back(_float32(((0x8000 | upper) << 16) + LOWER))
    for lower in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        assert _comes_back(_float32((LOWER << 16) + lower))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3.0, float("inf"), -float("inf"), 3.3895e38, 1e-39])
def test_a_parameter_that_was_changed_keeps_the_lower_half_and_is_what_the_master_rounds_to(value):
    remainder = (LOWER - 0x8000).to(torch.int16)
    param = torch.full((1 << 16,), value, dtype=torch.bfloat16)
    master = _joined(param, remainder)
    assert _same(_rounded(master), param)
    # Below zero, and above infinity, there is no lower half to keep.
    kept = remainder >= 0 if value == 0 else remainder <= 0 if abs(value) == float("inf") else LOWER >= 0
    assert torch.equal(master.view(torch.int32).to(torch.int16)[kept], remainder[kept])
    assert _same(master[~kept], param.float()[~kept])


@both_signs
@pytest.mark.parametrize("upper", [value for value in UPPER.values() if value != 0x7F80])
def test_whether_a_parameter_was_changed_is_seen_for_every_lower_half(upper, sign):
    """Element by element: what it was rounded to is unchanged, and each of its two neighbours is a change."""
    values = _float32(((sign | upper) << 16) + LOWER)
    param = _rounded(values)
    assert rounds_to(values, param)
    for step in (1, -1):
        neighbour = ((_bits16(param) + step) & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16)
        for place in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
            changed, expected = param.clone(), values.clone()
            changed[place] = neighbour[place]
            expected[place] = changed[place].float()
            assert not rounds_to(values, changed), place
            assert _same(_followed(values, changed), expected)


@both_dtypes
def test_what_is_not_finite_or_very_small_is_unchanged_if_nobody_changed_it(dtype):
    values = torch.tensor([0.0, -0.0, 1e-45, -1e-40, float("inf"), -float("inf"), 3.4e38, float("nan"), 1.0])
    param = _rounded(values, dtype)
    assert _same(_followed(values, param), values)
    param[4] = values[4] = 2.0
    assert _same(_followed(values, param), values)


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
    if dtype == torch.float16:
        for times in (0.0, 0.25, 1.5, 700.125, 1023.5):  # of the least number
            out = _at_random(torch.full((1 << 16,), times * 2.0**-24), LOWER, dtype)
            assert abs(out.double().mean().item() * 2**24 - times) <= 2 / 65536


@both_dtypes
def test_stochastic_rounding_leaves_what_is_representable_and_never_invents_infinity(dtype):
    exact = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    beyond, largest = torch.tensor([3.4e38, -3.4e38, float("nan"), float("inf")]), torch.finfo(dtype).max
    for number in (0, 1, 0x8000, 0xFFFF):
        assert _same(_at_random(exact.float(), number, dtype), exact)
        expected = torch.tensor([largest, -largest, float("nan"), float("inf")], dtype=dtype)
        assert _same(_at_random(beyond, number, dtype), expected)


@both_dtypes
def test_stochastic_rounding_keeps_every_nan(dtype):
    """Added on its bits, one with all bits set would become zero, which nothing tells from a result."""
    for bits in (0x7FFFFFFF, 0xFFFFFFFF, 0x7FFF8001, 0xFFFF0001, 0x7F800001):
        values = torch.cat([_float32(torch.tensor([bits])), torch.ones(3)])
        assert _at_random(values, -1, dtype).isnan().tolist() == [True, False, False, False]
