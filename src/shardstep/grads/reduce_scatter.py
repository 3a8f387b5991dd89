"""The reduce-scatter of one part of a bucket of gradients: pack it, give every rank its share, add up.

==========================  ============================================================================
where the gradients are     how they are reduced
==========================  ============================================================================
CPU, gloo, memory shared    ``ThroughSharedMemory``: every rank packs its part into a slot of its host.
                            Several hosts: the ranks of a host add up what owners on other hosts need
                            of it, each its share, and send them that: it crosses once per direction
CPU, gloo, otherwise        ``BetweenPairs``: packed once, then messages between every pair of ranks
other backends              ``Native``: ``reduce_scatter_tensor``, or one ``reduce`` per owner
==========================  ============================================================================

The order of a sum is the same in the first two (see ``summation.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.comm.collectives import Handle
from shardstep.comm.process_group import Group
from shardstep.comm.topology import Topology
from shardstep.grads.bucket_part import BucketPart
from shardstep.grads.summation import Summation, sum_dtype
from shardstep.layout.shares import share


class ReduceScatter(NamedTuple):
    """A part of a bucket under way."""

    part: BucketPart
    reports: Messages | None  # what every rank says about it; None on other backends than gloo
    packed: Tensor  # what this rank has of it
    data: Handle
    received: list[Tensor]  # what is added up: everybody's of my share, by rank; sums of hosts; or the sum
    slot: Tensor | None = None  # of shared memory


class Messages(Protocol):
    """A short message of every rank, on its way."""

    @property
    def is_done(self) -> bool: ...

    @property
    def messages(self) -> list[bytes]: ...

    def wait(self) -> None: ...

    def wait_for(self, seconds: float) -> bool: ...


Report = Callable[[bytes], Messages]  # tell all ranks something, and start to hear what they tell


class Transport(ABC):
    """How parts of buckets are reduced. Stateless: all that is under way is in what ``start`` returns."""

    reports = True  # whether a report goes along
    can_wait_again = False  # whether the data may be waited for with a limit

    def __init__(self, group: Group, report: Report, summation: Summation) -> None:
        self._group = group
        self._report = report
        self._summation = summation

    @abstractmethod
    def start(
        self, part: BucketPart, source: Sequence[Tensor | None] | ReduceScatter, report: bytes, tag: int
    ) -> ReduceScatter:
        """Pack a part of these gradients, start to give everybody their share, and tell about it.

        ``source`` may be a part that was not met: then it is reported once more. ``tag``: the same for what is to meet.
        """

    def exchange(self, scatter: ReduceScatter) -> ReduceScatter:
        """All ranks are in the same bucket, as they report: start what could not be started before.

        All ranks do it for the same parts in the same order. One that has left backward does it when it comes again, so
        the others must be able to wait for it in vain, and once more.
        """
        return scatter

    def finish(self, scatter: ReduceScatter, divisor: int, out: Tensor) -> None:
        """Put the mean of my share into ``out``, of the dtype of the part or of its sums. The data has arrived."""
        self._summation.mean(scatter.received, divisor, out)

    def mine(self, part: BucketPart) -> tuple[int, int]:
        """The range of the bucket that this rank gets the sum of."""
        return part.ranges[self._group.rank]


class BetweenPairs(Transport):
    """Messages between every pair of ranks."""

    def start(
        self, part: BucketPart, source: Sequence[Tensor | None] | ReduceScatter, report: bytes, tag: int
    ) -> ReduceScatter:
        if isinstance(source, ReduceScatter):
            return source._replace(reports=self._report(report))
        packed = part.pack(source, torch.empty(part.numel, dtype=part.dtype, device="cpu"))
        low, high = part.spans[self._group.rank]
        received = [
            packed[low:high] if rank == self._group.rank else packed.new_empty(high - low)
            for rank in range(self._group.world_size)
        ]
        outgoing = [packed[start:stop].view(torch.uint8) for start, stop in part.spans]
        data = collectives.swap_shards(self._group, outgoing, [one.view(torch.uint8) for one in received], tag)
        return ReduceScatter(part, self._report(report), packed, data, received)


class ThroughSharedMemory(Transport):
    """Slots in the memory of each host; between hosts the sums of each."""

    can_wait_again = True

    def __init__(
        self,
        group: Group,
        report: Report,
        summation: Summation,
        topology: Topology,
        between: Group | None,
        take_slot: Callable[[], Tensor],
    ) -> None:
        """``between``: a process group for what goes from host to host; None: there is one host."""
        super().__init__(group, report, summation)
        self._between = between
        self._topology = topology
        self._take_slot = take_slot

    def start(
        self, part: BucketPart, source: Sequence[Tensor | None] | ReduceScatter, report: bytes, tag: int
    ) -> ReduceScatter:
        slot = self._take_slot()
        packed = self._written(slot, part)[self._topology.place]
        if isinstance(source, ReduceScatter):
            packed.copy_(source.packed)
        else:
            part.pack(source, packed)
        return ReduceScatter(part, self._report(report), packed, Handle(()), [], slot)

    def exchange(self, scatter: ReduceScatter) -> ReduceScatter:
        assert scatter.slot is not None
        written, part = self._written(scatter.slot, scatter.part), scatter.part
        low, high = part.spans[self._group.rank]
        mine = [one[low:high] for one in written]
        if self._between is None:
            return scatter._replace(received=mine)
        outgoing, sizes = self._sums_for_others(written, part)
        topology, incoming = self._topology, [0] * self._group.world_size
        for host in topology.other_hosts:
            for place, rank in enumerate(host):
                first, last = share(high - low, len(host), place)
                incoming[rank] = last - first
        data, pieces = collectives.swap_pieces(self._between, outgoing, sizes, incoming)
        here = self._summation.host_sum(mine, written[0].new_empty(high - low, dtype=sum_dtype(part.dtype)))
        sums = [[here] if host == topology.host else [pieces[rank] for rank in host] for host in topology.hosts]
        return scatter._replace(data=data, received=[piece for pieces in sums for piece in pieces])

    def finish(self, scatter: ReduceScatter, divisor: int, out: Tensor) -> None:
        if self._between is None:
            self._summation.mean(scatter.received, divisor, out)
        else:
            self._summation.mean_of_pieces(scatter.received, divisor, out)

    def _sums_for_others(self, written: Sequence[Tensor], part: BucketPart) -> tuple[Tensor, list[int]]:
        """What my host has for the ranks of other hosts, the share of it that I add up: side by side, and the sizes."""
        topology = self._topology
        shares = [
            (low, *share(high - low, len(written), topology.place)) if owner not in topology.host else (0, 0, 0)
            for owner, (low, high) in enumerate(part.spans)
        ]
        sizes = [last - first for _, first, last in shares]
        sums = written[0].new_empty(sum(sizes), dtype=sum_dtype(part.dtype))
        for (low, first, last), out in zip(shares, sums.split(sizes), strict=True):
            if first < last:
                self._summation.host_sum([one[low + first : low + last] for one in written], out)
        return sums, sizes

    def _written(self, slot: Tensor, part: BucketPart) -> list[Tensor]:
        """A slot has room for the whole part of every rank of the host, side by side."""
        size = slot.numel() // len(self._topology.host) // 64 * 64
        starts = (place * size for place in range(len(self._topology.host)))
        return [slot[start : start + part.nbytes].view(part.dtype) for start in starts]


class Native(Transport):
    """The backend's own reduce-scatter, in the order that it chooses, on the gradients' device."""

    reports = False

    def __init__(self, group: Group, report: Report, summation: Summation, device: torch.device) -> None:
        super().__init__(group, report, summation)
        self._device = device

    def start(
        self, part: BucketPart, source: Sequence[Tensor | None] | ReduceScatter, report: bytes, tag: int
    ) -> ReduceScatter:
        gradients = [] if isinstance(source, ReduceScatter) else source
        shard = part.bucket.equal_shard
        numel = part.numel if shard is None else shard * self._group.world_size
        buffer = torch.empty(numel, dtype=part.dtype, device=self._device)
        part.pack(gradients, buffer[: part.numel])
        buffer[part.numel :].zero_()
        bounds = part.spans if shard is None else [(r * shard, (r + 1) * shard) for r in range(len(part.spans))]
        shards = [buffer[low:high] for low, high in bounds]
        total = torch.empty_like(shards[self._group.rank])
        handle = collectives.reduce_shards(self._group, buffer, shards, total)
        low, high = self.mine(part)
        return ReduceScatter(part, None, buffer, handle, [total[: high - low]])

    def finish(self, scatter: ReduceScatter, divisor: int, out: Tensor) -> None:
        (total,) = scatter.received
        self._summation.mean_of_pieces([total], divisor, out)
