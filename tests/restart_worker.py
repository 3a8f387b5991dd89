"""A training program for tests/test_restarts.py: saves every step, resumes by itself, and is killed once.

    torchrun ... tests/restart_worker.py DIRECTORY --fatal-step N --victim RANK

The batch of a step is the same whatever the number of ranks: each rank takes its equal share of it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent.parent))

from shardstep import ZeroRedundancyOptimizer, checkpoint

STEPS = 12
BATCH = 12  # divisible by 1, 2, 3 and 4 ranks


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 31), nn.Tanh(), nn.Linear(31, 4)).double()


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    draw = [torch.randn(BATCH, size, generator=generator, dtype=torch.float64) for size in (9, 4)]
    return draw[0], draw[1]


def run(rank: int, world: int, directory: str, mode: str = "ddp", fatal_step: int = -1, victim: int = -1) -> dict:
    """Train to the end, from wherever the newest checkpoint is; returns the weights and where it began."""
    model = make_model()
    trained: nn.Module = model
    if mode == "ddp":
        trained = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-2, shard_gradients=mode == "gradients"
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    found = checkpoint.resume(directory, optimizer, model)
    began = 0
    if found is not None:
        began = found[1]["step"]
        scheduler.load_state_dict(found[1]["scheduler"])
    for step in range(began, STEPS):
        x, y = (part.chunk(world)[rank] for part in batch_of(step))
        optimizer.zero_grad()
        (trained(x) - y).square().mean().backward()
        if step == fatal_step:
            die(rank == victim, directory)
        optimizer.step()
        scheduler.step()
        extra = {"step": step + 1, "scheduler": scheduler.state_dict()}
        checkpoint.save(f"{directory}/step{step + 1}", optimizer, model, extra, keep=3, asynchronous=step % 3 == 1)
    return {"began": began, "world": world, "weights": dict(model.state_dict())}


def die(here: bool, directory: str) -> None:
    """Once in the life of the directory: this rank is killed, and with it its agent if the test says so."""
    mark = Path(directory) / "killed"
    if mark.exists():
        return
    if not here:
        time.sleep(0.2)  # the others are on their way into the step when it happens
        return
    mark.write_text("x")
    if os.environ.get("KILL_AGENT"):
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--mode", default="ddp")
    parser.add_argument("--fatal-step", type=int, default=-1)
    parser.add_argument("--victim", type=int, default=-1, help="a rank; -2: the one whose environment has VICTIM")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    victim = arguments.victim if arguments.victim != -2 else (rank if os.environ.get("VICTIM") else -1)
    told = run(rank, world, arguments.directory, arguments.mode, arguments.fatal_step, victim)
    out = Path(arguments.directory) / f"rank{rank}"
    torch.save(told["weights"], f"{out}.weights")
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    out.with_suffix(".json").write_text(json.dumps({"began": told["began"], "world": world, "restarts": restarts}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
