"""How the ranks of one optimizer compare during a save, which may be in the background."""

from __future__ import annotations

from typing import NamedTuple

from shardstep.checkpoint.adapter import OptimizerAdapter
from shardstep.comm import process_group
from shardstep.comm.consensus import RankConsensus
from shardstep.comm.process_group import Group


class SideChannel(NamedTuple):
    """A connection to the store that the main thread does not use."""

    group: Group
    consensus: RankConsensus


def side_channel_of(adapted: OptimizerAdapter) -> SideChannel:
    """The side channel of an optimizer, which is opened once.

    Collective: call on every rank of the group. Nothing is sent through the process group, so it may be destroyed
    meanwhile. (DCP wants one that serves the CPU all the same.)
    """
    if adapted.group.world_size == 1:
        return SideChannel(adapted.group, adapted.consensus)
    if "side" not in adapted.kept:
        group = adapted.group
        if "cpu" not in group.backends:
            group = process_group.open_side_group(group, "gloo")
        group = process_group.for_another_thread(group)
        consensus = RankConsensus(group, "checkpoint")
        consensus.settle()  # here, where all ranks come in the same order
        adapted.kept["side"] = SideChannel(group, consensus)
    return adapted.kept["side"]
