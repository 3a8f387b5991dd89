"""The only file that calls torch.distributed. Stateless functions; what is under way is returned as a handle.

Everything moves as bytes, so any dtype travels on any backend. Backend differences live here:

==========================  ============================================================================
where the tensors are       how the shards of a bucket are gathered
==========================  ============================================================================
CPU, gloo                   send/receive between every pair of ranks, all in flight. Measured: as fast as
                            one broadcast per shard for one message, and (unlike it) just as fast for
                            many, so large tensors need not be packed first
equal shards, not gloo      ``all_gather_into_tensor`` on the buffer itself
anything else               one broadcast per shard, all in flight
==========================  ============================================================================

Gradients go the other way: on the CPU with gloo every rank gets everybody's part of its shard and sums them itself, in
rank order; elsewhere ``reduce_scatter_tensor`` (equal shards) or one ``reduce`` per shard.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardstep.comm import torch_versions

GradBucket = dist.GradBucket  # what DDP gives to its hooks

# Our sends and receives carry a tag of their own, so that they cannot meet a user's on the same group.
_TAG = 0x5353


@dataclass(frozen=True)
class Group:
    """The facts about a process group. ``rank`` is the rank within it, as everywhere in this package."""

    process_group: dist.ProcessGroup
    rank: int
    world_size: int
    global_rank: int
    backends: Mapping[str, str]  # device type -> name of the backend that serves its tensors
    own_store: dist.Store | None = None  # a connection of its own to the store, for another thread

    @property
    def store(self) -> dist.Store:
        """The key-value store the group was made with: a side channel that no collective can block."""
        return self.own_store or torch_versions.group_store(self.process_group)

    @property
    def timeout(self) -> timedelta:
        """How long the group's collectives wait."""
        options = getattr(self.process_group._get_backend(self.wire_device), "options", None)
        return getattr(options, "_timeout", None) or dist.default_pg_timeout

    @property
    def wire_device(self) -> torch.device:
        """A device whose tensors the group can send: the CPU if it can, else the accelerator."""
        if "cpu" in self.backends:
            return torch.device("cpu")
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None, "a group that serves no CPU tensors serves an accelerator"
        return torch.device(accelerator.type, torch.accelerator.current_device_index())


def open_group(process_group: dist.ProcessGroup | None) -> Group:
    """The facts about ``process_group`` (None: all ranks). ValueError if the caller is not a member."""
    if process_group is None:
        process_group = dist.distributed_c10d._get_default_group()
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise ValueError(
            f"process_group expects its caller to be a member, but global rank {dist.get_rank()} is not. "
            "Build the optimizer on the ranks of its process group only."
        )
    pairs = (pair.split(":") for pair in dist.get_backend_config(process_group).split(","))
    return Group(
        process_group=process_group,
        rank=rank,
        world_size=dist.get_world_size(process_group),
        global_rank=dist.get_global_rank(process_group, rank),
        backends={pair[0]: pair[-1] for pair in pairs},
    )


class Job(NamedTuple):
    """The processes that run together, and this one among them."""

    run: str  # the same on all its ranks, another one in every run
    rank: int
    store: dist.Store  # a connection of its own


