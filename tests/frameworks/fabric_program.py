"""Fabric: ``fabric.save`` and ``fabric.load``; and ``shardstep.checkpoint`` with what ``fabric.setup`` returned."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning import Fabric

import shardstep
from shardstep.integrations.fabric import ShardedStrategy
from tests.frameworks import work
from tests.frameworks.work import ACCUMULATE, CLIP, END, HOOK, MIDDLE, PLAIN, ZERO1, ZERO2

MODES = (PLAIN, ZERO1, HOOK, ZERO2)


def run(mode: str, folder: Path, resume: bool, report: Path) -> None:
    strategy = ShardedStrategy() if mode == ZERO2 else "ddp"
    fabric = Fabric(accelerator="cpu", devices=work.world_size(), strategy=strategy)
    fabric.launch()
    inner = work.Model()
    sharded = work.new_optimizer(mode, inner.parameters())
    scheduler = work.new_scheduler(sharded)
    model, optimizer = fabric.setup(inner, sharded)
    if mode == HOOK:
        shardstep.shard_ddp_gradients(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "micro": 0}
    if resume:
        fabric.load(folder / "state.ckpt", state)
    for micro in range(state["micro"], END * ACCUMULATE):
        last = micro % ACCUMULATE == ACCUMULATE - 1
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(model(work.my_rows(micro)))
        if last:
            assert fabric.clip_gradients(model, optimizer, max_norm=CLIP) > CLIP
            optimizer.step()
            scheduler.step()
            if micro + 1 < END * ACCUMULATE:
                optimizer.zero_grad()
        if micro + 1 == MIDDLE * ACCUMULATE:
            fabric.save(folder / "state.ckpt", {**state, "micro": micro + 1})
            if mode != PLAIN:
                shardstep.checkpoint.save(folder / "ours", optimizer, model)
    if resume:
        _load_elsewhere(folder / "ours")
    work.report(report, inner, sharded)


def _load_elsewhere(directory: Path) -> None:
    """A program that knows nothing of Fabric loads it, by the names of the plain model."""
    model = work.Model()
    plain = torch.optim.AdamW(model.parameters())
    shardstep.checkpoint.load(directory, plain, model)
    expected = torch.load(directory.parent / "state.ckpt", weights_only=True)
    assert all(torch.equal(value, expected["model"][name]) for name, value in model.state_dict().items())
    moments = [plain.state[param]["exp_avg"] for param in model.parameters()]
    saved = [entry["exp_avg"] for _, entry in sorted(expected["optimizer"]["state"].items())]
    assert len(saved) == 4
    assert all(torch.equal(one, other) for one, other in zip(moments, saved, strict=True))
