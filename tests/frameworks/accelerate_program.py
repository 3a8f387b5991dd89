"""Accelerate: ``save_state`` and ``load_state``, and an optimizer that is loaded before it is prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from safetensors.torch import load_file

import shardstep
from shardstep.integrations.accelerate import consolidate_when_saving
from tests.frameworks import work
from tests.frameworks.work import ACCUMULATE, CLIP, END, HOOK, MIDDLE, PLAIN, ZERO1, ZERO2

MODES = (PLAIN, ZERO1, HOOK, ZERO2)


def run(mode: str, folder: Path, resume: bool, report: Path, load_early: bool = False) -> None:
    # (split_batches: the scheduler is stepped once per step, and not once per rank.)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATE,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    inner = model = work.Model()
    optimizer = work.new_optimizer(mode, model.parameters())
    sharded = optimizer
    scheduler = work.new_scheduler(optimizer)
    if load_early:
        _load(folder, inner, optimizer, scheduler)
    if mode == ZERO2:  # as it is, but moved to its device
        model = accelerator.prepare_model(model, evaluation_mode=True)
        model.train()
    else:
        model = accelerator.prepare(model)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    if mode == HOOK:
        shardstep.shard_ddp_gradients(model, optimizer)
    if mode != PLAIN:
        consolidate_when_saving(accelerator, optimizer)
    if resume and not load_early:
        accelerator.load_state(folder)
    for micro in range(MIDDLE * ACCUMULATE if resume else 0, END * ACCUMULATE):
        with accelerator.accumulate(model):
            accelerator.backward(model(work.my_rows(micro)))
            if accelerator.sync_gradients:
                assert accelerator.clip_grad_norm_(model.parameters(), CLIP) > CLIP
            optimizer.step()
            scheduler.step()
            if micro + 1 < END * ACCUMULATE:
                optimizer.zero_grad()
        if micro + 1 == MIDDLE * ACCUMULATE:
            accelerator.save_state(folder)
    work.report(report, inner, sharded)
    accelerator.free_memory()


def _load(folder: Path, model: work.Model, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """As a program does that loads everything first and prepares it then."""
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("module."): value for name, value in weights.items()})
    optimizer.load_state_dict(torch.load(folder / "optimizer.bin", weights_only=True))
    scheduler.load_state_dict(torch.load(folder / "scheduler.bin", weights_only=False))


def resume(root: Path) -> None:
    """Loaded before ``prepare``."""
    ranks = work.world_size()
    run(ZERO1, root / f"saved-{5 - ranks}-{ZERO1}", True, root / f"loaded-early-{ranks}.pt", load_early=True)
