"""The all-gather of one bucket: which bytes every rank contributes, and how they are packed on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.comm.byte_views import bytes_of
from shardstep.comm.collectives import Handle
from shardstep.comm.host_channel import SharedMessages
from shardstep.comm.process_group import Group
from shardstep.comm.shared_memory import SharedMemoryRing
from shardstep.comm.streams import has_streams
from shardstep.layout.shares import share
from shardstep.layout.specs import Bucket, Piece
from shardstep.params.pieces import flat
from shardstep.params.staging import Staging

# Between pairs of ranks a piece of at least this size is sent from where it lies; smaller ones are packed first.
DIRECT_BYTES = 64 * 1024


class AllGatherHandle(NamedTuple):
    """An all-gather under way. ``BucketAllGather.relay`` it, wait for it, tell that it ``arrived``, ``unpack`` it."""

    under_way: Handle | SharedMessages
    staged: Tensor | None = None  # the buffer in which packed pieces travel
    to_relay: int | None = None  # the number of a gather that comes from other hosts, of which mine has to be told


class BucketAllGather:
    """The gather of one bucket: pack what is small, send the rest from where it lies, unpack what arrived.

    With a ring everything is packed, into memory that the ranks of a host share. Between hosts every rank sends its
    shard once to each other host, and each rank there receives its share of it. Only pieces of active parameters take
    part. Made anew whenever the set of active parameters or the memory of one changes.
    """

    def __init__(
        self,
        bucket: Bucket,
        params: Mapping[int, Tensor],
        active: Mapping[int, bool],
        group: Group,
        buffer: Tensor | None,
        ring: SharedMemoryRing | None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """``part``: (number, count) if the bucket travels in several parts, each a share of every rank's shard."""
        self._group = group
        self._like = params[bucket.params[0]]
        self.device = self._like.device
        self._pairwise = collectives.sends_pairwise(group, self.device)
        self.on_stream = not self._pairwise and has_streams(self.device)  # it is enqueued, and the host never waits
        self._part = part
        fits = ring is not None and (part[1] > 1 or bucket.numel * bucket.itemsize <= ring.slot_bytes)
        self._ring = ring if fits and self._pairwise else None
        self._in_place: Tensor | None = None  # gathered as it is: equal shards, nothing to pack
        self._regions: list[Tensor] = []  # by rank, bytes: gathered as they are, unequal shards
        self._direct: list[list[Tensor]] = [[] for _ in range(group.world_size)]  # by rank, bytes
        packed: list[list[Tensor]] = [[] for _ in range(group.world_size)]  # by rank
        if not self._gathers_in_place(bucket, params, active, buffer):
            for rank in range(group.world_size):
                shard = [piece for piece in bucket.pieces(rank) if active[piece.param]]
                if buffer is None:
                    self._direct[rank], packed[rank] = self._sort_by_size(shard, params)
                    continue
                runs = [self._share(buffer[low:high]) for low, high in _runs(bucket, shard)]
                if self._pairwise and self._ring is None:
                    self._direct[rank] = [bytes_of(run) for run in runs]
                else:
                    packed[rank] = runs
        if not self._pairwise and _are_regions(packed):
            nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
            self._regions = [bytes_of(tensors[0].detach().view(-1)) if tensors else nothing for tensors in packed]
            packed = []
        # Received into without torch's noticing: whoever still holds a graph over them has to be told.
        unnoticed = self._in_place is not None or self._regions or any(self._direct) or buffer is not None
        self._written = [params[index] for index in bucket.params if active[index]] if unnoticed else []
        self._staging = Staging(packed, group.rank, even=not self._pairwise) if any(packed) else None
        self.empty = self._in_place is None and not (self._regions or any(self._direct) or self._staging)

    @property
    def must_wait(self) -> bool:
        """Whether an earlier all-gather has to be finished before this one can start."""
        return self._ring is not None and self._staging is not None and self._ring.is_full

    def start(self) -> AllGatherHandle:
        """Send my shard and receive the others."""
        if self._in_place is not None:
            return AllGatherHandle(collectives.gather_buffer(self._group, self._in_place))
        if self._regions:
            return AllGatherHandle(collectives.gather_regions(self._group, self._regions))
        if self._staging is None:
            return AllGatherHandle(collectives.gather_shards(self._group, self._direct))
        if self._ring is not None:
            return self._start_in(self._ring, self._staging)
        staged = self._staging.pack(self._staging.own_buffer(self._like))
        if self._staging.even:
            return AllGatherHandle(collectives.gather_buffer(self._group, bytes_of(staged)), staged)
        if not self._pairwise:
            regions = [bytes_of(staged[low:high]) for low, high in self._staging.regions]
            return AllGatherHandle(collectives.gather_regions(self._group, regions), staged)
        parts = [[bytes_of(staged[low:high])] if low < high else [] for low, high in self._staging.regions]
        shards = list(map(list.__add__, self._direct, parts))
        return AllGatherHandle(collectives.gather_shards(self._group, shards), staged)

    def _start_in(self, ring: SharedMemoryRing, staging: Staging) -> AllGatherHandle:
        slot = staging.pack(ring.take().view(self._like.dtype))
        if ring.topology.is_one_host:
            return AllGatherHandle(ring.signal(ring.taken), slot)
        regions = [slot[low:high] for low, high in staging.regions]
        mine, topology = regions[self._group.rank], ring.topology
        outgoing = {
            rank: mine[slice(*share(mine.numel(), len(host), place))]
            for host in topology.other_hosts
            for place, rank in enumerate(host)
        }
        incoming = {
            rank: regions[rank][slice(*share(regions[rank].numel(), len(topology.host), topology.place))]
            for host in topology.other_hosts
            for rank in host
        }
        return AllGatherHandle(collectives.swap(self._group, outgoing, incoming), slot, ring.taken)

    def relay(self, handle: AllGatherHandle) -> AllGatherHandle:
        """If other hosts take part: what this rank receives of them is there for its host when it has said so."""
        if handle.to_relay is None or self._ring is None:
            return handle
        handle.under_way.wait()
        return AllGatherHandle(self._ring.signal(handle.to_relay), handle.staged)

    def arrived(self, handle: AllGatherHandle) -> None:
        """It was waited for. Once: the next all-gather may start."""
        if self._ring is not None and self._staging is not None:
            assert isinstance(handle.under_way, SharedMessages)
            self._ring.received(handle.under_way)

    def unpack(self, handle: AllGatherHandle) -> None:
        """Put what arrived where it belongs."""
        if self._staging is not None and handle.staged is not None:
            self._staging.unpack(handle.staged)
        if self._written:
            torch.autograd.graph.increment_version(self._written)

    def _gathers_in_place(
        self, bucket: Bucket, params: Mapping[int, Tensor], active: Mapping[int, bool], buffer: Tensor | None
    ) -> bool:
        """Whether the backend can gather the memory of the bucket, or of its only parameter, as it is."""
        shard = bucket.equal_shard
        if self._pairwise or shard is None or not all(active[index] for index in bucket.params):
            return False
        if buffer is not None:
            self._in_place = bytes_of(buffer)
        elif len(bucket.params) == 1 and shard * self._group.world_size == bucket.numel:
            param = params[bucket.params[0]]
            self._in_place = bytes_of(flat(param)) if param.is_contiguous() else None
        return self._in_place is not None

    def _share(self, span: Tensor) -> Tensor:
        number, count = self._part
        return span if count == 1 else span[slice(*share(span.numel(), count, number))]

    def _sort_by_size(self, shard: Sequence[Piece], params: Mapping[int, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """What of a shard is sent from where it lies, as bytes, and what is packed first."""
        direct, packed = [], []
        for piece in shard:
            param = params[piece.param]
            large = self._pairwise and self._ring is None and piece.numel * param.element_size() >= DIRECT_BYTES
            if not param.is_contiguous():  # whole: those that are cut were made contiguous
                packed.append(param)
                continue
            span = self._share(flat(param)[piece.start : piece.stop])
            if large:
                direct.append(bytes_of(span))
            else:
                packed.append(span)
        return direct, packed


def gathers_of(
    bucket: Bucket,
    params: Mapping[int, Tensor],
    active: Mapping[int, bool],
    group: Group,
    buffer: Tensor | None,
    ring: SharedMemoryRing | None,
) -> list[BucketAllGather]:
    """The gathers of one bucket: one, or several if it is a parameter that is larger than a slot of shared memory."""
    nbytes, like = bucket.numel * bucket.itemsize, params[bucket.params[0]]
    can_be_cut = len(bucket.params) == 1 and (buffer is not None or like.is_contiguous())
    too_large = ring is not None and nbytes > ring.slot_bytes and collectives.sends_pairwise(group, like.device)
    count = 1
    if ring is not None and can_be_cut and too_large:
        rounding = group.world_size * bucket.itemsize  # an element per rank
        count = -(-nbytes // max(ring.slot_bytes - rounding, 1))
    return [BucketAllGather(bucket, params, active, group, buffer, ring, (number, count)) for number in range(count)]


def _runs(bucket: Bucket, shard: Sequence[Piece]) -> list[tuple[int, int]]:
    """The fewest ranges of the buffer that hold these pieces and no other parameter."""
    position = {index: place for place, index in enumerate(bucket.params)}
    runs: list[tuple[int, int]] = []
    previous = None
    for piece in shard:
        place = position[piece.param]
        if previous is not None and place == previous + 1:
            runs[-1] = runs[-1][0], piece.offset + piece.numel
        else:
            runs.append((piece.offset, piece.offset + piece.numel))
        previous = place
    return [run for run in runs if run[0] < run[1]]


def _are_regions(packed: Sequence[Sequence[Tensor]]) -> bool:
    """Whether shards can be gathered from and to where they lie: one tensor per rank at the most, not all of one size.

    (Of one size they are packed: a list of equal ones is packed by the backend otherwise.)
    """
    if not any(packed) or any(len(tensors) > 1 for tensors in packed):
        return False
    alone = [tensors[0] for tensors in packed if tensors]
    sizes = {sum(tensor.numel() for tensor in tensors) for tensors in packed}
    return len(sizes) > 1 and all(tensor.is_contiguous() for tensor in alone)
