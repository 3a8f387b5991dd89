"""The model of a checkpoint, and what was saved beside it, without an optimizer: no other rank takes part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.nn import Module

from shardstep.checkpoint.keys import EXTRA, MODEL
from shardstep.checkpoint.load_targets import model_targets, settle
from shardstep.checkpoint.model_swap import ModelSwap
from shardstep.checkpoint.open_checkpoint import Checkpoint
from shardstep.state.named import Differences


def read_extra(directory: Path) -> dict[str, Any]:
    """What was saved as ``extra``."""
    checkpoint = Checkpoint(directory)
    form = checkpoint.skeleton(EXTRA)
    checkpoint.read_into(form)
    return form.get(EXTRA) or {}


def read_model(directory: Path, model: Module, strict: bool) -> None:
    """Load the model. If anything cannot be read, or does not fit and ``strict``, nothing is changed."""
    checkpoint = Checkpoint(directory)
    if not checkpoint.has_model:
        raise ValueError(f"{directory} expects a model to have been saved in it, but has none. Save with model=...")
    differences = Differences([], [], [])
    form = {MODEL: model_targets(checkpoint, model, differences)}
    settle(differences, directory, strict, stacklevel=4)
    checkpoint.read_into(form)
    ModelSwap(model, form[MODEL], strict).load()
