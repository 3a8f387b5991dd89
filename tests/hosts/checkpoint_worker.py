"""One rank of a job that saves and loads where all hosts see it, and where only one does.

    ... tests/hosts/checkpoint_worker.py FOLDER     (which all hosts share)

Leaves in FOLDER a checkpoint, and for each rank its weights and what it was told.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardstep import checkpoint
from tests.hosts.training import MODES, STEPS, Training, make_model, train

OWN = Path("/tmp/checkpoints")  # every host has a /tmp of its own
FIRST, SECOND = Path("/tmp/first"), Path("/tmp/second")  # only on the first host, only on the second


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    told = tell(folder)
    torch.save(told, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


def tell(folder: Path) -> dict[str, Any]:
    trained = make()
    weights = train(trained)
    checkpoint.save(folder / "saved", trained.optimizer, trained.model, {"step": STEPS})
    loaded = make()
    checkpoint.load(folder / "saved", loaded.optimizer, loaded.model)
    told: dict[str, Any] = {
        "weights": weights,
        "went on": train(trained),
        "loaded and went on": train(loaded),
        "save": failure(lambda: checkpoint.save(OWN / "step", trained.optimizer, trained.model)),
    }
    dist.barrier()  # the other rank of this host may still be cleaning up
    told["left"] = sorted(path.name for path in OWN.iterdir()) if OWN.exists() else []
    copy_on_one_host(folder / "saved")
    for name, parent in (("first", FIRST), ("second", SECOND)):
        told[f"load, {name}"] = failure(lambda parent=parent: load(checkpoint.load, parent / "saved"))
        told[f"resume, {name}"] = failure(lambda parent=parent: load(checkpoint.resume, parent))
    return told


def make() -> Training:
    return MODES["shard_gradients"](make_model())


def load(how: Callable[..., Any], where: Path) -> None:
    training = make()
    how(where, training.optimizer, training.model)


def failure(call: Callable[[], Any]) -> str:
    """What a call raised; empty if nothing. (The test looks at that: here it would break off the calls after it.)"""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def copy_on_one_host(saved: Path) -> None:
    """The checkpoint, to a place that only the first host has, and to one that only the second has."""
    host = dist.get_rank() // int(os.environ["LOCAL_WORLD_SIZE"])
    if os.environ["LOCAL_RANK"] == "0":
        shutil.copytree(saved, (FIRST, SECOND)[host] / "saved")
    dist.barrier()


if __name__ == "__main__":
    main()
