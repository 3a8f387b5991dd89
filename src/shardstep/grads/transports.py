"""How the gradients of one optimizer travel: in which parts, through which memory, by which transport."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.comm.collectives import GatheredMessages
from shardstep.comm.process_group import Group, open_side_group
from shardstep.comm.shared_memory import SharedMemoryRing, open_ring
from shardstep.grads.bucket_part import BucketPart, parts_of
from shardstep.grads.native import Native
from shardstep.grads.reduce_scatter import BetweenPairs, Messages, ThroughSharedMemory, Transport, slot_bytes
from shardstep.grads.reports import report_bytes
from shardstep.grads.settings import ReduceSettings
from shardstep.grads.shards import BucketShard
from shardstep.grads.summation import Summation
from shardstep.params.sharded_parameters import ShardedParameters


class ReduceTransports:
    """The parts of all buckets, each with its number and its transport, and the slots of shared memory."""

    def __init__(self, sharded: ShardedParameters, group: Group, reporting: Group, settings: ReduceSettings) -> None:
        """``reporting``: the ranks that report to each other."""
        self._sharded = sharded
        self._group, self._reporting = group, reporting
        self._settings = settings
        self.parts: list[list[BucketPart]] = []  # by bucket
        self.number_of: dict[BucketPart, int] = {}
        self._transports: list[Transport] = []  # by bucket
        self._natives: dict[torch.device, Native] = {}
        self._ring: SharedMemoryRing | None = None
        self._between: Group | None = None  # for what goes from host to host: it must not stand behind reports
        self._report_bytes = 0  # of the longest
        self.reports = True  # whether ranks report with every part what it is
        # How many parts may be under way. On the CPU one is enough, if the user does not say: whoever packs the next
        # one waits for the same ranks anyway, and it takes half of the memory (*measured*: as fast). An accelerator
        # must not wait for the one before.
        self.in_flight = 1

    def extend(self, shards: Sequence[BucketShard]) -> None:
        """Collective. Take over the buckets that were added, or that are on another device now."""
        self.parts = [
            parts_of(shard.bucket, self._group.world_size, self._part_bytes(shard.device), shard.dtype)
            for shard in shards
        ]
        self.number_of = {part: number for number, part in enumerate(chain.from_iterable(self.parts))}
        self._report_bytes = max((report_bytes(len(shard.bucket.params)) for shard in shards), default=0)
        self._open_ring()
        self.reports = all(collectives.sends_pairwise(self._group, shard.device) for shard in shards)
        self.in_flight = self._settings.in_flight or (1 if self.reports else 2)
        self._natives = {}
        summation = Summation(self._sharded.topology)
        self._transports = [self._transport(shard.device, summation) for shard in shards]
        for part in self.number_of:
            transport, shard = self.of(part), shards[part.bucket.position]
            shard.capacity = max(shard.capacity, transport.share_numel(part))
            if isinstance(transport, Native):
                transport.expect(part)

    def of(self, part: BucketPart) -> Transport:
        return self._transports[part.bucket.position]

    def join(self) -> None:
        """On accelerators: the current streams go on when everything that was sent is in the shards."""
        for native in self._natives.values():
            native.join()

    def hold_senders(self) -> None:
        """On accelerators: the shards go, and were read on the current streams. See there."""
        for native in self._natives.values():
            native.hold_senders()

    def hold_all(self) -> None:
        """On accelerators: everything goes. See there."""
        for native in self._natives.values():
            native.hold_all()

    def buffers(self) -> list[Tensor]:
        """The memory in which parts are packed on accelerators, which is kept."""
        return [tensor for native in self._natives.values() for tensor in native.buffers()]

    @property
    def is_full(self) -> bool:
        """Whether there is no slot for another part."""
        return self._ring is not None and self._ring.is_full

    def release(self) -> None:
        """The oldest part is over: all ranks have written it, and this one has read it or is about to."""
        if self._ring is not None:
            self._ring.release()

    def _part_bytes(self, device: torch.device) -> float:
        """In parts of which size a bucket travels. A native reduce-scatter takes it as a whole."""
        pairwise = collectives.sends_pairwise(self._group, device)
        return self._sharded.part_bytes if pairwise and self._group.world_size > 1 else float("inf")

    def _open_ring(self) -> None:
        params = self._sharded.params.values()
        alone = self._group.world_size == 1 or not self.number_of
        if alone or not all(collectives.sends_pairwise(self._group, param.device) for param in params):
            self._ring = None
            return
        # All hosts have slots of one size, though some may have more ranks than others.
        size = slot_bytes(self.number_of, self._sharded.topology.hosts)
        # More slots than parts would stay unused.
        count = min(self._settings.in_flight or 1, len(self.number_of))
        if self._ring is None or self._ring.slot_bytes < size or self._ring.in_flight < count:
            self._ring = open_ring(self._group, self._sharded.topology, count, size)

    def _report(self, report: bytes) -> Messages:
        """Report something to all ranks, and start to hear what they report. On one host that is a message to each."""
        ring = self._ring
        if ring is not None and ring.topology.is_one_host and self._reporting is self._group:
            return ring.channel.share(report)
        return GatheredMessages(self._reporting, report, self._report_bytes)

    def _transport(self, device: torch.device, summation: Summation) -> Transport:
        """How gradients on ``device`` are reduced."""
        if not collectives.sends_pairwise(self._group, device):
            if device not in self._natives:
                self._natives[device] = Native(self._group, self._report, summation, device, self.in_flight)
            return self._natives[device]
        if self._ring is None:
            return BetweenPairs(self._group, self._report, summation)
        topology = self._sharded.topology
        if not topology.is_one_host and self._between is None:
            self._between = open_side_group(self._group)
        return ThroughSharedMemory(self._group, self._report, summation, topology, self._between, self._ring.take)
