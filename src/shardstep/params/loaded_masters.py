"""float32 masters that were loaded: into the masters that are kept, or into parameters that are float32 themselves."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from shardstep.params.master_modes import can_be_master
from shardstep.params.sharded_parameters import ShardedParameters


def that_fit(sharded: ShardedParameters, masters: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Those of them, by parameter, that are kept here or that the parameter holds itself."""
    return {index: master for index, master in masters.items() if _has_place(sharded, index)}


def _has_place(sharded: ShardedParameters, index: int) -> bool:
    return sharded.masters.keeps(index) or can_be_master(sharded.params[index].dtype)


def take(sharded: ShardedParameters, masters: Mapping[int, Tensor], unstepped: Collection[int]) -> None:
    """Have these masters of this rank's pieces, and the pieces written anew from them. Others begin as they are.

    ``unstepped``: parameters that were not stepped yet.
    """
    sharded.masters.load(masters, unstepped)
    with torch.no_grad():
        for index, master in masters.items():
            if not sharded.masters.keeps(index):
                tensor = sharded.pieces.tensors[index]
                tensor.copy_(master.view(tensor.shape))
