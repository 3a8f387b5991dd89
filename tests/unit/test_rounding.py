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
    "denormal": 0x0045,
    "the largest denormal": 0x007F,
    "the least normal": 0x0080,
    "one": 0x3F80,
    "odd": 0x4049,
    "before a power of two": 0x3FFF,
    "the largest": 0x7F7F,
    "infinity": 0x7F80,
}


def _float32(bits: Tensor) -> Tensor:
    """From 32 bits in an int64."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def _bits16(values: Tensor) -> Tensor:
    return values.view(torch.int16).to(torch.int64) & 0xFFFF


def _bits32(values: Tensor) -> Tensor:
    return values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(values.shape, dtype=dtype)
    round_nearest(values, out)
    return out


@pytest.mark.parametrize("sign", [0, 0x8000])
@pytest.mark.parametrize("upper", UPPER.values(), ids=UPPER)
def test_every_lower_half_rounds_to_nearest_with_ties_away_from_zero(upper, sign):
    bits = ((sign | upper) << 16) + LOWER
    values = _float32(bits)
    expected = (sign | upper) + (LOWER >= 0x8000)
    nan = values.isnan()
    rounded = _rounded(values, torch.bfloat16)
    assert torch.equal(_bits16(rounded)[~nan], expected[~nan])
    assert rounded[nan].isnan().all()
    assert nan.sum() == (0xFFFF if upper == 0x7F80 else 0)


def test_ties_to_even_as_torch_has_them_are_other_numbers():
    """The negative control: the tests above can tell the two ways of rounding apart."""
    tie = _float32(torch.tensor([0x3F808000]))
    assert _bits16(tie.to(torch.bfloat16)).item() == 0x3F80
    assert _bits16(_rounded(tie, torch.bfloat16)).item() == 0x3F81


@pytest.mark.parametrize("sign", [0, 0x8000])
@pytest.mark.parametrize("upper", UPPER.values(), ids=UPPER)
def test_the_remainder_leads_back_to_every_bit(upper, sign):
    values = _float32(((sign | upper) << 16) + LOWER)
    param, remainder = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    split(values, param, remainder)
    back = torch.empty_like(values)
    join(param, remainder, back)
    nan = values.isnan()
    assert torch.equal(_bits32(back)[~nan], _bits32(values)[~nan])
    assert back[nan].isnan().all()


def test_every_upper_half_comes_back_too():
    for lower in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = _float32((LOWER << 16) + lower)
        param, remainder = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
        split(values, param, remainder)
        back = torch.empty_like(values)
        join(param, remainder, back)
        nan = values.isnan()
        assert torch.equal(_bits32(back)[~nan], _bits32(values)[~nan])
        assert back[nan].isnan().all()
        assert param[nan].isnan().all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3.0, float("inf"), -float("inf"), 3.3895e38, 1e-39])
def test_a_parameter_that_was_changed_keeps_the_lower_half_and_is_what_the_master_rounds_to(value):
    remainder = (LOWER - 0x8000).to(torch.int16)
    param = torch.full((1 << 16,), value, dtype=torch.bfloat16)
    master = torch.empty(1 << 16)
    join(param, remainder, master)
    assert torch.equal(_bits16(_rounded(master, torch.bfloat16)), _bits16(param))
    # Below zero, and above infinity, there is no lower half to keep.
    kept = remainder >= 0 if value == 0 else remainder <= 0 if value in (float("inf"), -float("inf")) else LOWER >= 0
    assert torch.equal((_bits32(master) & 0xFFFF)[kept], (remainder.to(torch.int64) & 0xFFFF)[kept])
    assert torch.equal(_bits32(master)[~kept], _bits16(param)[~kept] << 16)


@pytest.mark.parametrize("sign", [0, 0x8000])
@pytest.mark.parametrize("upper", [value for value in UPPER.values() if value != 0x7F80])
def test_whether_a_parameter_was_changed_is_seen_for_every_lower_half(upper, sign):
    """Element by element: what it was rounded to is unchanged, and each of its two neighbours is a change."""
    values = _float32(((sign | upper) << 16) + LOWER)
    param = _rounded(values, torch.bfloat16)
    assert rounds_to(values, param)
    for step in (1, -1):
        neighbour = ((_bits16(param) + step) & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16)
        for place in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
            changed = param.clone()
            changed[place] = neighbour[place]
            assert not rounds_to(values, changed), place
            followed = values.clone()
            follow(followed, changed)
            expected = values.clone()
            expected[place] = changed[place].to(torch.float32)
            equal = (_bits32(followed) == _bits32(expected)) | (followed.isnan() & expected.isnan())
            assert equal.all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_not_finite_or_very_small_is_unchanged_if_nobody_changed_it(dtype):
    values = torch.tensor([0.0, -0.0, 1e-45, -1e-40, float("inf"), -float("inf"), 3.4e38, float("nan"), 1.0])
    param = _rounded(values, dtype)
    followed = values.clone()
    follow(followed, param)
    nan = values.isnan()
    assert torch.equal(_bits32(followed)[~nan], _bits32(values)[~nan])
    assert followed[nan].isnan().all()
    param[4] = 2.0
    follow(followed, param)
    assert followed[4] == 2.0
    assert torch.equal(_bits32(followed)[5:7], _bits32(values)[5:7])


def test_float16_rounds_to_nearest_with_ties_away_from_zero():
    """Against exact fractions, at every spacing: around every float16 the points between, and the ties."""
    halves = torch.arange(0, 0x7C00, 37, dtype=torch.int16).view(torch.float16)
    following = (halves.view(torch.int16) + 1).view(torch.float16).to(torch.float64).clamp(max=65536.0)
    low, high = halves.to(torch.float64), following
    for part in (0.0, 0.25, 0.49, 0.5, 0.51, 0.99):
        values = (low + (high - low) * part).to(torch.float32)
        for sign in (1, -1):
            rounded = _rounded(values * sign, torch.float16)
            for index in range(0, len(values), 7):
                exact = Fraction(values[index].item())
                below, above = Fraction(low[index].item()), Fraction(high[index].item())
                nearest = above if exact - below >= above - exact else below
                expected = float("inf") if nearest >= 65536 else float(nearest)
                assert rounded[index].item() == sign * expected, (values[index], part)


def test_float16_keeps_signs_infinities_and_nan():
    values = torch.tensor([0.0, -0.0, 1e-9, -1e-9, 2.0**-25, -(2.0**-25), 65519.0, 65520.0, -1e30, float("inf")])
    rounded = _rounded(values, torch.float16)
    expected = [0.0, -0.0, 0.0, -0.0, 2.0**-24, -(2.0**-24), 65504.0, float("inf"), -float("inf"), float("inf")]
    assert torch.equal(_bits16(rounded), _bits16(torch.tensor(expected, dtype=torch.float16)))
    for bits in (0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001):
        assert _rounded(_float32(torch.tensor([bits])), torch.float16).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_goes_up_as_often_as_it_should(dtype):
    """With each of the 65536 random numbers once: the share that goes up is exact to one in 65536 (float16: 8192)."""
    random = LOWER.to(torch.int16)
    spacing = 2.0 ** (-7 if dtype == torch.bfloat16 else -10)
    for part in (0.0, 0.1, 0.5, 0.75):
        for sign in (1, -1):
            values = torch.full((1 << 16,), sign * (1 + part * spacing))
            out = torch.empty_like(values, dtype=dtype)
            round_stochastic(values, random, out)
            assert set(out.unique().tolist()) <= {sign * 1.0, sign * (1 + spacing)}
            assert abs((out != sign).double().mean().item() - part) <= 2 / 65536 * 8


def test_stochastic_rounding_of_small_float16():
    random = LOWER.to(torch.int16)
    for times in (0.0, 0.25, 1.5, 700.125, 1023.5):
        values = torch.full((1 << 16,), times * 2.0**-24)
        out = torch.empty_like(values, dtype=torch.float16)
        round_stochastic(values, random, out)
        assert abs(out.double().mean().item() * 2**24 - times) <= 2 / 65536


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_leaves_what_is_representable_and_never_invents_infinity(dtype):
    exact = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = exact[~exact.isnan()]
    for number in (0, 1, 0x8000, 0xFFFF):
        random = torch.full(finite.shape, number, dtype=torch.int32).to(torch.int16)
        out = torch.empty_like(finite)
        round_stochastic(finite.to(torch.float32), random, out)
        assert torch.equal(_bits16(out), _bits16(finite))
        beyond = torch.tensor([3.4e38, -3.4e38, float("nan"), float("inf")])
        out = torch.empty(4, dtype=dtype)
        round_stochastic(beyond, random[:4], out)
        largest = torch.finfo(dtype).max
        assert out[:2].tolist() == [largest, -largest]
        assert out[2].isnan()
        assert out[3].isinf()
    nan = _float32(torch.cat([0x7F800001 + 37 * torch.arange(1000), 0xFFFFFFFF - torch.arange(1000)]))
    out = torch.empty_like(nan, dtype=dtype)
    round_stochastic(nan, torch.full(nan.shape, -1, dtype=torch.int16), out)
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7FFF8001, 0xFFFF0001])
def test_stochastic_rounding_keeps_a_nan_to_whose_bits_nothing_can_be_added(bits, dtype):
    """Added on the bits it would become zero, which alone among numbers nothing tells from a result."""
    values = torch.cat([_float32(torch.tensor([bits])), torch.ones(3)])
    out = torch.empty_like(values, dtype=dtype)
    round_stochastic(values, torch.full(values.shape, -1, dtype=torch.int16), out)
    assert out.isnan().tolist() == [True, False, False, False]
