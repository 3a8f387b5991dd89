"""float32 to 16 bits and back: to nearest with ties away from zero, which 16 more bits undo, and up or down at random.

[Note: why ties away from zero]
The bits of a bfloat16 are the upper half of those of a float32. Rounded to nearest with ties away from zero, the upper
half goes up by one exactly if the lower half, read as a signed number, is negative. So the lower half alone leads back.
With ties to even, which torch has, it would not: it does not say whether a tie went up or down.

Functions here know tensors and no parameters. They need memory as large as what they are given: give them a part at a
time (``spans``), and memory to work in (``Room``), or they allocate it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# At once: on the CPU what fits into its caches, elsewhere what is worth a launch.
_ON_CPU, _ELSEWHERE = 1 << 17, 1 << 22
_HALF_BITS = 13  # of a float32 that a float16 lacks
_LEAST_NORMAL, _PER_SPACING = 2.0**-14, 2.0**24  # of float16, and how often its least number goes into 1


def spans(numel: int, device: torch.device) -> Iterator[slice]:
    """Ranges to work through one after the other, so that little memory is needed besides."""
    size = _ON_CPU if device.type == "cpu" else _ELSEWHERE
    return (slice(start, min(start + size, numel)) for start in range(0, numel, size))


class Room:
    """Memory for intermediate results of one part. (What is allocated again and again is mapped anew each time.)

    Two rows; who uses one overwrites it. On accelerators, whose allocators keep memory, there is none.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        size = min(numel, _ON_CPU) if device.type == "cpu" else 0
        self.memory = torch.empty(2, size, dtype=torch.int32, device=device)

    def row(self, number: int, numel: int) -> Tensor:
        """int32, for ``numel`` elements."""
        if numel <= self.memory.shape[1]:
            return self.memory[number, :numel]
        return torch.empty(numel, dtype=torch.int32, device=self.memory.device)


def _is_finite(values: Tensor) -> bool:
    """On the CPU, whether all numbers are finite (or: surely so). Elsewhere it is not asked: the host would wait.

    A way round ``torch.where``, which on the CPU takes longer than all the rest.
    """
    return values.device.type == "cpu" and math.isfinite(values.sum().item())


# --- to nearest -------------------------------------------------------------------------------------------------------


def round_nearest(values: Tensor, out: Tensor, room: Room | None = None) -> None:
    """Put float32 ``values``, rounded to nearest with ties away from zero, into ``out`` (bfloat16 or float16).

    NaN stays NaN, infinities and the sign of zero stay. What is too large becomes infinite.
    """
    # With the lowest bit set a tie is none: torch's cast, which takes ties to even, goes up. It changes nothing else,
    # but would make a NaN of infinity.
    bits = values.view(torch.int32)
    target = torch.empty_like(bits) if room is None else room.row(0, bits.numel())
    marked = torch.bitwise_or(bits, 1, out=target).view(torch.float32)
    if values.device.type == "cpu":
        out.copy_(marked)
        if _is_finite(out):
            return
    out.copy_(torch.where(values.isfinite(), marked, values))


# --- with the rest kept -----------------------------------------------------------------------------------------------


def split(master: Tensor, param: Tensor, remainder: Tensor, room: Room | None = None) -> None:
    """Round ``master`` (float32) into ``param`` (bfloat16) and put what that lacks into ``remainder`` (int16)."""
    round_nearest(master, param, room)
    remainder.copy_(master.view(torch.int32))  # a cast of integers keeps the lower half


def join(param: Tensor, remainder: Tensor, master: Tensor) -> None:
    """The inverse of ``split``. If ``param`` has changed, ``master`` has the old lower half and rounds to it.

    Bits of every float32 but NaN come back as they were; NaN comes back as a NaN. A parameter that was set to zero or
    infinity may have a lower half that no number has which rounds to it: then the master is the parameter.
    """
    master.copy_(param).view(torch.int32).add_(remainder)
    if not _is_finite(master):
        torch.where(master.isnan(), param.to(torch.float32), master, out=master)


# --- at random --------------------------------------------------------------------------------------------------------


def round_stochastic(values: Tensor, random: Tensor, out: Tensor, room: Room | None = None) -> None:
    """Put float32 ``values`` into ``out`` (bfloat16 or float16), each rounded up or down by chance.

    Up with a probability that is the way to the lower neighbour in spacings, so that the expectation is the value
    itself. What is representable stays. Nothing finite becomes infinite. ``random``: int32, from 0 to 65535.
    """
    if out.dtype == torch.bfloat16:
        rounded = _up_or_down(values, random, 16, room)
        if values.device.type == "cpu":
            out.copy_(rounded)
            if _is_finite(out):
                return
    else:
        rounded = _half_stochastic(values, random)
    largest = torch.finfo(out.dtype).max
    out.copy_(torch.where(values.isfinite(), rounded.clamp_(-largest, largest), values))


def _up_or_down(values: Tensor, random: Tensor, count: int, room: Room | None = None) -> Tensor:
    """Add a random number of ``count`` bits to the magnitude and cut as many bits off."""
    least, bits = (1 << count) - 1, values.view(torch.int32)
    target = torch.empty_like(bits) if room is None else room.row(0, bits.numel())
    torch.add(bits, random if count == 16 else random.bitwise_and(least), out=target)
    return target.bitwise_and_(~least).view(torch.float32)


def _half_stochastic(values: Tensor, random: Tensor) -> Tensor:
    """A neighbour that float16 has (as float32, so larger ones, too)."""
    scaled = values.abs().mul_(_PER_SPACING)
    below = scaled.floor()
    up = scaled.sub_(below).mul_(1 << 16) > random
    small = below.add_(up).div_(_PER_SPACING).copysign_(values)
    return torch.where(values.abs() < _LEAST_NORMAL, small, _up_or_down(values, random, _HALF_BITS))


def differ(a: Tensor, b: Tensor) -> bool:
    """On the CPU, whether any bit differs. Elsewhere True: the host does not look."""
    if a.device.type != "cpu":
        return True
    words = torch.int64 if a.nbytes % 8 == a.storage_offset() % 4 == b.storage_offset() % 4 == 0 else torch.int16
    return not torch.equal(a.view(words), b.view(words))
