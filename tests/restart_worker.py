"""A training program for tests/test_restarts.py: saves every step, resumes by itself, and loses a process once."""

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

sys.path.insert(0, str(Path(__file__).parent.parent))

from shardstep import ZeroRedundancyOptimizer, checkpoint


def run(rank: int, world: int, directory: str, fatal_step: int = -1) -> tuple[int, dict[str, Any]]:
    """Train to the end, from wherever the newest checkpoint is; returns where it began, and the weights."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 31), nn.Tanh(), nn.Linear(31, 4)).double()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, shard_gradients=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    began = 0
    if found := checkpoint.resume(directory, optimizer, model):
        began = found[1]["step"]
        scheduler.load_state_dict(found[1]["scheduler"])
    for step in range(began, 12):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(6, 9, generator=generator, dtype=torch.float64)).square().mean().backward()
        if step == fatal_step:
            die_once(rank, Path(directory) / "killed")
        optimizer.step()
        scheduler.step()
        extra = {"step": step + 1, "scheduler": scheduler.state_dict()}
        checkpoint.save(f"{directory}/step{step + 1}", optimizer, model, extra, keep=3, asynchronous=step % 3 == 1)
    return began, dict(model.state_dict())


def die_once(rank: int, mark: Path) -> None:
    """Rank 0 is killed, once in the life of the directory."""
    if mark.exists():
        return
    if rank:
        time.sleep(0.2)  # the others are on their way into the step when it happens
    else:
        mark.write_text("x")
        os.kill(os.getpid(), signal.SIGKILL)


def main(directory: str, fatal_step: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    began, weights = run(rank, dist.get_world_size(), directory, int(fatal_step))
    torch.save(weights, f"{directory}/rank{rank}.weights")
    facts = {"began": began, "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}
    Path(f"{directory}/rank{rank}.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
