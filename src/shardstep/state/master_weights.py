"""float32 masters in state dicts: under the key "master_weight" in the state of their parameter.

They are no state of the local optimizer, so they are put in when state is collected or saved, and taken out before the
local optimizer loads what is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardstep.layout.specs import ParamSpec, Piece
from shardstep.state.held import HeldParameters
from shardstep.state.shard import StateShard, shard_of_range, shard_of_whole

MASTER = "master_weight"


def with_masters(
    held: HeldParameters, state: Mapping[Any, Any], only: int | None = None
) -> Mapping[Any, Mapping[str, Any]]:
    """The local optimizer's state by tensor, with the masters of parameters that were stepped. ``only``: of one."""
    masters = held.master_weights(only)
    if not masters:
        return state
    entries = dict(state)
    for index, master in masters.items():
        tensor = held.pieces.tensors[index]
        entries[tensor] = {**entries.get(tensor, {}), MASTER: master}
    return entries


def place_for_master(spec: ParamSpec, piece: Piece, device: torch.device) -> StateShard:
    """New memory to read the master of this rank's piece of a parameter into."""
    local = torch.empty(piece.numel, dtype=torch.float32, device=device)
    if piece.whole:
        return shard_of_whole(local.view(spec.shape), blank=True)
    return shard_of_range(spec.shape, piece.start, piece.stop, local, blank=True)


def without_old_master(entry: Any) -> Any:
    """A parameter's state without the master that was there before DCP loaded the rest: the checkpoint had none."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get(MASTER), StateShard) or entry[MASTER].loaded:
        return entry
    rest = {key: value for key, value in entry.items() if key != MASTER}
    return rest if any(isinstance(value, StateShard) and value.loaded for value in rest.values()) else entry


class LoadedMasters(NamedTuple):
    """Masters that came with a state dict, of this rank's pieces."""

    weights: dict[int, Tensor]  # by parameter
    alone: set[int]  # of parameters that came with no other state


def take_masters(local: dict[str, Any], held: HeldParameters) -> LoadedMasters:
    """Take the masters out of the local optimizer's dict. A parameter without any other state has none then.

    ValueError if one does not fit its parameter: before anything is changed, so that the other ranks can be told.
    """
    indices = [index for owned in held.indices for index in owned]
    taken, alone = dict[int, Tensor](), set[int]()
    for number, index in enumerate(indices):
        entry = local["state"].get(number)
        if not isinstance(entry, Mapping) or MASTER not in entry:
            continue
        taken[index] = _fitting(entry[MASTER], held.layout.spec_of[index], held.pieces.pieces[index])
        rest = {key: value for key, value in entry.items() if key != MASTER}
        if rest:
            local["state"][number] = rest
        else:
            del local["state"][number]
            alone.add(index)
    return LoadedMasters(taken, alone)


def _fitting(master: Any, spec: ParamSpec, piece: Piece) -> Tensor:
    if isinstance(master, Tensor) and master.numel() == piece.numel:
        return master
    got = f"shape {tuple(master.shape)}" if isinstance(master, Tensor) else f"a {type(master).__qualname__}"
    raise ValueError(
        f"the {MASTER} of {spec.label} expects a tensor of the parameter's shape {spec.shape} but got {got}. Take it "
        "out of the dict: then it begins as the parameter."
    )
