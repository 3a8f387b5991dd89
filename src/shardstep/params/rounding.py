"""float32 to 16 bits and back: to nearest with ties away from zero, which 16 more bits undo, and up or down at random.

[Note: why ties away from zero]
The bits of a bfloat16 are the upper half of those of a float32. Rounded to nearest with ties away from zero, the upper
half goes up by one exactly if the lower half, read as a signed number, is negative. So the lower half alone leads back.
With ties to even, which torch has, it would not: it does not say whether a tie went up or down.

Functions here know tensors and no parameters. They need memory as large as what they are given: give them a part at a
time, with memory to work in (``scratch``, int32), or they allocate it. (On the CPU what is allocated again and again is
mapped anew each time.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_HALF_BITS = 13  # of a float32 that a float16 lacks
_LEAST_NORMAL, _PER_SPACING = 2.0**-14, 2.0**24  # of float16, and how often its least number goes into 1
_LOWER_HALF = 0xFFFF
_TIE = 0x8000  # the lower half of a float32 that is half-way between two bfloat16


def _is_finite(values: Tensor) -> bool:
    """On the CPU, whether all numbers are finite (or: surely so). Elsewhere it is not asked: the host would wait.

    A way round ``torch.where``, which on the CPU takes longer than all the rest.
    """
    return values.device.type == "cpu" and math.isfinite(values.sum().item())


def _work_in(scratch: Tensor | None, like: Tensor) -> Tensor:
    return torch.empty_like(like, dtype=torch.int32) if scratch is None else scratch


# --- to nearest -------------------------------------------------------------------------------------------------------


def round_nearest(values: Tensor, out: Tensor, scratch: Tensor | None = None) -> None:
    """Put float32 ``values``, rounded to nearest with ties away from zero, into ``out`` (bfloat16 or float16).

    NaN stays NaN, infinities and the sign of zero stay. What is too large becomes infinite.
    """
    # With the lowest bit set a tie is none: torch's cast, which takes ties to even, goes up. It changes nothing else,
    # but would make a NaN of infinity.
    marked = torch.bitwise_or(values.view(torch.int32), 1, out=_work_in(scratch, values)).view(torch.float32)
    if values.device.type == "cpu":
        out.copy_(marked)
        if _is_finite(out):
            return
    out.copy_(torch.where(values.isfinite(), marked, values))


def rounds_to(values: Tensor, param: Tensor, scratch: Tensor | None = None) -> bool:
    """On the CPU, whether ``param`` is what ``values`` round to. Elsewhere False: the host does not look.

    Of a bfloat16 the question is whether the bits differ by what rounding takes away, or adds. (Two NaN may have other
    bits. Then it is False although nothing is wrong.)
    """
    if values.device.type != "cpu" or values.numel() == 0:
        return values.numel() == 0
    bits = _work_in(scratch, values)
    if param.dtype == torch.bfloat16:
        bits.view(torch.float32).copy_(param)
        least, most = torch.aminmax(bits.sub_(values.view(torch.int32)))
        return least.item() > -_TIE and most.item() <= _TIE
    rounded = torch.empty_like(param)
    round_nearest(values, rounded, bits)
    return torch.equal(rounded.view(torch.int16), param.view(torch.int16))


def follow(values: Tensor, param: Tensor, scratch: Tensor | None = None) -> None:
    """Where ``param`` is not what ``values`` round to, somebody has changed it: the value begins as it is."""
    if rounds_to(values, param, scratch):
        return
    rounded = torch.empty_like(param)
    round_nearest(values, rounded, scratch)
    changed = rounded.view(torch.int16) != param.view(torch.int16)
    torch.where(changed, param.to(torch.float32), values, out=values)


# --- with the rest kept -----------------------------------------------------------------------------------------------


def split(master: Tensor, param: Tensor, remainder: Tensor, scratch: Tensor | None = None) -> None:
    """Round ``master`` (float32) into ``param`` (bfloat16) and put what that lacks into ``remainder`` (int16)."""
    round_nearest(master, param, scratch)
    remainder.copy_(master.view(torch.int32))  # a cast of integers keeps the lower half


def join(param: Tensor, remainder: Tensor, master: Tensor, scratch: Tensor | None = None) -> None:
    """The inverse of ``split``. If ``param`` has changed, ``master`` has the old lower half and rounds to it.

    Bits of every float32 but NaN come back as they were; NaN comes back as a NaN. A parameter that was set to zero or
    infinity may have a lower half that no number has which rounds to it: then the master is the parameter.
    """
    lower = _work_in(scratch, master).copy_(remainder)  # (an addition of mixed integers would allocate it)
    master.copy_(param).view(torch.int32).add_(lower)
    if not _is_finite(master):
        torch.where(master.isnan(), param.to(torch.float32), master, out=master)


# --- at random --------------------------------------------------------------------------------------------------------


def round_stochastic(values: Tensor, random: Tensor, out: Tensor, scratch: Tensor | None = None) -> None:
    """Put float32 ``values`` into ``out`` (bfloat16 or float16), each rounded up or down by chance.

    Up with a probability that is the way to the lower neighbour in spacings, so that the expectation is the value
    itself. What is representable stays. Nothing finite becomes infinite. ``random``: int16, any 16 bits.
    """
    numbers = _work_in(scratch, values).copy_(random).bitwise_and_(_LOWER_HALF)  # from 0 to 65535
    if out.dtype == torch.bfloat16:
        rounded = _up_or_down(values, numbers, 16)
        if values.device.type == "cpu":
            out.copy_(rounded)
            # (Both: a NaN with all bits set becomes zero by the addition, a large number infinity.)
            if _is_finite(out) and _is_finite(values):
                return
    else:
        rounded = _half_stochastic(values, numbers)
    largest = torch.finfo(out.dtype).max
    out.copy_(torch.where(values.isfinite(), rounded.clamp_(-largest, largest), values))


def _up_or_down(values: Tensor, numbers: Tensor, count: int) -> Tensor:
    """Add ``count`` bits of the numbers to the magnitude and cut as many bits off, in the memory of the numbers."""
    least = (1 << count) - 1
    if count < 16:
        numbers.bitwise_and_(least)
    return numbers.add_(values.view(torch.int32)).bitwise_and_(~least).view(torch.float32)


def _half_stochastic(values: Tensor, numbers: Tensor) -> Tensor:
    """A neighbour that float16 has (as float32, so larger ones, too)."""
    scaled = values.abs().mul_(_PER_SPACING)
    below = scaled.floor()
    up = scaled.sub_(below).mul_(1 << 16) > numbers
    small = below.add_(up).div_(_PER_SPACING).copysign_(values)
    return torch.where(values.abs() < _LEAST_NORMAL, small, _up_or_down(values, numbers, _HALF_BITS))
