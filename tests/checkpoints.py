"""What tests of checkpoints share: a model, its steps, and the plain optimizer on the same gradients as the oracle.

All ranks have the same gradients, so everything is compared bit by bit.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import nn
from torch.optim import AdamW, Optimizer

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.oracle import assert_same
from tests.twins import values

Shapes = Sequence[Sequence[int]]
# Pieces of the first two are cut in the middle of rows, also on three ranks.
SMALL: Shapes = ((96, 130), (41, 200), (7, 5), (3,), ())
LARGE: Shapes = ((900, 1000), (50,), (300, 1000))  # 29 MB with AdamW's state: a save takes some 50 ms


class Weights(nn.Module):
    """Nothing but parameters, and a buffer that counts steps."""

    def __init__(self, shapes: Shapes = SMALL) -> None:
        super().__init__()
        for position, shape in enumerate(shapes):
            self.register_parameter(f"w{position}", nn.Parameter(values(shape, 100 + position)))
        self.register_buffer("count", torch.tensor(0))


def step(model: Any, optimizer: Optimizer, numbers: range) -> None:
    """Steps with gradients that are cheap, and others for every step and parameter."""
    for number in numbers:
        optimizer.zero_grad()
        for position, param in enumerate(model.parameters()):
            param.grad = (param.detach() + number * 0.7 + position).sin()
        optimizer.step()
        model.count += 1


def sharded(steps: int, model: Weights | None = None, **options: Any) -> tuple[Weights, ZeroRedundancyOptimizer]:
    model = Weights() if model is None else model
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2, **options)
    step(model, optimizer, range(steps))
    return model, optimizer


def plain(steps: int, model: Weights | None = None, **options: Any) -> tuple[Weights, AdamW]:
    model = Weights() if model is None else model
    optimizer = AdamW(model.parameters(), **{"lr": 1e-2, **options})
    step(model, optimizer, range(steps))
    return model, optimizer


def everything_in(model: nn.Module, optimizer: Any) -> Any:
    """All that a load changes, copied. Collective if the optimizer is sharded."""
    state_of = optimizer.full_state if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer.state.get
    states = [dict(state_of(param) or {}) for group in optimizer.param_groups for param in group["params"]]
    options = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
    return copy.deepcopy((dict(model.state_dict()), states, options))


def assert_holds(path: Path, steps: int | Sequence[int], shapes: Shapes = SMALL) -> int:
    """A checkpoint is whole, of this number of steps (in ``extra``), and everything in it is right. Returns it."""
    checkpoint.verify(path)
    model, optimizer = plain(0, Weights(shapes), lr=1.0)
    found = checkpoint.load(path, optimizer, model)["step"]
    assert found in (steps if isinstance(steps, Sequence) else [steps]), f"{path} is of step {found}"
    assert_same(everything_in(model, optimizer), everything_in(*plain(found, Weights(shapes))), str(path))
    return found


DISK_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.scandir", "os.truncate")


def die_before(touch: float, below: Path) -> list[int]:
    """Kill this process before it touches the disk there for the n-th time. Returns a list with the count so far."""
    touches = [0]

    def noticed(event: str, arguments: Any) -> None:
        if event in DISK_EVENTS and str(below) in str(arguments):
            if touches[0] >= touch:
                os.kill(os.getpid(), signal.SIGKILL)
            touches[0] += 1

    sys.addaudithook(noticed)
    return touches


def let_pass(seconds: float, parent: Path) -> None:
    """Make what saves have left look so much older."""
    for path in (inner for left in parent.glob(".*") for inner in (left, *left.rglob("*"))):
        at = path.stat().st_mtime - seconds
        os.utime(path, (at, at))


def once(tmp_path_factory: pytest.TempPathFactory, worker_id: str, name: str, build: Callable[[Path], None]) -> Path:
    """A directory that is built by one of pytest's workers and read by all."""
    root = tmp_path_factory.getbasetemp()
    root = (root if worker_id == "master" else root.parent) / name
    with FileLock(f"{root}.lock"):
        if not root.exists():
            aside = tmp_path_factory.mktemp(name)
            build(aside)
            aside.rename(root)
    return root
