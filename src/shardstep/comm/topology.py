"""Which ranks share a host. How ranks talk follows from it, and the order of sums.

A host is memory that can be shared: the machine (its boot) and the ``/dev/shm`` that a process sees. Two containers
with a ``/dev/shm`` each are two hosts, although they run on one machine.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardstep.comm import collectives
from shardstep.comm.process_group import Group

SHARED_FOLDER = "/dev/shm"
_BOOT = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True)
class Topology:
    """The ranks of a group by host: the ranks of a host in order, hosts by their lowest rank."""

    rank: int  # this one
    hosts: tuple[tuple[int, ...], ...]

    @cached_property
    def host(self) -> tuple[int, ...]:
        """The ranks of this rank's host."""
        return next(host for host in self.hosts if self.rank in host)

    @cached_property
    def place(self) -> int:
        """This rank's place among those of its host."""
        return self.host.index(self.rank)

    @cached_property
    def other_hosts(self) -> list[tuple[int, ...]]:
        return [host for host in self.hosts if self.rank not in host]

    @property
    def is_one_host(self) -> bool:
        return len(self.hosts) == 1


def find_topology(group: Group) -> Topology:
    """Collective. Ask every rank of the group where it is."""
    if group.world_size == 1:
        return Topology(0, ((0,),))
    answers = collectives.all_gather_ints(group, [_host_number()])
    return topology_of(group.rank, [answer[0] for answer in answers])


def topology_of(rank: int, host_numbers: Sequence[int]) -> Topology:
    """``host_numbers``: by rank, a number that ranks of one host have in common."""
    hosts: dict[int, list[int]] = {}
    for other, number in enumerate(host_numbers):
        hosts.setdefault(number, []).append(other)
    return Topology(rank, tuple(map(tuple, hosts.values())))


def _host_number() -> int:
    facts = [_boot(), _shared_folder()]
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:7], "little")


def _boot() -> str:
    """Another text on every machine. (Machines may have the same name.)"""
    try:
        with open(_BOOT) as file:
            return file.read()
    except OSError:  # no Linux
        return socket.gethostname()


def _shared_folder() -> tuple[int, int] | None:
    try:
        found = os.stat(SHARED_FOLDER)
        return found.st_dev, found.st_ino
    except OSError:
        return None
