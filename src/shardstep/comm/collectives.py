"""The calls of torch.distributed. Stateless functions; what is under way is returned as a handle.

Everything moves as bytes, so any dtype travels on any backend. Backend differences live here:

==========================  ============================================================================
where the tensors are       how the shards of a bucket are gathered
==========================  ============================================================================
CPU, gloo                   send/receive between every pair of ranks, all in flight. Measured: as fast as
                            one broadcast per shard for one message, and (unlike it) just as fast for
                            many, so large tensors need not be packed first
equal shards, not gloo      ``all_gather_into_tensor`` on the buffer itself
unequal shards, not gloo    one ``all_gather`` of a list, which such backends send as one group of broadcasts;
                            if one rank has everything, one broadcast
gloo, not the CPU           one broadcast per shard, all in flight
==========================  ============================================================================

Gradients go the other way: on the CPU with gloo every rank gets everybody's part of its shard and sums them itself, in
one order; elsewhere one reduce-scatter does it (``comm/reductions.py``). Through shared memory, and between hosts that
have some: see ``params/all_gather.py`` and ``grads/reduce_scatter.py``.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _unflatten_dense_tensors as _unflatten

from shardstep.comm import torch_versions
from shardstep.comm.byte_views import bytes_of
from shardstep.comm.process_group import Group

GradBucket: TypeAlias = dist.GradBucket  # what DDP gives to its hooks

# Our sends and receives carry a tag of their own, so that they cannot meet a user's on the same group.
_TAG = 0x5353

# Many tensors that are copied from rank to rank travel together, at most this much at a time.
COALESCED_BYTES = 25 * 1024 * 1024

# Backends whose all_gather expects tensors of one size.
_EQUAL_SIZES_ONLY = ("gloo", "mpi", "ucc")


class Handle(NamedTuple):
    """What is in flight. ``wait`` orders it before what follows (on an accelerator: in stream order)."""

    works: tuple[dist.Work, ...]
    memory: Tensor | None = None  # made for these works, to live as long as they do

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def wait_for(self, seconds: float) -> bool:
        """Whether it came to its end in that time. For all-gathers and the like, which can be waited for again."""
        try:
            for work in self.works:
                work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not all(work.is_completed() for work in self.works):
                return False
            self.wait()  # it came this very moment, or it failed
        return True


def sends_pairwise(group: Group, device: torch.device) -> bool:
    """Whether shards on ``device`` travel as messages between pairs (any number of them) or as one buffer."""
    return device.type == "cpu" and group.backends.get("cpu") == "gloo"


def gather_shards(group: Group, shards: Sequence[Sequence[Tensor]]) -> Handle:
    """Start to send my shard to all ranks and to receive theirs in place, as messages between pairs.

    ``shards[r]`` is what rank r contributes: contiguous byte tensors, 1D, the same sizes on every rank.
    """
    device = next((tensor.device for shard in shards for tensor in shard), None)
    if device is None or group.world_size == 1:
        return Handle(())
    return Handle(tuple(_gather_pairwise(group, shards)))


def _gather_pairwise(group: Group, shards: Sequence[Sequence[Tensor]]) -> Iterator[dist.Work]:
    process_group, me, size = group.process_group, group.rank, group.world_size
    for distance in range(1, size):  # so that not everybody talks to rank 0 first
        source, target = (me - distance) % size, (me + distance) % size
        for tensor in shards[source]:
            yield dist.irecv(tensor, group=process_group, group_src=source, tag=_TAG)  # type: ignore[misc]
        for tensor in shards[me]:
            yield dist.isend(tensor, group=process_group, group_dst=target, tag=_TAG)  # type: ignore[misc]


class GatheredMessages:
    """A short message of every rank, on its way through the process group. (See also ``host_channel.py``.)"""

    def __init__(self, group: Group, message: bytes, length: int) -> None:
        """Start to gather. ``length``: the same on every rank; shorter messages are filled up with zeros."""
        mine = torch.frombuffer(bytearray(message.ljust(length, b"\0")), dtype=torch.uint8)
        self._rows = torch.empty((group.world_size, length), dtype=torch.uint8)
        if group.world_size == 1:
            self._rows[0] = mine
        self._handle = Handle(())
        if group.world_size > 1:
            work = torch_versions.all_gather(self._rows.view(-1), mine, group=group.process_group, async_op=True)
            self._handle = Handle((work,) if work is not None else ())

    @property
    def is_done(self) -> bool:
        """Whether waiting would take no time."""
        return all(work.is_completed() for work in self._handle.works)

    def wait(self) -> None:
        self._handle.wait()

    def wait_for(self, seconds: float) -> bool:
        """Whether all came in that time. It can be waited for again."""
        return self._handle.wait_for(seconds)

    @property
    def messages(self) -> list[bytes]:
        """By rank, when all came."""
        return [bytes(row) for row in self._rows.tolist()]


def swap(group: Group, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int = 0) -> Handle:
    """Start to send tensors to some ranks and to receive tensors from some: 1D, contiguous, of any dtype.

    It meets calls with the same tag, and may wait for one while others pass by.
    """
    process_group, me, size = group.process_group, group.rank, group.world_size
    works = []
    for distance in range(1, size):  # so that not everybody talks to rank 0 first
        source, target = (me - distance) % size, (me + distance) % size
        arriving, leaving = incoming.get(source), outgoing.get(target)
        if arriving is not None and arriving.numel():
            wire = arriving.view(torch.uint8)
            works.append(dist.irecv(wire, group=process_group, group_src=source, tag=_TAG + tag))
        if leaving is not None and leaving.numel():
            wire = leaving.view(torch.uint8)
            works.append(dist.isend(wire, group=process_group, group_dst=target, tag=_TAG + tag))
    return Handle(tuple(work for work in works if work is not None))


def swap_pieces(
    group: Group, outgoing: Tensor, sizes: Sequence[int], incoming: Sequence[int]
) -> tuple[Handle, list[Tensor]]:
    """Start to send every rank its piece of ``outgoing``, and to receive one of each: the pieces, by rank.

    ``sizes``, ``incoming``: how many elements each has. A collective of the whole group, all of whose calls come in the
    same order. It can be waited for again.
    """
    received = outgoing.new_empty(sum(incoming))
    work = dist.all_to_all_single(
        received, outgoing, list(incoming), list(sizes), group=group.process_group, async_op=True
    )
    return Handle((work,) if work is not None else (), outgoing), list(received.split(list(incoming)))


def all_reduce_mean(group: Group, tensor: Tensor, divisor: int) -> torch.futures.Future[Tensor]:
    """Start to sum a tensor over the ranks, divided by ``divisor``, in place."""
    if divisor != 1:
        tensor.div_(divisor)
    work = dist.all_reduce(tensor, group=group.process_group, async_op=True)
    assert work is not None, "this rank is a member"
    return work.get_future().then(lambda future: future.value()[0])


def all_gather_rows(group: Group, row: Tensor) -> Tensor:
    """Everybody's ``row`` (1D), stacked by rank, on its device. In stream order on an accelerator."""
    if group.world_size == 1:
        return row.unsqueeze(0)
    wire = row.to(group.wire_device) if row.device.type not in group.backends else row
    rows = torch.empty((group.world_size, wire.numel()), dtype=wire.dtype, device=wire.device)
    torch_versions.all_gather(rows.view(-1), wire.contiguous(), group=group.process_group)
    return rows.to(row.device)


