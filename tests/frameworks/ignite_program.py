"""Ignite: ``Checkpoint`` on an event of the engine, and ``Checkpoint.load_objects``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver

import shardstep
from shardstep.integrations.ignite import Consolidated
from tests.frameworks import work
from tests.frameworks.work import ACCUMULATE, CLIP, END, HOOK, MIDDLE, PLAIN, ZERO1, ZERO2

MODES = (PLAIN, ZERO1, HOOK, ZERO2)


def run(mode: str, folder: Path, resume: bool, report: Path) -> None:
    if idist.backend() is None:
        idist.initialize("gloo")
    inner = work.Model()
    optimizer = idist.auto_optim(work.new_optimizer(mode, inner.parameters()))
    model = inner if mode == ZERO2 else idist.auto_model(inner)
    if mode == HOOK:
        shardstep.shard_ddp_gradients(model, optimizer)
    scheduler = work.new_scheduler(optimizer)

    def update(engine: Engine, batch: Any) -> None:
        micro = engine.state.iteration - 1
        model(work.my_rows(micro)).div(ACCUMULATE).backward()
        if engine.state.iteration % ACCUMULATE == 0:
            params = list(model.parameters())
            assert torch.nn.utils.clip_grad_norm_(params, CLIP / ACCUMULATE) > CLIP / ACCUMULATE
            optimizer.step()
            scheduler.step()
            if engine.state.iteration < END * ACCUMULATE:
                optimizer.zero_grad()

    trainer = Engine(update)
    saved = optimizer if mode == PLAIN else Consolidated(optimizer)
    objects = {"model": model, "optimizer": saved, "scheduler": scheduler, "trainer": trainer}
    if resume:
        Checkpoint.load_objects(objects, next(folder.glob("*.pt")))
    else:
        handler = Checkpoint(objects, DiskSaver(str(folder), create_dir=True, require_empty=False))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=MIDDLE * ACCUMULATE), handler)
    trainer.run(range(END * ACCUMULATE), max_epochs=1)
    assert trainer.state.iteration == END * ACCUMULATE
    work.report(report, inner, optimizer)
