"""What a step has to do, bucket by bucket: read off the layout, the active parameters and their memory.

Made anew whenever one of them changes, and never changed itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from shardstep.comm.process_group import Group
from shardstep.comm.shared_memory import SharedMemoryRing
from shardstep.layout.specs import Layout
from shardstep.params.all_gather import BucketAllGather, gathers_of
from shardstep.params.pieces import LocalPieces

# By position of the group: the tensors to step and, if the group has names, their names.
Subset = dict[int, dict[str, list]]


class StepPlan(NamedTuple):
    """The buckets of a step."""

    active_buckets: list[int]  # with a parameter that may change, in order
    gathers: list[list[BucketAllGather]]  # by bucket: one, none if there is nothing to send, or one per part
    subsets: list[Subset]  # by bucket: what of this rank's groups is stepped with it
    owns_active: bool  # whether this rank has anything to step


def make_plan(
    layout: Layout,
    params: Mapping[int, Tensor],
    active: Mapping[int, bool],
    pieces: LocalPieces,
    indices: Sequence[Sequence[int]],
    buffers: Sequence[Tensor | None],
    wire: Group,
    ring: SharedMemoryRing | None,
) -> StepPlan:
    """``indices``: per group, the parameters of which this rank has a piece. ``buffers``: of bucket views."""
    buckets = layout.buckets
    active_buckets = [b.position for b in buckets if any(active[index] for index in b.params)]
    gathers: list[list[BucketAllGather]] = [[] for _ in buckets]
    if wire.world_size > 1:
        for position in active_buckets:
            made = gathers_of(buckets[position], params, active, wire, buffers[position], ring)
            gathers[position] = [gather for gather in made if not gather.empty]
    subsets = _divide_by_bucket(layout, pieces, indices, active_buckets)
    return StepPlan(active_buckets, gathers, subsets, any(subsets[position] for position in active_buckets))


def _divide_by_bucket(
    layout: Layout, pieces: LocalPieces, indices: Sequence[Sequence[int]], active_buckets: Sequence[int]
) -> list[Subset]:
    """By bucket: this rank's pieces, and their names, of the groups that have some in it.

    A group of which this rank has nothing comes along empty in the first step: some optimizers write into it.
    """
    subsets: list[Subset] = [{} for _ in layout.buckets]
    for position, owned in enumerate(indices):
        named = any(layout.spec_of[index].name is not None for index in owned)
        for index in owned:
            new: dict[str, list] = {"params": [], "param_names": []} if named else {"params": []}
            part = subsets[pieces.pieces[index].bucket].setdefault(position, new)
            part["params"].append(pieces.tensors[index])
            if named:
                part["param_names"].append(layout.spec_of[index].name)
    first = next((subsets[bucket] for bucket in active_buckets if subsets[bucket]), None)
    if first is not None:
        first |= {position: {"params": []} for position, owned in enumerate(indices) if not owned}
    return subsets
