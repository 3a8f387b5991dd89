"""Process groups and what is known about them: members, backends, store, timeout."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from shardstep.comm import torch_versions
from shardstep.comm.program_end import let_threads_finish_at_exit

ProcessGroup: TypeAlias = dist.ProcessGroup  # for the signatures of those who touch no torch.distributed


@dataclass(frozen=True)
class Group:
    """The facts about a process group. ``rank`` is the rank within it, as everywhere in this package."""

    process_group: dist.ProcessGroup | None  # None: a process by itself, which sends nothing to anybody
    rank: int
    world_size: int
    global_rank: int
    backends: Mapping[str, str]  # device type -> name of the backend that serves its tensors
    own_store: dist.Store | None = None  # a connection of its own to the store, for another thread
    names: tuple[str, ...] = ()  # of its ranks, for messages; empty: their numbers say enough

    def name_of(self, rank: int) -> str:
        """What a rank is called in messages."""
        return self.names[rank] if self.names else f"rank {rank}"

    def names_of(self, ranks: Sequence[int]) -> str:
        """What some ranks are called in messages."""
        return ", ".join(map(self.name_of, ranks)) if self.names else rank_numbers(ranks)

    @property
    def store(self) -> dist.Store:
        """The key-value store the group was made with: a side channel that no collective can block."""
        return self.own_store or torch_versions.group_store(self.some_process_group)

    @property
    def some_process_group(self) -> dist.ProcessGroup:
        """The process group of what has one: whatever sends something has."""
        assert self.process_group is not None, "a process by itself sends nothing"
        return self.process_group

    @property
    def timeout(self) -> timedelta:
        """How long the group's collectives wait."""
        if self.process_group is None:
            return dist.default_pg_timeout
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


