"""Where a sum of gradients is divided to become their mean, if the backend adds up: before, in the reduction, or after.

Sums of float16 overflow where their mean does not. So there the division comes first, as in DDP: by a power of two that
is as large as the divisor, which costs no digits, and what is left of it afterwards. Other dtypes have room for a sum,
and are divided once: by the reduction itself where that can be, else afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Division(NamedTuple):
    before: int  # divide what is sent
    in_reduction: bool  # by the number of ranks that reduce
    after: float  # divide what arrived


def division(dtype: torch.dtype, divisor: int, ranks: int, can_average: bool) -> Division:
    """How to divide a sum over ``ranks`` ranks by ``divisor``: another number on a mesh, and in some Join contexts."""
    if divisor == 1:
        return Division(1, False, 1)
    if dtype == torch.float16:
        before = 1 << (divisor - 1).bit_length()  # the first power of two that is not smaller
        return Division(before, False, divisor / before)
    if can_average and divisor % ranks == 0:
        return Division(1, True, divisor // ranks)
    return Division(1, False, divisor)
