"""Every form in which an optimizer's state is saved and loaded, behind two functions."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from shardstep import checkpoint

DIRECTORIES = ["checkpoint", "async"]  # they hold the model, too
FORMS = ["plain", *DIRECTORIES, "dcp", "torch", "torch flattened", "torch sharded", "torch sharded flattened"]
FLATTENED = [form for form in FORMS if "flattened" in form]


def save(form: str, model: Any, opt: Any, path: Path) -> Any:
    """Save on every rank; what is not in ``path`` is returned, on rank 0."""
    flat = "flattened" in form
    options = StateDictOptions(full_state_dict="sharded" not in form, flatten_optimizer_state_dict=flat)
    if form in DIRECTORIES:
        checkpoint.save(path, opt, model, asynchronous=form == "async").wait()
        return None
    if form == "dcp":
        dcp.save({"optim": opt.sharded_state_dict(model)}, checkpoint_id=path)
        return None
    if form.startswith("torch sharded"):
        dcp.save({"optim": get_optimizer_state_dict(model, opt, options=options)}, checkpoint_id=path)
        return None
    if form.startswith("torch"):
        return get_optimizer_state_dict(model, opt, options=options)
    opt.consolidate_state_dict()
    return opt.state_dict()


def load(form: str, model: Any, opt: Any, path: Path, saved: Any = None, planner: Any = None) -> None:
    """Load on every rank what ``save`` saved. The model is loaded from directories of ours only."""
    flat = "flattened" in form  # (torch cannot load a flattened dict with full_state_dict=True)
    offload = "offloaded" in form
    options = StateDictOptions(full_state_dict=form == "torch", flatten_optimizer_state_dict=flat, cpu_offload=offload)
    if form in DIRECTORIES:
        checkpoint.load(path, opt, model)
    elif form == "dcp":
        state = {"optim": opt.sharded_state_dict(model)}
        dcp.load(state, checkpoint_id=path, planner=planner)
        opt.load_sharded_state_dict(state["optim"], model)
    elif form.startswith("torch sharded"):
        state = {"optim": get_optimizer_state_dict(model, opt, options=options)}
        dcp.load(state, checkpoint_id=path, planner=planner)
        set_optimizer_state_dict(model, opt, state["optim"], options=options)
    elif form.startswith("torch"):
        set_optimizer_state_dict(model, opt, copy.deepcopy(saved), options=options)
    else:
        opt.load_state_dict(copy.deepcopy(saved))


def passed_on(saved: Any) -> Any:
    """What rank 0 got from ``save``, on every rank."""
    box = [saved]
    dist.broadcast_object_list(box, 0)
    return box[0]
