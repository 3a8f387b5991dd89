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


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype gradients that travel in ``dtype`` are added up."""
    return torch.float32 if dtype in _HALF else dtype


class Summation:
    """Adds up parts of buckets. Keeps a little memory for sums that are not the result yet."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._scratch: dict[tuple[str, torch.dtype], Tensor] = {}

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
        """The mean of what every rank has, by rank, into ``out``."""
        total = self._total(out)
        for number, host in enumerate(self._topology.hosts):
            partial = total if number == 0 else self._buffer("host", total)
            self.host_sum([parts[rank] for rank in host], partial)
            if number:
                total.add_(partial)
        return _divide(total, divisor, out)

    def mean_of_pieces(self, pieces: Sequence[Tensor], divisor: int, out: Tensor) -> Tensor:
        """The mean from the sums of the hosts, in their order; each in one or several pieces, side by side."""
        total, filled, is_first = self._total(out), 0, True
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

    def _total(self, out: Tensor) -> Tensor:
        """Where to add up: in the result itself, unless it is of half precision."""
        return out if sum_dtype(out.dtype) == out.dtype else self._buffer("total", out)

    def _buffer(self, use: str, like: Tensor) -> Tensor:
        dtype = sum_dtype(like.dtype)
        kept = self._scratch.get((use, dtype))
        if kept is None or kept.numel() < like.numel() or kept.device != like.device:
            kept = self._scratch[use, dtype] = torch.empty(like.numel(), dtype=dtype, device=like.device)
        return kept[: like.numel()]


def _divide(total: Tensor, divisor: int, out: Tensor) -> Tensor:
    if divisor != 1:
        total.div_(divisor)
    return out if total is out else out.copy_(total)
