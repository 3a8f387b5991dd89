"""A program of one framework, under torchrun: ``worker.py FRAMEWORK train|resume DIRECTORY``.

``train`` trains in every mode to the end and saves in the middle. ``resume`` goes on from what was saved at each number
of ranks, in a process that has not seen the training. Each leaves a report for the test.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.frameworks.work import PLAIN, world_size


def main(framework: str, phase: str, root: Path) -> None:
    program = importlib.import_module(f"tests.frameworks.{framework}_program")
    ranks = world_size()
    for mode in program.MODES:
        if phase == "train":
            program.run(mode, root / f"saved-{ranks}-{mode}", False, root / f"trained-{ranks}-{mode}.pt")
            continue
        for before in (2, 3) if mode != PLAIN else ():
            program.run(mode, root / f"saved-{before}-{mode}", True, root / f"resumed-{ranks}-from-{before}-{mode}.pt")
    if hasattr(program, phase):
        getattr(program, phase)(root)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
