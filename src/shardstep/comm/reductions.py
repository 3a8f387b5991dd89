"""Reduce-scatters of backends that have them, and what each of these backends can do in one call.

On accelerators everything here only enqueues: a handle that is waited for orders the current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardstep.comm import torch_versions
from shardstep.comm.collectives import Handle
from shardstep.comm.process_group import Group


class ReduceAbilities(NamedTuple):
    """What a backend can do in one call."""

    averages: bool  # divide a sum by the number of ranks
    takes_unequal: bool  # scatter shares of different sizes, averaged if it can average


# Of these it is known; others are tried, once.
_KNOWN_ABILITIES = {"nccl": ReduceAbilities(averages=True, takes_unequal=True)}


def abilities_of(group: Group, device: torch.device) -> ReduceAbilities:
    """Collective. What the backend that serves ``device`` can do: asked of the backend, not of the kind of device."""
    known = _KNOWN_ABILITIES.get(group.backends.get(device.type, ""))
    if known is not None or group.world_size == 1:
        return known or ReduceAbilities(averages=False, takes_unequal=False)
    ranks = range(group.world_size)
    numbers = torch.ones(group.world_size, dtype=torch.float32, device=device)
    averaged = _tries(lambda out: reduce_scatter(group, numbers, out, averages=True), numbers.new_empty(1), 1.0)
    shares = [torch.ones(1 + rank % 2, dtype=torch.float32, device=device) for rank in ranks]
    mine = torch.empty_like(shares[group.rank])
    expected = 1.0 if averaged else float(group.world_size)
    unequal = _tries(lambda out: reduce_scatter_unequal(group, shares, out, averaged), mine, expected)
    return ReduceAbilities(averaged, unequal)


def _tries(call: Callable[[Tensor], Handle], out: Tensor, expected: float) -> bool:
    """Whether a call does not fail, and delivers what it should."""
    try:
        call(out).wait()
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return bool(((out - expected).abs() < 1e-3).all())  # a mean may be a sum of thirds


def reduce_scatter(group: Group, buffer: Tensor, out: Tensor, averages: bool) -> Handle:
    """Start to sum a buffer of equal shares over the ranks; this rank's share of the sum, or mean, goes to ``out``.

    The order of the sum is the backend's. The buffer may be written again when the handle was waited for.
    """
    op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
    work = torch_versions.reduce_scatter(
        _in_real_numbers(out), _in_real_numbers(buffer), op, group=group.process_group, async_op=True
    )
    return Handle((work,) if work is not None else (), buffer)


def reduce_scatter_unequal(group: Group, shares: Sequence[Tensor], out: Tensor, averages: bool) -> Handle:
    """The same for shares of different sizes (one may be empty): one call, which the backend has grouped."""
    # A number for those who get nothing: not every backend likes empty messages.
    filled = [_in_real_numbers(share if share.numel() else share.new_zeros(1)) for share in shares]
    target = out if out.numel() else out.new_empty(1)
    op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
    work = dist.reduce_scatter(_in_real_numbers(target), filled, op, group=group.process_group, async_op=True)
    return Handle((work,) if work is not None else (), target)


def reduce_each(group: Group, shares: Sequence[Tensor], out: Tensor) -> Handle:
    """The same with one sum per owner, for backends that cannot do it in one call."""
    works = []
    for rank, share in enumerate(map(_in_real_numbers, shares)):
        if share.numel():
            total = _in_real_numbers(out).copy_(share) if rank == group.rank else share
            works.append(dist.reduce(total, group=group.process_group, group_dst=rank, async_op=True))
    return Handle(tuple(work for work in works if work is not None), out)


def _in_real_numbers(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
