"""``convert --master``: a model in float32, from the masters that its checkpoint has."""

from __future__ import annotations

import torch

from shardstep.checkpoint import keys
from shardstep.checkpoint.keys import STATE
from shardstep.checkpoint.open_checkpoint import Checkpoint
from shardstep.state.master_weights import MASTER
from shardstep.state.names import saved_names

_NARROW = (torch.bfloat16, torch.float16)


def masters_for(checkpoint: Checkpoint, root: keys.Path) -> dict[str, str]:
    """For the tensors of the model under ``root`` that have a master: their keys, and the keys of the masters.

    ValueError if there is no master, or one has another shape than its parameter.
    """
    model = {
        keys.key_of(path[len(root) :]): fqn
        for fqn, path in checkpoint.paths.items()
        if path[: len(root)] == root and fqn in checkpoint.entries
    }
    masters = {str(path[-2]): fqn for fqn, path in checkpoint.paths.items() if _is_master(checkpoint, path)}
    found = {model[name]: masters[there] for name, there in saved_names(model, masters).items()}
    if not found:
        raise ValueError(
            f"--master expects a checkpoint with float32 masters of the model under {keys.key_of(root)!r}, but "
            f"{checkpoint.directory} has {'none' if not masters else 'none with its names'}. Leave it out."
        )
    for name, master in found.items():
        sizes = [tuple(checkpoint.entries[fqn].size) for fqn in (name, master)]  # type: ignore[union-attr]
        if sizes[0] != sizes[1]:
            raise ValueError(f"{name} expects a master of its shape {sizes[0]} but {master} has {sizes[1]}.")
    return found


def _is_master(checkpoint: Checkpoint, path: keys.Path) -> bool:
    roots = keys.optimizer_roots(checkpoint.paths.values())
    return path[-1] == MASTER and any(path[:-2] == (*root, STATE) for root in roots)


def wide_dtype(saved: torch.dtype) -> torch.dtype:
    """In which dtype a tensor of the model is written: what has no master is cast."""
    return torch.float32 if saved in _NARROW else saved
