"""On a mesh of (replicate, shard), the second stage of a reduction: a shard is summed across the replicas.

A shard group has summed its own gradients when this begins. It happens to every bucket that all ranks of the mesh have
met, in the order in which they have, also on a rank that has no use for the result any more: others may have.

[Note: the order of a sum across replicas]
On the CPU a shard is cut into as many parts as there are replicas. Each replica gets all sums of its part and adds them
up in the order of the replicas, divides once, and gives the mean to the others. So an element's mean depends on nothing
but its summands, and all replicas have the same bits. What travels is 2(R - 1)/R of a shard. Sums of half precision
cross in float32 and are rounded once, at the end. Elsewhere it is one native all-reduce.
"""

from __future__ import annotations

from enum import Enum, auto

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.comm.collectives import Handle
from shardstep.comm.process_group import Group


class Stage(Enum):
    """What of a shard is under way across the replicas."""

    SUMS = auto()  # every part to the replica that adds it up
    MEANS = auto()  # and from there to all
    DONE = auto()


class AcrossReplicas:
    """One shard on its way across the replicas. Starts when it is made, in the same order on all ranks."""

    def __init__(self, group: Group, total: Tensor, divisor: float, dtype: torch.dtype) -> None:
        """``total``: the sum of this rank's shard group, which is scratch memory now. ``dtype``: of the mean."""
        self._group, self._divisor, self._dtype = group, divisor, dtype
        self._numel = total.numel()
        self._native = not collectives.sends_pairwise(group, total.device)
        # A rank that owns nothing of a bucket has nothing to send, and neither have its replicas.
        self._stage = Stage.SUMS if self._numel else Stage.DONE
        self._handle = self._send_sums(total) if self._numel else Handle((), total.to(dtype))

    def _send_sums(self, total: Tensor) -> Handle:
        if self._native:
            return collectives.sum_natively(self._group, total)
        count = self._group.world_size
        padding = -self._numel % count
        parts = torch.nn.functional.pad(total, (0, padding)) if padding else total
        return collectives.swap_rows(self._group, parts.view(count, -1))

    def advance(self, patience: float | None) -> bool:
        """Whether the mean is there. False: a rank did not come in time; None waits as long as the group does."""
        while self._stage is not Stage.DONE:
            if patience is not None and not self._native and not self._handle.wait_for(patience):
                return False
            self._handle.wait()
            self._next()
        return True

    def _next(self) -> None:
        rows = self._handle.memory
        assert rows is not None, "what is under way has memory"
        if self._native:
            self._handle, self._stage = Handle((), rows.div_(self._divisor).to(self._dtype)), Stage.DONE
        elif self._stage is Stage.SUMS:
            mean = _sum_in_order(rows).div_(self._divisor).to(self._dtype)
            self._handle, self._stage = collectives.gather_rows(self._group, mean), Stage.MEANS
        else:
            self._handle, self._stage = Handle((), rows.view(-1)[: self._numel]), Stage.DONE

    @property
    def mean(self) -> Tensor:
        """The mean over all ranks of the mesh, when it is there."""
        if self._stage is not Stage.DONE or self._handle.memory is None:
            raise AssertionError(f"a shard that is in {self._stage} has no mean yet")
        return self._handle.memory

    def tensors(self) -> list[Tensor]:
        """The memory of what is under way."""
        return [] if self._handle.memory is None else [self._handle.memory]


def _sum_in_order(rows: Tensor) -> Tensor:
    """See the note above. Into the first row, by additions of two: fused forms round differently at a vector's end."""
    first, *others = rows
    for row in others:
        first.add_(row)
    return first
