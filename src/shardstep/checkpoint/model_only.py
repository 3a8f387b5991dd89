"""The model of a checkpoint, and what was saved beside it, without an optimizer: no other rank takes part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.nn import Module

from shardstep.checkpoint.keys import EXTRA, MODEL
from shardstep.checkpoint.load_targets import model_targets, settle
from shardstep.checkpoint.model_swap import ModelSwap
from shardstep.checkpoint.open_checkpoint import Checkpoint
from shardstep.state.names import Differences


def read_extra(directory: Path) -> dict[str, Any]:
    """What was saved as ``extra``."""
    checkpoint = Checkpoint(directory)
    form = checkpoint.skeleton(EXTRA)
    checkpoint.read_into(form)
    return form.get(EXTRA) or {}


def read_model(directory: Path, model: Module, strict: bool) -> None:
    """Load the model. If anything cannot be read, or does not fit and ``strict``, nothing is changed."""
    if not isinstance(model, Module):
        raise TypeError(
            f"load_model expects a torch.nn.Module but got {type(model).__qualname__}. Build the model first."
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError("load_model expects a model with memory, but it has tensors on 'meta'. Call to_empty first.")
    checkpoint = Checkpoint(directory)
    if not checkpoint.has_model:
        raise ValueError(f"load_model expects a checkpoint with a model, but {directory} has none. Save with model=...")
    differences = Differences([], [], [])
    form = {MODEL: model_targets(checkpoint, model, differences)}
    settle(differences, directory, strict, stacklevel=4)
    checkpoint.read_into(form)
    ModelSwap(model, form[MODEL], strict).load()