def copy_from_rank_0(group: Group, tensors: Sequence[Tensor]) -> None:
    """Give all ranks rank 0's values."""
    copy_together(group, tensors, 0, None)


def copy_together(group: Group, tensors: Sequence[Tensor], source: int, target: int | None) -> None:
    """Copy tensors from rank ``source`` to rank ``target`` (None: to every rank), in place, on their own device.

    Both have tensors of the same shapes, dtypes and kinds of device, in the same order. They travel packed, by device
    and dtype. In stream order on an accelerator; on the CPU it blocks.
    """
    takes_part = target is None or group.rank in (source, target)
    if group.world_size == 1 or source == target or not takes_part:
        return
    with torch.no_grad():
        for together in _coalesced(tensors):
            _copy_at_once(group, together, source, target)


def _coalesced(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors, without empty ones, in lists of one device and dtype and at most ``COALESCED_BYTES``, or of one."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
    for of_one_kind in kinds.values():
        together: list[Tensor] = []
        filled = 0
        for tensor in of_one_kind:
            nbytes = tensor.numel() * tensor.element_size()
            if together and filled + nbytes > COALESCED_BYTES:
                yield together
                together, filled = [], 0
            together.append(tensor)
            filled += nbytes
        yield together


def _copy_at_once(group: Group, together: Sequence[Tensor], source: int, target: int | None) -> None:
    first, sends = together[0], group.rank == source
    if len(together) == 1 and first.is_contiguous():
        flat, is_packed = first.view(-1), False
    elif sends:
        flat, is_packed = torch.cat([tensor.reshape(-1) for tensor in together]), True
    else:
        flat, is_packed = first.new_empty(sum(tensor.numel() for tensor in together)), True
    if first.device.type in group.backends:
        _transfer(group, bytes_of(flat), source, target)
    else:
        move(group, bytes_of(flat), source, target)
    if is_packed and not sends:
        torch._foreach_copy_(list(together), _unflatten(flat, together))


def gather_buffer(group: Group, buffer: Tensor) -> Handle:
    """Start to gather a buffer that is cut into ``world_size`` equal shards; mine is already in place."""
    shard = buffer.numel() // group.world_size
    mine = buffer[group.rank * shard : (group.rank + 1) * shard]
    work = torch_versions.all_gather(buffer, mine, group=group.process_group, async_op=True)
    return Handle((work,) if work is not None else ())


def gather_regions(group: Group, regions: Sequence[Tensor]) -> Handle:
    """Start to gather regions of any sizes, one per rank, as one collective; mine is already in place.

    Contiguous byte tensors, 1D, the same sizes on every rank.
    """
    owners = [rank for rank, region in enumerate(regions) if region.numel()]
    if not owners:
        return Handle(())
    backend = group.backends.get(regions[0].device.type)
    if len(owners) == 1 or backend in _EQUAL_SIZES_ONLY:
        works = [
            dist.broadcast(regions[rank], group=group.process_group, group_src=rank, async_op=True) for rank in owners
        ]
        return Handle(tuple(work for work in works if work is not None))
    # A byte for those who have nothing: not every backend likes empty messages.
    filling = regions[owners[0]].new_empty(len(regions)).split(1)
    filled = [region if region.numel() else filler for region, filler in zip(regions, filling, strict=True)]
    work = dist.all_gather(filled, filled[group.rank], group=group.process_group, async_op=True)
    return Handle((work,) if work is not None else (), filling[0])


def all_gather_ints(group: Group, values: Sequence[int]) -> list[list[int]]:
    """Everybody's ``values``, by rank. Blocks the host. The same number of values on every rank."""
    if group.world_size == 1:
        return [list(map(int, values))]
    mine = torch.tensor(list(values), dtype=torch.int64, device=group.wire_device)
    rows = [torch.empty_like(mine) for _ in range(group.world_size)]
    dist.all_gather(rows, mine, group=group.process_group)
    return [row.tolist() for row in rows]


def move(group: Group, tensor: Tensor, source: int, target: int | None) -> None:
    """Copy bytes from rank ``source`` to rank ``target`` (None: to every rank), in place. Blocks the host.

    ``tensor`` is 1D and contiguous, on any device, which may be another one on the other rank; what is not on the
    group's device passes through it.
    Ranks that neither send nor receive may call it or not.
    """
    wire = tensor if tensor.device.type == group.wire_device.type else tensor.to(group.wire_device)
    if tensor.numel() == 0 or source == target or group.world_size == 1:
        return
    _transfer(group, wire, source, target)
    if wire is not tensor and group.rank != source:
        tensor.copy_(wire)


def _transfer(group: Group, wire: Tensor, source: int, target: int | None) -> None:
    if target is None:
        dist.broadcast(wire, group=group.process_group, group_src=source)
    elif group.rank == source:
        dist.send(wire, group=group.process_group, group_dst=target, tag=_TAG)
    elif group.rank == target:
        dist.recv(wire, group=group.process_group, group_src=source, tag=_TAG)


def broadcast(group: Group, tensor: Tensor, source: int) -> None:
    """Give all ranks what rank ``source`` has: 1D, contiguous, in place and on its device if the group serves that."""
    if tensor.device.type not in group.backends:
        move(group, tensor.view(torch.uint8), source, None)
    elif group.world_size > 1 and tensor.numel():
        dist.broadcast(tensor.view(torch.uint8), group=group.process_group, group_src=source)


def move_json(group: Group, data: Any, source: int, target: int | None) -> Any:
    """Copy JSON data from rank ``source`` to rank ``target`` (None: to every rank) and return it there.

    Blocks the host. Ranks that neither send nor receive get None.
    """
    sends = group.rank == source
    if not (sends or target is None or group.rank == target):
        return None
    payload = json.dumps(data).encode() if sends else b""
    size = torch.tensor([len(payload)])
    move(group, size.view(torch.uint8), source, target)
    content = (
        torch.frombuffer(bytearray(payload), dtype=torch.uint8) if sends else torch.empty(int(size), dtype=torch.uint8)
    )
    move(group, content, source, target)
    return data if sends else json.loads(ctypes.string_at(content.data_ptr(), content.numel()))


def swap_rows(group: Group, rows: Tensor) -> Handle:
    """Start to send row r to every rank r and to receive theirs: ``handle.memory``. Can be waited for again."""
    received = torch.empty_like(rows)
    work = dist.all_to_all_single(received, rows, group=group.process_group, async_op=True)
    return Handle((work,) if work is not None else (), received)


def gather_rows(group: Group, row: Tensor) -> Handle:
    """Start to gather everybody's ``row`` (1D): ``handle.memory``, by rank. Can be waited for again."""
    rows = row.new_empty((group.world_size, row.numel()))
    work = torch_versions.all_gather(rows.view(-1), row, group=group.process_group, async_op=True)
    return Handle((work,) if work is not None else (), rows)


def sum_natively(group: Group, tensor: Tensor) -> Handle:
    """Start to replace a tensor by its sum over the ranks, in the order that the backend chooses."""
    work = dist.all_reduce(tensor, group=group.process_group, async_op=True)
    return Handle((work,) if work is not None else (), tensor)
