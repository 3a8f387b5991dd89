"""``convert --master``: a model in float32, from the masters that its checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardstep.checkpoint import keys
from shardstep.checkpoint.inspection import masters_in
from shardstep.checkpoint.open_checkpoint import Checkpoint
from shardstep.state.names import saved_names
from shardstep.tools.windows import have_equal_bits, is_constant

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
    masters = masters_in(checkpoint)
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
    return {**found, **_masters_of_ties(checkpoint, model, found)}


def _masters_of_ties(checkpoint: Checkpoint, model: Mapping[str, str], found: Mapping[str, str]) -> dict[str, str]:
    """For tied weights: the optimizer knows one of their names, the model all. They are saved with the same bits.

    Which says nothing of a tensor of one number: so are the weights of all norms that have not moved far yet.
    (What else has the same bits may have the master, too: it rounds to them.)
    """
    known = set(checkpoint.parameter_names())
    ties = {}
    for name, fqn in model.items():
        if fqn not in found and name not in known and _is_narrow(checkpoint, fqn):
            twin = next((other for other in found if have_equal_bits(checkpoint, fqn, other)), None)
            if twin is not None and not is_constant(checkpoint, fqn):
                ties[fqn] = found[twin]
    return ties


def _is_narrow(checkpoint: Checkpoint, fqn: str) -> bool:
    found = checkpoint.tensor_at(fqn)
    return found is not None and found[1] in _NARROW


def wide_dtype(saved: torch.dtype) -> torch.dtype:
    """In which dtype a tensor of the model is written: what has no master is cast."""
    return torch.float32 if saved in _NARROW else saved
