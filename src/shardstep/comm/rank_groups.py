"""The groups of ranks that one optimizer speaks with: from a process group, or from a mesh.

A mesh of two dimensions is (replicate, shard), as in FSDP2's hybrid sharding: state is sharded over the inner dimension
and replicated over the outer one. Facts are compared among all ranks of the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from shardstep.comm.consensus import RankConsensus
from shardstep.comm.process_group import (
    Group,
    ProcessGroup,
    is_member,
    open_group,
    open_group_over,
    ranks_of,
)

DeviceMesh: TypeAlias = TorchDeviceMesh  # for the signatures of those who touch no torch.distributed
_DIMENSIONS = ("replicate", "shard")


@dataclass(frozen=True)
class RankGroups:
    """The groups of ranks of one optimizer. Without a second dimension ``shard`` and ``everyone`` have the same."""

    shard: Group  # the ranks that share the state
    replicate: Group | None  # the ranks that hold the same shard; None: nobody else does
    everyone: Group  # all of them
    shard_ranks: tuple[int, ...]  # by rank of everyone: its rank in its shard group
    mesh: DeviceMesh | None = None

    @property
    def replica(self) -> int:
        """Which of the replicas this rank is in."""
        return self.replicate.rank if self.replicate is not None else 0

    @property
    def replicas(self) -> int:
        """How many ranks hold the same shard."""
        return self.replicate.world_size if self.replicate is not None else 1

    @property
    def siblings(self) -> list[int]:
        """The ranks of everyone that are in this rank's shard group."""
        numbers = {global_rank: rank for rank, global_rank in enumerate(ranks_of(self.everyone))}
        return [numbers[global_rank] for global_rank in ranks_of(self.shard)]

    def describe(self) -> str:
        """The arrangement in words, the same on every rank that has the same."""
        return "none" if self.mesh is None else _describe(self.mesh)


def one_dimension(group: Group, mesh: DeviceMesh | None = None) -> RankGroups:
    """All ranks of a group share the state."""
    return RankGroups(group, None, group, tuple(range(group.world_size)), mesh)


def open_groups(argument: ProcessGroup | DeviceMesh | None) -> RankGroups:
    """The groups that ``process_group=argument`` stands for. ValueError if there are none for this rank.

    Collective for a mesh of two dimensions: call on every rank of it.
    """
    if not isinstance(argument, TorchDeviceMesh):
        return one_dimension(open_group(argument))
    _check(argument)
    if argument.ndim == 1:
        return one_dimension(open_group(argument.get_group()), argument)
    members = sorted(argument.mesh.flatten().tolist())
    return _two_dimensions(argument, open_group_over(members, open_group(argument.get_group(1))))


def _two_dimensions(mesh: DeviceMesh, everyone: Group) -> RankGroups:
    grid, members = mesh.mesh.tolist(), ranks_of(everyone)
    replicate, shard = (open_group(mesh.get_group(dimension)) for dimension in (0, 1))
    shard_ranks = {rank: sorted(row).index(rank) for row in grid for rank in row}
    names = {rank: _name(mesh, grid, rank) for rank in members}
    return RankGroups(
        shard=replace(shard, names=tuple(names[rank] for rank in ranks_of(shard))),
        replicate=replicate if replicate.world_size > 1 else None,
        everyone=replace(everyone, names=tuple(names[rank] for rank in members)),
        shard_ranks=tuple(shard_ranks[rank] for rank in members),
        mesh=mesh,
    )


def _name(mesh: DeviceMesh, grid: Sequence[Sequence[int]], rank: int) -> str:
    """A rank of a mesh in messages: by its global number, and where it is in the mesh."""
    outer, inner = mesh.mesh_dim_names or _DIMENSIONS
    row = next(position for position, ranks in enumerate(grid) if rank in ranks)
    return f"rank {rank} ({outer} {row}, {inner} {grid[row].index(rank)})"


def _describe(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or ("without a name",) * mesh.ndim
    dimensions = ", ".join(f"{name}: {size}" for name, size in zip(names, mesh.shape, strict=True))
    return f"({dimensions})"


def _check(mesh: DeviceMesh) -> None:
    """ValueError unless state can be sharded over this mesh, here."""
    if mesh.ndim not in (1, 2):
        raise ValueError(
            "process_group expects a mesh of one dimension, or of two (replicate, shard), but got one of "
            f"{mesh.ndim}: {_describe(mesh)}. Pass the dimensions of data parallelism, e.g. mesh['replicate', 'shard']."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"process_group expects a mesh with its caller in it, but global rank {dist.get_rank()} is not in the mesh "
            f"{_describe(mesh)} of ranks {mesh.mesh.tolist()}. Build the optimizer on the ranks of its mesh only."
        )
    if mesh.ndim == 2:
        _check_order(mesh)


def _check_order(mesh: DeviceMesh) -> None:
    if mesh.mesh_dim_names == _DIMENSIONS[::-1]:
        raise ValueError(
            f"process_group expects a mesh (replicate, shard), in this order, but got {_describe(mesh)}. Pass "
            "mesh['replicate', 'shard'], or make it with the dimensions in this order."
        )
    # torch numbers the ranks of a group by their global ranks, whatever their order in the mesh.
    grid = mesh.mesh.tolist()
    orders = [[sorted(row).index(rank) for rank in row] for row in grid]
    if any(order != orders[0] for order in orders):
        raise ValueError(
            f"process_group expects a mesh whose rows {_describe(mesh)} have their ranks in the same order, but got "
            f"{grid}: ranks of one column would hold different shards. Let the ranks of every row ascend."
        )


def _is_member(argument: ProcessGroup | DeviceMesh | None) -> bool:
    if isinstance(argument, TorchDeviceMesh):
        return argument.ndim in (1, 2) and argument.get_coordinate() is not None
    return is_member(argument)


class Opened(NamedTuple):
    """The groups of an optimizer, and where all of their ranks compare facts."""

    ranks: RankGroups
    consensus: RankConsensus


@contextmanager
def opening(call: str, argument: ProcessGroup | DeviceMesh | None) -> Iterator[Callable[[], Opened]]:
    """For a constructor that checks its arguments before it needs the groups: opens them when asked to.

    If this rank fails before, the ranks that wait for it hear of it all the same.
    """
    opened: list[Opened] = []

    def groups() -> Opened:
        if not opened:
            ranks = open_groups(argument)
            opened.append(Opened(ranks, RankConsensus(ranks.everyone)))
        return opened[0]

    try:
        yield groups
    except Exception as error:
        if opened or _is_member(argument):
            groups().consensus.report_failure(call, error)
        raise
