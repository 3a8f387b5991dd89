"""Memory that the CPU ranks of a host share, to gather and reduce through instead of sockets.

A rank writes its part of a bucket into a slot, sends the others a short message, and they read it from there: two
copies in memory instead of two through the kernel and a wake-up per packet. Every host has slots of its own; what goes
from host to host, and when, is the business of those who use them.

[Note: when a slot may be written again]
Collectives are numbered alike on all ranks. With at most K in flight, number x uses slot x mod 2K. A rank that starts x
has finished x - K, so it has a message for x - K from every other rank; each of them had then started x - K, and
therefore finished x - 2K, the one that used the slot before. No further synchronisation is needed.
"""

from __future__ import annotations

import mmap
import os
import secrets

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.comm.host_channel import HostChannel, SharedMessages, open_channel
from shardstep.comm.process_group import Group
from shardstep.comm.topology import SHARED_FOLDER, Topology

_NUMBERS = 251  # collectives are numbered by a byte


class SharedMemoryRing:
    """A ring of slots in memory that the ranks of a host share."""

    def __init__(self, channel: HostChannel, topology: Topology, memory: Tensor, count: int, slot_bytes: int) -> None:
        """``channel``: to the ranks with which the memory is shared."""
        self.slot_bytes = slot_bytes  # what fits; the slots themselves are whole pages
        self.topology = topology
        self.channel = channel
        self._slots = list(memory.view(count, -1))
        self._taken = self._received = 0

    @property
    def in_flight(self) -> int:
        """How many collectives may be in flight."""
        return len(self._slots) // 2

    @property
    def is_full(self) -> bool:
        """Whether a collective has to end before the next one may take a slot. Whoever takes slots asks this first."""
        return self._taken - self._received >= self.in_flight

    def take(self) -> Tensor:
        """The slot of the next collective, as bytes. Every rank takes slots in the same order."""
        if self.is_full:  # no assert: the note above rests on this, and without it memory is overwritten silently
            raise RuntimeError(
                f"shared memory expects at most {self.in_flight} collectives in flight, but one more was started. This "
                "is a mistake in shardstep: please report it, and set SHARDSTEP_SHARED_MEMORY=0 meanwhile."
            )
        slot = self._slots[self._taken % len(self._slots)]
        self._taken += 1
        return slot

    def signal(self, number: int) -> SharedMessages:
        """Signal the other ranks of the host that this one has written, and start to wait for the same from them.

        ``number``: of the collective, counted by ``taken``.
        """
        return self.channel.share(bytes([number % _NUMBERS]))

    @property
    def taken(self) -> int:
        """How many slots were taken: the number of the last collective."""
        return self._taken

    def release(self) -> None:
        """The oldest collective is over: all ranks have written, and this one has read or is about to."""
        self._received += 1

    def received(self, signals: SharedMessages) -> None:
        """All ranks have written, as signals say that were waited for. RuntimeError if not the same collective."""
        self.release()
        numbers = [message[0] for message in signals.messages]
        if any(number != self._received % _NUMBERS for number in numbers):
            raise RuntimeError(
                f"step expects all ranks to be in the same collective, but they are in {numbers} (counted modulo "
                f"{_NUMBERS}, by rank). A rank failed in an earlier step and went on: restart from a checkpoint."
            )


def open_ring(group: Group, topology: Topology, in_flight: int, slot_bytes: int) -> SharedMemoryRing | None:
    """Slots of ``slot_bytes`` shared by the ranks of each host, or None if those of some host cannot (no space).

    Enough for exactly ``in_flight`` collectives at once.

    Collective: call on every rank of the group. The first rank of a host makes a file in memory that only its user can
    open, and removes its name once all have mapped it: nothing is left behind, unless it is killed in between. A rank
    on which the environment variable SHARDSTEP_SHARED_MEMORY is 0 wants none, and then nobody has any.
    """
    count = 2 * in_flight
    size = count * -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    wanted = os.environ.get("SHARDSTEP_SHARED_MEMORY") != "0"
    is_first = group.rank == topology.host[0]
    name, code = os.path.join(SHARED_FOLDER, f"shardstep-{secrets.token_hex(8)}"), secrets.token_hex(16)
    memory = _create(name, code, size) if wanted and is_first else None
    try:
        # Every rank hears of every host's file: a collective is the same for all.
        files = {host[0]: collectives.move_json(group, [name, code], host[0], None) for host in topology.hosts}
        path, secret = files[topology.host[0]]
        if wanted and not is_first:
            memory = _attach(path, secret, size)
        everyone = all(row[0] for row in collectives.all_gather_ints(group, [memory is not None]))
        channel = open_channel(group, topology, path, secret) if everyone else None
    finally:
        if is_first and os.path.exists(name):
            os.unlink(name)
    if memory is None or channel is None:
        return None
    return SharedMemoryRing(channel, topology, memory, count, slot_bytes)


def _create(path: str, secret: str, size: int) -> Tensor | None:
    try:
        space = os.statvfs(SHARED_FOLDER)
        if size > space.f_bavail * space.f_frsize / 2:  # others (data loaders, say) need some of it, too
            return None
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError:  # no such folder on this system: sockets will do
        return None
    try:
        os.posix_fallocate(file, 0, size)  # now, not as a crash at the first write to a full file system
        os.pwrite(file, secret.encode(), 0)
        return _map(file, size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)


def _attach(path: str, secret: str, size: int) -> Tensor | None:
    """The secret tells whether this is the first rank's file, and not one of the same name on another host."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        return _map(file, size) if os.pread(file, len(secret), 0) == secret.encode() else None
    except (OSError, ValueError):  # no room in this process's address space: sockets will do
        return None
    finally:
        os.close(file)


def _map(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
