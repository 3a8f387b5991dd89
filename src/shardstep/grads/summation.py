"""The order in which gradients are added up, on the CPU.

[Note: the order of a sum]
First the ranks of a host, in their order; then the hosts, by their lowest rank; then one division. An element's sum so
depends on its summands and on which ranks share a host, and on nothing else: not on the size of buckets, not on how or
when they were sent. Half precision is added up in float32 and rounded once. Native reduce-scatters promise no order.

Only additions of two numbers: fused forms round differently at the end of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardstep.comm.topology import Topology

_HALF = (torch.float16, torch.bfloat16)
_BLOCK = 2**18  # elements: a block of sums stays in a core's own cache


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype gradients that travel in ``dtype`` are added up."""
    return torch.float32 if dtype in _HALF else dtype


class Summation:
    """Adds up parts of buckets."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def host_sum(self, parts: Sequence[Tensor], out: Tensor) -> Tensor:
        """The sum of what the ranks of one host have, in their order; ``out`` has the dtype of sums."""
        first, *others = parts
        if not others:
            return out.copy_(first)
        if first.dtype == out.dtype:
            torch.add(first, others[0], out=out)
        else:
            out.copy_(first).add_(others[0])
        for part in others[1:]:
            out.add_(part)
        return out

    def mean(self, parts: Sequence[Tensor], divisor: int, out: Tensor) -> Tensor:
        """The mean of what every rank has, by rank, into ``out``, which may be one of the parts.

        In blocks that stay in the cache from the first addition to the division.
        """
        sums = _empty_sums(out, min(out.numel(), _BLOCK))
        later = torch.empty_like(sums) if len(self._topology.hosts) > 1 else sums
        for *block, result in zip(*(one.split(_BLOCK) for one in (*parts, out)), strict=True):
            total, partial = sums[: result.numel()], later[: result.numel()]
            for number, host in enumerate(self._topology.hosts):
                self.host_sum([block[rank] for rank in host], partial if number else total)
                if number:
                    total.add_(partial)
            _divide(total, divisor, result)
        return out

    def mean_of_pieces(self, pieces: Sequence[Tensor], divisor: int, out: Tensor) -> Tensor:
        """The mean from the sums of the hosts, in their order; each in one or several pieces, side by side."""
        total = out if sum_dtype(out.dtype) == out.dtype else _empty_sums(out, out.numel())
        filled, is_first = 0, True
        for piece in pieces:
            target = total[filled : filled + piece.numel()]
            if is_first:
                target.copy_(piece)
            else:
                target.add_(piece)
            filled += piece.numel()
            if filled == total.numel():
                filled, is_first = 0, False
        return _divide(total, divisor, out)


def _empty_sums(like: Tensor, numel: int) -> Tensor:
    return torch.empty(numel, dtype=sum_dtype(like.dtype), device=like.device)


def _divide(total: Tensor, divisor: int, out: Tensor) -> Tensor:
    if divisor == 1:
        return out if total is out else out.copy_(total)
    # By a power of two the product with the inverse is the same number, and much faster.
    scale, factor = (torch.mul, 1 / divisor) if divisor & (divisor - 1) == 0 else (torch.div, divisor)
    if total.dtype == out.dtype:
        return scale(total, factor, out=out)
    return out.copy_(scale(total, factor, out=total))
