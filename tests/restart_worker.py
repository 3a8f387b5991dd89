"""A training program for tests/test_restarts.py: saves every step, resumes by itself, and loses a process once.

The batch of a step is the same whatever the number of ranks: each rank takes its equal share of it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent.parent))

from shardstep import ZeroRedundancyOptimizer, checkpoint

STEPS, FATAL_STEP = 12, 7
BATCH = 12  # divisible by 2 and 3 ranks


def run(rank: int, world: int, directory: str, mode: str, victim: bool | None = None) -> dict[str, Any]:
    """Train to the end, from wherever the newest checkpoint is; returns the weights and where it began."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 31), nn.Tanh(), nn.Linear(31, 4)).double()
    trained = DistributedDataParallel(model) if mode == "ddp" else model
    options = {"lr": 1e-2, "shard_gradients": mode == "gradients"}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    began = 0
    if found := checkpoint.resume(directory, optimizer, model):
        began = found[1]["step"]
        scheduler.load_state_dict(found[1]["scheduler"])
    for step in range(began, STEPS):
        generator = torch.Generator().manual_seed(1000 + step)
        x, y = (torch.randn(BATCH, size, generator=generator, dtype=torch.float64) for size in (9, 4))
        optimizer.zero_grad()
        (trained(x.chunk(world)[rank]) - y.chunk(world)[rank]).square().mean().backward()
        if step == FATAL_STEP and victim is not None:
            die_once(victim, Path(directory) / "killed")
        optimizer.step()
        scheduler.step()
        extra = {"step": step + 1, "scheduler": scheduler.state_dict()}
        checkpoint.save(f"{directory}/step{step + 1}", optimizer, model, extra, keep=3, asynchronous=step % 3 == 1)
    return {"began": began, "world": world, "weights": dict(model.state_dict())}


def die_once(here: bool, mark: Path) -> None:
    """Once in the life of the directory; with this process goes its agent if the environment says so."""
    if mark.exists():
        return
    if not here:
        time.sleep(0.2)  # the others are on their way into the step when it happens
        return
    mark.write_text("x")
    if os.environ.get("KILL_AGENT"):
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def main(directory: str, mode: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    victim = rank == 0 if os.environ["VICTIM"] == "rank 0" else os.environ["VICTIM"] == "this host"
    told = run(rank, world, directory, mode, victim)
    torch.save(told.pop("weights"), f"{directory}/rank{rank}.weights")
    told["restarts"] = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    Path(f"{directory}/rank{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
