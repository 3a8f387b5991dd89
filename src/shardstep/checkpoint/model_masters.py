"""A checkpoint of a float32 run, loaded into 16-bit parameters with masters: its model is what the masters are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardstep.checkpoint.keys import MODEL
from shardstep.checkpoint.open_checkpoint import Checkpoint
from shardstep.state.names import saved_names
from shardstep.state.shards import MASTER, StateShard, shard_of_range, shard_of_whole


def add_masters_of_model(checkpoint: Checkpoint, held: Any, names: Mapping[Tensor, str], state: dict[str, Any]) -> None:
    """Where a parameter has no master, and its model was saved in float32, read the master from there.

    Also of parameters without state: they were not stepped yet, or the optimizer's class makes none.

    Args:
        names: what the checkpoint calls the parameters.
        state: what was read, by name; the masters are put into it.
    """
    saved = {
        name: entry
        for name, entry in checkpoint.model_entries().items()
        if isinstance(entry, TensorStorageMetadata) and entry.properties.dtype == torch.float32
    }
    found = saved_names([names[param] for param in held.given.values()], saved)
    targets: dict[str, StateShard] = {}
    entries: dict[str, dict[str, Any]] = {}
    for index, piece in held.pieces.pieces.items():
        spec, name = held.layout.spec_of[index], names[held.given[index]]
        entry, there = state.get(name, {}), found.get(name)
        if not held.keeps_master(index) or there is None or not isinstance(entry, dict) or MASTER in entry:
            continue
        if tuple(saved[there].size) == spec.shape:
            state[name] = entry
            targets[there] = place_for_master(spec, piece, held.pieces.tensors[index].device)
            entries[there] = entry
    if targets:
        checkpoint.read_into({MODEL: dict(targets)})
    for there, target in targets.items():
        entries[there][MASTER] = target


def place_for_master(spec: Any, piece: Any, device: torch.device) -> StateShard:
    """New memory to read the master of this rank's piece of a parameter into."""
    local = torch.empty(piece.numel, dtype=torch.float32, device=device)
    if piece.whole:
        return shard_of_whole(local.view(spec.shape), blank=True)
    return shard_of_range(spec.shape, piece.start, piece.stop, local, blank=True)
