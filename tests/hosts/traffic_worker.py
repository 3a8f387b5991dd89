"""One rank of a job that counts what crosses the link between hosts.

... tests/hosts/traffic_worker.py FOLDER
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tests.hosts.links import traffic
from tests.hosts.training import MODES, Training, ddp

WIDTH, LAYERS = 512, 4
ITERATIONS = 3


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    measured = {name: crossed_bytes(make(make_layers())) for name, make in {"ddp": ddp, **MODES}.items()}
    if dist.get_rank() == 0:
        gradients = sum(param.nbytes for param in make_layers().parameters())
        (folder / "traffic.json").write_text(json.dumps({"gradients": gradients, "crossed": measured}))
    dist.barrier()
    dist.destroy_process_group()


def make_layers() -> nn.Module:
    """4 MB in float32: against this, headers and the store's keys are nothing."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def crossed_bytes(training: Training) -> float:
    """Both directions, per iteration. DDP makes its buckets again after the first iteration, which is not counted."""
    iterate(training)
    dist.barrier()
    before = traffic()
    for _ in range(ITERATIONS):
        iterate(training)
    dist.barrier()
    return sum(traffic() - before) / ITERATIONS


def iterate(training: Training) -> None:
    training.optimizer.zero_grad()
    training.forward(torch.ones(2, WIDTH)).square().mean().backward()
    training.optimizer.step()


if __name__ == "__main__":
    main()