def rank_numbers(ranks: Sequence[int]) -> str:
    """What ranks are called where their numbers say enough."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def open_group(process_group: dist.ProcessGroup | None) -> Group:
    """The facts about ``process_group`` (None: all ranks). ValueError if the caller is not a member.

    Without any process group this is a process by itself, unless it was launched as one of several.
    """
    if process_group is None and not is_initialized():
        _check_launched_alone()
        return alone()
    if process_group is None:
        process_group = dist.distributed_c10d._get_default_group()
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise ValueError(
            f"process_group expects its caller to be a member, but global rank {dist.get_rank()} is not. "
            "Build the optimizer on the ranks of its process group only."
        )
    pairs = (pair.split(":") for pair in dist.get_backend_config(process_group).split(","))
    let_threads_finish_at_exit()
    return Group(
        process_group=process_group,
        rank=rank,
        world_size=dist.get_world_size(process_group),
        global_rank=dist.get_global_rank(process_group, rank),
        backends={pair[0]: pair[-1] for pair in pairs},
    )


def is_initialized() -> bool:
    """Whether this process has a process group."""
    return dist.is_available() and dist.is_initialized()


def _check_launched_alone() -> None:
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched.isdigit() and int(launched) > 1:
        raise ValueError(
            f"ZeroRedundancyOptimizer expects a process group, because {launched} processes were launched "
            "(WORLD_SIZE), but there is none: each would train by itself. Call torch.distributed.init_process_group "
            "first, on every rank."
        )


class Job(NamedTuple):
    """The processes that run together, and this one among them."""

    run: str  # the same on all its ranks, another one in every run
    rank: int
    store: dist.Store  # a connection of its own


def job() -> Job | None:
    """The job that this process is part of; None if it is alone."""
    if not is_initialized() or dist.get_world_size() == 1:
        return None
    default = dist.distributed_c10d._get_default_group()
    store = torch_versions.second_connection(torch_versions.group_store(default))
    # torchrun may keep its store over restarts, after which ranks may be other processes.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    run = store.compare_set(f"shardstep/run/{restarts}", "", secrets.token_hex(8)).decode()
    return Job(run, dist.get_rank(), store)


def alone() -> Group:
    """A process by itself: a group of one rank without a process group, whose store nobody else sees."""
    backends, store = {"cpu": "gloo"}, dist.HashStore()
    return Group(process_group=None, rank=0, world_size=1, global_rank=0, backends=backends, own_store=store)


def check_still_alone(group: Group) -> None:
    """RuntimeError if ``group`` is a process by itself, and this process is one of several by now."""
    if group.process_group is None and is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            "step expects an optimizer that was built after init_process_group, but this one was built without a "
            f"process group, and there are {dist.get_world_size()} ranks now: each would train by itself. Call "
            "init_process_group first and build the optimizer afterwards, on every rank."
        )


def open_side_group(group: Group, backend: str | None = None) -> Group:
    """A second process group of the same ranks, so that two kinds of traffic cannot block each other.

    ``backend``: another than the group's, e.g. "gloo" for traffic between hosts' memories.

    Collective: call on every rank of the group, and on no other. (``dist.new_group`` names a group after what else the
    process has joined, which may differ between ranks: the count of side groups of this group does not.)
    """
    if group.world_size == 1:
        return group
    number = group.store.add(f"shardstep/side/{group.rank}", 1)
    name = f"{group.some_process_group.group_name}/shardstep-{number}"
    backends = {"cpu": backend} if backend else group.backends
    return replace(group, process_group=_new_process_group(group, ranks_of(group), name, backend), backends=backends)


def open_group_over(ranks: Sequence[int], like: Group) -> Group:
    """A new process group of these global ranks, in their order. All ranks: the default group.

    Collective: call on each of these ranks, and on no other. ``like``: a group with its backends, of any of them.
    """
    if sorted(ranks) == list(range(dist.get_world_size())):
        return open_group(None)
    everybody = open_group(None)
    digest = hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]
    store = dist.PrefixStore(f"shardstep/over/{digest}", everybody.store)
    rank = list(ranks).index(everybody.rank)
    # How often these ranks did this before: each of them counts alike, whatever groups else it is in.
    name = f"shardstep-over-{digest}-{store.add(f'opened/{rank}', 1)}"
    facts = replace(like, rank=rank, world_size=len(ranks), own_store=store)
    return replace(facts, process_group=_new_process_group(facts, ranks, name), own_store=None)


def _new_process_group(group: Group, ranks: Sequence[int], name: str, backend: str | None = None) -> dist.ProcessGroup:
    """A process group of these global ranks, with the rank, the store and the timeout of ``group``."""
    made, _ = dist.distributed_c10d._new_process_group_helper(
        group.world_size,
        group.rank,
        list(ranks),
        dist.Backend(backend or dist.get_backend_config(group.process_group)),
        group.store,
        name,  # type: ignore[arg-type]
        timeout=group.timeout,
        group_desc="shardstep",
    )
    assert isinstance(made, dist.ProcessGroup), "this rank is a member"
    numbers = {global_rank: rank for rank, global_rank in enumerate(ranks)}
    dist.distributed_c10d._world.pg_group_ranks[made] = numbers
    return made


def ranks_of(group: Group) -> list[int]:
    """The global ranks of the members, in the order of their ranks in the group."""
    return [0] if group.process_group is None else dist.get_process_group_ranks(group.process_group)


def for_another_thread(group: Group) -> Group:
    """The group with a connection of its own to the store. (One connection serves one call at a time, also a wait.)"""
    return replace(group, own_store=torch_versions.second_connection(group.store))


def same_ranks(one: Group, other: Group) -> bool:
    """Whether two groups have the same members."""
    return ranks_of(one) == ranks_of(other)


def is_everybody(group: Group) -> bool:
    """Whether the group is all ranks, in their order."""
    return ranks_of(group) == list(range(dist.get_world_size() if is_initialized() else 1))


def is_member(process_group: dist.ProcessGroup | None) -> bool:
    """Whether there is such a group, and the caller is in it."""
    return is_initialized() and dist.get_rank(process_group) >= 0


def debug_is_on() -> bool:
    """Whether TORCH_DISTRIBUTED_DEBUG asks for more than silence."""
    return dist.get_debug_level() != dist.DebugLevel.OFF
