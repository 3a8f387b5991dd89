"""The reduce-scatter of one part of a bucket of gradients: pack it, give every rank its share, add up.

==========================  ============================================================================
where the gradients are     how they are reduced
==========================  ============================================================================
CPU, gloo, memory shared    ``ThroughSharedMemory``: every rank packs what others own into a slot of its host.
                            Several hosts: the ranks of a host add up what owners on other hosts need
                            of it, each its share, and send them that: it crosses once per direction
CPU, gloo, otherwise        ``BetweenPairs``: packed once, then messages between every pair of ranks
other backends              ``Native`` (``native.py``): one reduce-scatter of the backend
==========================  ============================================================================

The order of a sum is the same in the first two (see ``summation.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
    packed: Tensor  # what this rank has of it, for the others
    own: Tensor  # what this rank has of its own share
    data: Handle
    received: list[Tensor]  # what is added up: everybody's of my share, by rank; sums of hosts; or the sum
    slot: Tensor | None = None  # of shared memory
    still_divide: float | None = None  # what is left to divide by; None: nothing was divided yet

    def tensors(self) -> list[Tensor]:
        """Its memory, without that of its own share, which is the shard's."""
        return [self.packed, *(one for one in self.received if one is not self.own)]

    def without_memory(self) -> ReduceScatter:
        """What is left to know of it when all is enqueued that is to be done with its memory."""
        return self._replace(packed=_NOTHING, own=_NOTHING, received=[])


_NOTHING = torch.empty(0)


class Messages(Protocol):
    """A short message of every rank, on its way."""

    @property
    def is_done(self) -> bool: ...

    @property
    def messages(self) -> list[bytes]: ...

    def wait(self) -> None: ...

    def wait_for(self, seconds: float) -> bool: ...


Report = Callable[[bytes], Messages]  # tell all ranks something, and start to hear what they tell
Source = Sequence[Tensor | None] | ReduceScatter


class Sending(NamedTuple):
    """What goes along with a part."""

    report: bytes
    tag: int  # the same for what is to meet
    divisor: int  # by which the sum will be divided


class Transport(ABC):
    """How parts of buckets are reduced. Stateless: all that is under way is in what ``start`` returns."""

    reports = True  # whether a report goes along
    can_wait_again = False  # whether the data may be waited for with a limit
    enqueues = False  # whether waiting is a matter of streams, so that all can be launched when the part is sent

    def __init__(self, group: Group, report: Report, summation: Summation) -> None:
        self._group = group
        self._report = report
        self._summation = summation

    @abstractmethod
    def start(self, part: BucketPart, source: Source, own: Tensor, sending: Sending) -> ReduceScatter:
        """Pack a part of these gradients, start to give everybody their share, and tell about it.

        ``source`` may be a part that was not met: then it is reported once more. ``own``: memory for this rank's share,
        the same one again if it is reported again.
        """

    def share_numel(self, part: BucketPart) -> int:
        """How many elements the memory for this rank's share should have, so that what arrives fits there."""
        low, high = self.mine(part)
        return high - low

    def on_stream(self) -> AbstractContextManager[None]:
        """Where what is done with arriving data belongs: on accelerators a stream beside the computation."""
        return nullcontext()

    def exchange(self, scatter: ReduceScatter) -> ReduceScatter:
        """All ranks are in the same bucket, as they report: start what could not be started before.

        All ranks do it for the same parts in the same order. One that has left backward does it when it comes again, so
        the others must be able to wait for it in vain, and once more.
        """
        return scatter

    def finish(self, scatter: ReduceScatter, divisor: int, out: Tensor) -> None:
        """Put the mean of my share into ``out``, of the dtype of the part or of its sums. The data has arrived.

        ``out`` may be the memory that ``start`` was given.
        """
        self._summation.mean(scatter.received, divisor, out)

    def mine(self, part: BucketPart) -> tuple[int, int]:
        """The range of the bucket that this rank gets the sum of."""
        return part.ranges[self._group.rank]