def job() -> Job | None:
    """The job that this process is part of; None if it is alone."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    default = dist.distributed_c10d._get_default_group()
    store = torch_versions.second_connection(torch_versions.group_store(default))
    # torchrun may keep its store over restarts, after which ranks may be other processes.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    run = store.compare_set(f"shardstep/run/{restarts}", "", secrets.token_hex(8)).decode()
    return Job(run, dist.get_rank(), store)


def alone() -> Group:
    """A process by itself, for what needs a group but sends nothing."""
    return Group(process_group=None, rank=0, world_size=1, global_rank=0, backends={"cpu": "gloo"})  # type: ignore


def open_side_group(group: Group, backend: str | None = None) -> Group:
    """A second process group of the same ranks, so that two kinds of traffic cannot block each other.

    ``backend``: another than the group's, e.g. "gloo" for traffic between hosts' memories.

    Collective: call on every rank of the group, and on no other. (``dist.new_group`` names a group after what else the
    process has joined, which may differ between ranks: the count of side groups of this group does not.)
    """
    if group.world_size == 1:
        return group
    world = dist.distributed_c10d._world
    ranks = dist.get_process_group_ranks(group.process_group)
    number = group.store.add(f"shardstep/side/{group.rank}", 1)
    name = f"{group.process_group.group_name}/shardstep-{number}"
    side, _ = dist.distributed_c10d._new_process_group_helper(
        group.world_size,
        group.rank,
        ranks,
        dist.Backend(backend or dist.get_backend_config(group.process_group)),
        group.store,
        name,  # type: ignore[arg-type]
        timeout=group.timeout,
        group_desc="shardstep",
    )
    assert isinstance(side, dist.ProcessGroup), "this rank is a member"
    world.pg_group_ranks[side] = {global_rank: rank for rank, global_rank in enumerate(ranks)}
    return replace(group, process_group=side, backends={"cpu": backend} if backend else group.backends)


def for_another_thread(group: Group) -> Group:
    """The group with a connection of its own to the store. (One connection serves one call at a time, also a wait.)"""
    return replace(group, own_store=torch_versions.second_connection(group.store))


def same_ranks(one: Group, other: Group) -> bool:
    """Whether two groups have the same members."""
    members = dist.get_process_group_ranks
    return members(one.process_group) == members(other.process_group)


def is_everybody(group: Group) -> bool:
    """Whether the group is all ranks, in their order."""
    return dist.get_process_group_ranks(group.process_group) == list(range(dist.get_world_size()))


def is_member(process_group: dist.ProcessGroup | None) -> bool:
    """Whether there is such a group, and the caller is in it."""
    return dist.is_available() and dist.is_initialized() and dist.get_rank(process_group) >= 0


def group_name(process_group: dist.ProcessGroup) -> str:
    """The name under which ``find_group`` finds the group again, in this process or another one."""
    return process_group.group_name


def find_group(name: str) -> dist.ProcessGroup:
    """The process group of that name. RuntimeError if this process has none."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def debug_is_on() -> bool:
    """Whether TORCH_DISTRIBUTED_DEBUG asks for more than silence."""
    return dist.get_debug_level() != dist.DebugLevel.OFF


class Handle(NamedTuple):
    """What is in flight. ``wait`` orders it before what follows (on an accelerator: in stream order)."""

    works: tuple[dist.Work, ...]
    memory: Tensor | None = None  # made for these works, to live as long as they do

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def wait_for(self, seconds: float) -> bool:
        """Whether it came to its end in that time. For ``exchange_headers`` only, which can be waited for again."""
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
    """Start to send my shard to all ranks and to receive theirs in place.

    ``shards[r]`` is what rank r contributes: contiguous byte tensors, 1D, the same sizes on every rank.
    """
    device = next((tensor.device for shard in shards for tensor in shard), None)
    if device is None or group.world_size == 1:
        return Handle(())
    if sends_pairwise(group, device):
        return Handle(tuple(_gather_pairwise(group, shards)))
    works = (
        dist.broadcast(tensor, group=group.process_group, group_src=rank, async_op=True)
        for rank, shard in enumerate(shards)
        for tensor in shard
    )
    return Handle(tuple(work for work in works if work is not None))


def _gather_pairwise(group: Group, shards: Sequence[Sequence[Tensor]]) -> Iterator[dist.Work]:
    process_group, me, size = group.process_group, group.rank, group.world_size
    for distance in range(1, size):  # so that not everybody talks to rank 0 first
        source, target = (me - distance) % size, (me + distance) % size
        for tensor in shards[source]:
            yield dist.irecv(tensor, group=process_group, group_src=source, tag=_TAG)  # type: ignore[misc]
        for tensor in shards[me]:
            yield dist.isend(tensor, group=process_group, group_dst=target, tag=_TAG)  # type: ignore[misc]


def exchange_signals(group: Group, number: int) -> Handle:
    """Start to send a byte to every other rank and to receive one from each: ``handle.memory``, by rank.

    Waiting means: all came to this point.
    """
    signals = torch.full((group.world_size,), number, dtype=torch.uint8)
    return Handle(tuple(_gather_pairwise(group, [[signal] for signal in signals.split(1)])), signals)


