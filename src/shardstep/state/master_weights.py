"""float32 masters in state dicts: under the key "master_weight" in the state of their parameter.

They are no state of the local optimizer, so they are put in when state is collected or saved, and taken out before the
local optimizer loads what is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shardstep.state.held import HeldParameters

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


def take_masters(local: dict[str, Any], held: HeldParameters) -> dict[int, Tensor]:
    """Take the masters out of the local optimizer's dict: by parameter index, as large as this rank's piece.

    A parameter without any other state has none then, as one that was never stepped.
    """
    indices = [index for owned in held.indices for index in owned]
    taken: dict[int, Tensor] = {}
    for number, index in enumerate(indices):
        entry = local["state"].get(number)
        if not isinstance(entry, Mapping) or MASTER not in entry:
            continue
        taken[index] = entry[MASTER]
        rest = {key: value for key, value in entry.items() if key != MASTER}
        if rest:
            local["state"][number] = rest
        else:
            del local["state"][number]
    return taken
