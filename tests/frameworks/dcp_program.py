"""torch alone, with DCP's ``async_save`` in a process of its own. Also: what is lost with the state, as a control."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.nn.parallel import DistributedDataParallel

import shardstep
from tests.frameworks import work
from tests.frameworks.work import ACCUMULATE, CLIP, END, HOOK, MIDDLE, PLAIN, ZERO1, ZERO2

MODES = (PLAIN, ZERO1, HOOK, ZERO2)


def run(mode: str, folder: Path, resume: bool, report: Path, with_state: bool = True) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    inner = model = work.Model()
    if mode != ZERO2:
        model = DistributedDataParallel(inner)
    optimizer = work.new_optimizer(mode, inner.parameters())
    scheduler = work.new_scheduler(optimizer)
    if mode == HOOK:
        shardstep.shard_ddp_gradients(model, optimizer)
    if resume:
        _load(folder, inner, optimizer, scheduler, with_state)
    saving: Any = None
    for micro in range(MIDDLE * ACCUMULATE if resume else 0, END * ACCUMULATE):
        last = micro % ACCUMULATE == ACCUMULATE - 1
        wrapper: Any = optimizer if mode == ZERO2 else model
        with nullcontext() if last else wrapper.no_sync():
            model(work.my_rows(micro)).backward()
        if last:
            assert torch.nn.utils.clip_grad_norm_(inner.parameters(), CLIP) > CLIP
            optimizer.step()
            scheduler.step()
            if micro + 1 < END * ACCUMULATE:
                optimizer.zero_grad()
        if micro + 1 == MIDDLE * ACCUMULATE and mode != PLAIN:
            saving = dcp.async_save(
                {"model": inner.state_dict(), "optim": optimizer.sharded_state_dict(inner), **_rest(scheduler)},
                checkpoint_id=folder,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
    if saving is not None:
        saving.result()
    work.report(report, inner, optimizer)


def _rest(scheduler: Any) -> dict[str, Any]:
    return {"last_epoch": scheduler.last_epoch}


def _load(folder: Path, model: work.Model, optimizer: Any, scheduler: Any, with_state: bool) -> None:
    form = {"model": model.state_dict(), "optim": optimizer.sharded_state_dict(model), **_rest(scheduler)}
    dcp.load(form, checkpoint_id=folder)
    model.load_state_dict(form["model"])
    if with_state:
        optimizer.load_sharded_state_dict(form["optim"], model)
    scheduler.last_epoch = form["last_epoch"]
    for group in optimizer.param_groups:
        group["lr"] = scheduler.get_lr()[0]


def resume(root: Path) -> None:
    """The control: without the optimizer's state."""
    ranks = dist.get_world_size()
    run(ZERO1, root / f"saved-{ranks}-{ZERO1}", True, root / f"stateless-{ranks}.pt", with_state=False)