def exchange_headers(group: Group, header: Tensor) -> Handle:
    """Start to tell every rank a few bytes, and to be told: ``handle.memory``, a row per rank. CPU tensors only."""
    headers = torch.empty((group.world_size, header.numel()), dtype=torch.uint8)
    if group.world_size == 1:
        headers[0] = header
        return Handle((), headers)
    work = torch_versions.all_gather(headers.view(-1), header, group=group.process_group, async_op=True)
    return Handle((work,) if work is not None else (), headers)


def swap_shards(group: Group, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> Handle:
    """Start to send ``outgoing[r]`` to every rank r and to receive ``incoming[r]`` from it: bytes, 1D, contiguous.

    It meets calls with the same tag, and may wait for one while others pass by.
    """
    process_group, me, size = group.process_group, group.rank, group.world_size
    works = []
    for distance in range(1, size):
        source, target = (me - distance) % size, (me + distance) % size
        if incoming[source].numel():
            works.append(dist.irecv(incoming[source], group=process_group, group_src=source, tag=_TAG + tag))
        if outgoing[target].numel():
            works.append(dist.isend(outgoing[target], group=process_group, group_dst=target, tag=_TAG + tag))
    return Handle(tuple(work for work in works if work is not None))


def reduce_shards(group: Group, buffer: Tensor, shards: Sequence[Tensor], total: Tensor) -> Handle:
    """Start to sum a buffer over the ranks, each rank's shard of it for that rank; this rank's sum goes to ``total``.

    ``shards`` are ranges of ``buffer``. If they are equal and fill it, this is one native reduce-scatter. The buffer
    is scratch memory afterwards.
    """
    if len({shard.numel() for shard in shards}) == 1 and shards[0].numel() * len(shards) == buffer.numel():
        work = torch_versions.reduce_scatter(total, buffer, group=group.process_group, async_op=True)
        return Handle((work,) if work is not None else (), buffer)
    works = [
        dist.reduce(
            total.copy_(shard) if rank == group.rank else shard,
            group=group.process_group,
            group_dst=rank,
            async_op=True,
        )
        for rank, shard in enumerate(shards)
        if shard.numel()
    ]
    return Handle(tuple(work for work in works if work is not None), buffer)


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
    with torch.no_grad():
        for tensor in tensors if group.world_size > 1 else ():
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else None
            if flat is None:
                continue
            move(group, flat, 0, None)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


def gather_buffer(group: Group, buffer: Tensor) -> Handle:
    """Start to gather a buffer that is cut into ``world_size`` equal shards; mine is already in place."""
    shard = buffer.numel() // group.world_size
    mine = buffer[group.rank * shard : (group.rank + 1) * shard]
    work = torch_versions.all_gather(buffer, mine, group=group.process_group, async_op=True)
    return Handle((work,) if work is not None else ())


def all_gather_ints(group: Group, values: Sequence[int]) -> list[list[int]]:
    """Everybody's ``values``, by rank. Blocks the host. The same number of values on every rank."""
    mine = torch.tensor(list(values), dtype=torch.int64, device=group.wire_device)
    rows = [torch.empty_like(mine) for _ in range(group.world_size)]
    dist.all_gather(rows, mine, group=group.process_group)
    return [row.tolist() for row in rows]


def move(group: Group, tensor: Tensor, source: int, target: int | None) -> None:
    """Copy bytes from rank ``source`` to rank ``target`` (None: to every rank), in place. Blocks the host.

    ``tensor`` is 1D and contiguous, on any device; what is not on the group's device passes through it.
    Ranks that neither send nor receive may call it or not.
    """
    wire = tensor if tensor.device.type == group.wire_device.type else tensor.to(group.wire_device)
    if tensor.numel() == 0 or source == target:
        return
    if target is None:
        dist.broadcast(wire, group=group.process_group, group_src=source)
    elif group.rank == source:
        dist.send(wire, group=group.process_group, group_dst=target, tag=_TAG)
    elif group.rank == target:
        dist.recv(wire, group=group.process_group, group_src=source, tag=_TAG)
    if wire is not tensor and group.rank != source:
        tensor.copy_(wire)


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