class BetweenPairs(Transport):
    """Messages between every pair of ranks."""

    def start(self, part: BucketPart, source: Source, own: Tensor, sending: Sending) -> ReduceScatter:
        if isinstance(source, ReduceScatter):
            return source._replace(reports=self._report(sending.report))
        rank = self._group.rank
        packed = torch.empty(part.numel - own.numel(), dtype=part.dtype, device="cpu")
        part.pack(source, packed, *part.without(rank))
        part.pack(source, own, part.spans[rank])
        others = [other for other in range(self._group.world_size) if other != rank]
        outgoing = {other: _span_for(other, packed, rank, part) for other in others}
        incoming = {other: torch.empty_like(own) for other in others}
        data = collectives.swap(self._group, outgoing, incoming, sending.tag)
        received = [incoming.get(other, own) for other in range(self._group.world_size)]
        return ReduceScatter(part, self._report(sending.report), packed, own, data, received)


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
        self._regions: dict[tuple[int, BucketPart], SlotRegions] = {}  # by address of the slot

    def start(self, part: BucketPart, source: Source, own: Tensor, sending: Sending) -> ReduceScatter:
        slot = self._take_slot()
        packed = self._regions_in(slot, part).mine
        if isinstance(source, ReduceScatter):
            packed.copy_(source.packed)
        else:
            rank = self._group.rank
            part.pack(source, packed, *part.without(rank))
            part.pack(source, own, part.spans[rank])
        return ReduceScatter(part, self._report(sending.report), packed, own, Handle(()), [], slot)

    def exchange(self, scatter: ReduceScatter) -> ReduceScatter:
        assert scatter.slot is not None
        part, topology = scatter.part, self._topology
        regions = self._regions_in(scatter.slot, part)
        mine = [*regions.for_me]
        mine.insert(topology.place, scatter.own)
        if self._between is None:
            return scatter._replace(received=mine)
        outgoing, sizes = self._sums_for_others(regions, part)
        numel, incoming = scatter.own.numel(), [0] * self._group.world_size
        for host in topology.other_hosts:
            for place, rank in enumerate(host):
                first, last = share(numel, len(host), place)
                incoming[rank] = last - first
        data, pieces = collectives.swap_pieces(self._between, outgoing, sizes, incoming)
        here = self._summation.host_sum(mine, scatter.own.new_empty(numel, dtype=sum_dtype(part.dtype)))
        sums = [[here] if host == topology.host else [pieces[rank] for rank in host] for host in topology.hosts]
        return scatter._replace(data=data, received=[piece for pieces in sums for piece in pieces])

    def finish(self, scatter: ReduceScatter, divisor: int, out: Tensor) -> None:
        if self._between is None:
            self._summation.mean(scatter.received, divisor, out)
        else:
            self._summation.mean_of_pieces(scatter.received, divisor, out)

    def _sums_for_others(self, regions: SlotRegions, part: BucketPart) -> tuple[Tensor, list[int]]:
        """What my host has for the ranks of other hosts, the share of it that I add up: side by side, and the sizes."""
        topology = self._topology
        shares = [
            share(high - low, len(topology.host), topology.place) if owner not in topology.host else (0, 0)
            for owner, (low, high) in enumerate(part.spans)
        ]
        sizes = [last - first for first, last in shares]
        sums = regions.mine.new_empty(sum(sizes), dtype=sum_dtype(part.dtype))
        for owner, ((first, last), out) in enumerate(zip(shares, sums.split(sizes), strict=True)):
            if first < last:
                self._summation.host_sum([one[first:last] for one in regions.written_for(owner, part)], out)
        return sums, sizes

    def _regions_in(self, slot: Tensor, part: BucketPart) -> SlotRegions:
        """Where the ranks of the host write in a slot."""
        key = slot.data_ptr(), part
        if key not in self._regions:
            self._regions[key] = regions_in(slot, part, self._topology)
        return self._regions[key]


class SlotRegions(NamedTuple):
    """A slot, while a part of a bucket is in it: every rank of the host writes what others own of it, side by side."""

    host: tuple[int, ...]
    regions: list[Tensor]  # by place on the host
    mine: Tensor
    for_me: list[Tensor]  # what each other rank of the host has for this one

    def written_for(self, owner: int, part: BucketPart) -> list[Tensor]:
        """What each rank of the host has for a rank that is not on it."""
        return [_span_for(owner, region, rank, part) for rank, region in zip(self.host, self.regions, strict=True)]


def slot_bytes(parts: Iterable[BucketPart], hosts: Iterable[Sequence[int]]) -> int:
    """How large a slot for any of these parts is, on any host: as many equal regions as the host has ranks."""
    hosts = list(hosts)
    largest = max(_region_bytes(part, rank) for part in parts for host in hosts for rank in host)
    return largest * max(map(len, hosts))


def regions_in(slot: Tensor, part: BucketPart, topology: Topology) -> SlotRegions:
    """A rank's region begins at one place whatever the part is.

    In an iteration that was aborted the ranks may write different parts into one slot. None of them must write into the
    region of another, who sends again what it finds there.
    """
    host, regions = topology.host, []
    stride = slot.numel() // len(host) // 64 * 64
    for place, rank in enumerate(host):
        low, high = part.spans[rank]
        nbytes = (part.numel - high + low) * part.dtype.itemsize
        regions.append(slot[place * stride : place * stride + nbytes].view(part.dtype))
    others = [(rank, region) for rank, region in zip(host, regions, strict=True) if rank != topology.rank]
    for_me = [_span_for(topology.rank, region, rank, part) for rank, region in others]
    return SlotRegions(host, regions, regions[topology.place], for_me)


def _span_for(owner: int, region: Tensor, writer: int, part: BucketPart) -> Tensor:
    """What the writer of a region has for another rank. Its own span is not in it."""
    (low, high), (mine, end) = part.spans[owner], part.spans[writer]
    shift = end - mine if low >= end else 0
    return region[low - shift : high - shift]


def _region_bytes(part: BucketPart, writer: int) -> int:
    """Room for what a rank writes, up to the next boundary of 64 bytes."""
    low, high = part.spans[writer]
    return -(-(part.numel - high + low) * part.dtype.itemsize // 64) * 64
