"""One rank of a job whose hosts lose each other once, in the middle of an iteration.

    torchrun ... tests/hosts/cut_worker.py FOLDER MODE

Saves every step and resumes by itself. In the first life of FOLDER all ranks stop in the middle of one iteration, in
``step`` (default) or in backward (shard_gradients), until the link has been cut, and leave there what they are told.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from shardstep import checkpoint
from tests.hosts import training
from tests.hosts.training import MODES

STEPS = 6
FATAL_STEP = 3
TIMEOUT = 15.0  # of the process group, seconds
PATIENCE = 60.0  # for the link to be cut


class Pause:
    """Where a rank stops once, when it is armed, until the test has cut the link."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self.armed = False
        self.ended = 0.0  # when it went on

    def stop(self) -> None:
        if not self.armed:
            return
        self.armed = False
        (self._folder / f"paused{self._rank}").touch()
        deadline = time.monotonic() + PATIENCE
        while not (self._folder / "cut").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.ended = time.monotonic()


class PausingAdamW(AdamW):
    """Stops after it has updated a bucket, with others to come."""

    pause: Pause | None = None  # set when the optimizer has been built, and probed

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.pause is not None:
            self.pause.stop()
        return result


def stop_in_backward(model: nn.Module, pause: Pause) -> None:
    """Stop where the last layer's gradients are on their way, and the others' are still to come."""

    def watch(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        inputs[0].register_hook(lambda gradient: pause.stop())

    list(model.children())[-1].register_forward_pre_hook(watch)


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    rank = dist.get_rank()
    pause = Pause(folder, rank)
    try:
        told = run(folder, mode, pause)
    except Exception as error:
        told = {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - pause.ended}
        (folder / f"error{rank}.json").write_text(json.dumps(told))
        raise
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.save({**told, "restarts": restarts}, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run(folder: Path, mode: str, pause: Pause) -> dict[str, Any]:
    """Train to the end, from wherever the newest checkpoint is."""
    rule = PausingAdamW if mode == "default" else AdamW
    made = MODES[mode](training.make_model(), rule=rule, bucket_cap_mb=training.SMALL_CAP)
    found = checkpoint.resume(folder / "checkpoints", made.optimizer, made.model)
    began = 0 if found is None else found[1]["step"]
    PausingAdamW.pause = pause
    if rule is AdamW:
        stop_in_backward(made.model, pause)
    for step in range(began, STEPS):
        pause.armed = step == FATAL_STEP and not (folder / "cut").exists()
        made.optimizer.zero_grad()
        training.loss_of(made, dist.get_rank(), step).backward()
        made.optimizer.step()
        checkpoint.save(folder / "checkpoints" / f"step{step + 1}", made.optimizer, made.model, {"step": step + 1})
    return {"began": began, "weights": [param.detach().clone() for param in made.model.parameters()]}


if __name__ == "__main__":
    main()
