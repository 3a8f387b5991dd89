"""float32 to 16 bits and back: to nearest with ties away from zero, which 16 more bits undo, and up or down at random.

[Note: why ties away from zero]
The bits of a bfloat16 are the upper half of those of a float32. Rounded to nearest with ties away from zero, the upper
half goes up by one exactly if the lower half, read as a signed number, is negative. So the lower half alone leads back.
With ties to even, which torch has, it would not: it does not say whether a tie went up or down.

Functions here know tensors of any shape and no parameters. What they allocate is as large as what they are given: give
them a part at a time (``spans``).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# At once: on the CPU what fits into its caches, elsewhere what is worth a launch.
_ON_CPU, _ELSEWHERE = 1 << 16, 1 << 22
_HALF_BITS = 13  # of a float32 that a float16 lacks
_LEAST_NORMAL, _PER_SPACING = 2.0**-14, 2.0**24  # of float16, and how often its least number goes into 1


def spans(numel: int, device: torch.device) -> Iterator[slice]:
    """Ranges to work through one after the other, so that little memory is needed besides."""
    size = _ON_CPU if device.type == "cpu" else _ELSEWHERE
    return (slice(start, min(start + size, numel)) for start in range(0, numel, size))


# --- to nearest -------------------------------------------------------------------------------------------------------


def round_nearest(values: Tensor, out: Tensor) -> None:
    """Put float32 ``values``, rounded to nearest with ties away from zero, into ``out`` (bfloat16 or float16).

    NaN stays NaN, infinities and the sign of zero stay. What is too large becomes infinite.
    """
    if out.dtype == torch.bfloat16:
        # The lowest bit breaks a tie upwards, and changes nothing else: not infinities, whose lower half is zero.
        bits = values.view(torch.int32)
        out.copy_((bits >> 15).bitwise_and_(1).bitwise_or_(bits).view(torch.float32))
    else:
        out.copy_(_half_nearest(values))


def _half_nearest(values: Tensor) -> Tensor:
    """The nearest numbers that float16 has (as float32, so larger ones, too)."""
    bits = values.view(torch.int32)
    normal = bits.add(1 << (_HALF_BITS - 1)).bitwise_and_(-1 << _HALF_BITS).view(torch.float32)
    scaled = values.abs().mul_(_PER_SPACING)
    below = scaled.floor()
    small = below.add_(scaled.sub_(below).ge_(0.5)).div_(_PER_SPACING).copysign_(values)
    return _by_size(values, small, normal)


def _by_size(values: Tensor, small: Tensor, normal: Tensor) -> Tensor:
    """Of two results: below the least normal float16 the first. What is not finite stays as it is."""
    rounded = torch.where(values.abs() < _LEAST_NORMAL, small, normal)
    return torch.where(values.isfinite(), rounded, values)


# --- with the rest kept -----------------------------------------------------------------------------------------------


def split(master: Tensor, param: Tensor, remainder: Tensor) -> None:
    """Round ``master`` (float32) into ``param`` (bfloat16) and put what that lacks into ``remainder`` (int16)."""
    round_nearest(master, param)
    remainder.copy_(master.view(torch.int32))  # a cast of integers keeps the lower half


def join(param: Tensor, remainder: Tensor, master: Tensor) -> None:
    """The inverse of ``split``. If ``param`` has changed, ``master`` has the old lower half and rounds to it.

    Bits of every float32 but NaN come back as they were; NaN comes back as a NaN. A parameter that was set to zero or
    infinity may have a lower half that no number has which rounds to it: then the master is the parameter.
    """
    bits = master.view(torch.int32)
    bits.copy_(param.view(torch.int16)).bitwise_left_shift_(16).add_(remainder)
    torch.where(master.isnan(), param.to(torch.float32), master, out=master)


# --- at random --------------------------------------------------------------------------------------------------------


def round_stochastic(values: Tensor, random: Tensor, out: Tensor) -> None:
    """Put float32 ``values`` into ``out`` (bfloat16 or float16), each rounded up or down by chance.

    Up with a probability that is the way to the lower neighbour in spacings, so that the expectation is the value
    itself. What is representable stays. Nothing finite becomes infinite. ``random``: int32, of which 16 bits count.
    """
    if out.dtype == torch.bfloat16:
        rounded = _up_or_down(values, random, 16)
    else:
        scaled = values.abs().mul_(_PER_SPACING)
        below = scaled.floor()
        up = scaled.sub_(below).mul_(1 << 16) > random.bitwise_and(0xFFFF)
        small = below.add_(up).div_(_PER_SPACING).copysign_(values)
        rounded = _by_size(values, small, _up_or_down(values, random, _HALF_BITS))
    largest = torch.finfo(out.dtype).max
    bounded = torch.where(values.isfinite(), rounded.clamp_(-largest, largest), values)
    out.copy_(bounded)


def _up_or_down(values: Tensor, random: Tensor, count: int) -> Tensor:
    """Add a random number of ``count`` bits to the magnitude and cut as many bits off."""
    bits = random.bitwise_and((1 << count) - 1).add_(values.view(torch.int32))
    return bits.bitwise_and_(-1 << count).view(torch.float32)
