"""Runs the snippets of docs/frameworks.md, each after the first of the page: ``page_worker.py DIRECTORY``, 2 ranks.

One after the other in the same processes: a framework that finds a process group takes it. So the lines with which some
of them make one are left out.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from shardstep import ZeroRedundancyOptimizer
from tests.test_snippets import snippets_of

PAGE = "docs/frameworks.md"
GROUP = re.compile(r"^ *(dist\.init_process_group|idist\.initialize)\(.*\n", re.MULTILINE)


def check(optimizer: Any) -> str:
    """What the snippet called the optimizer has a half of the state on this rank."""
    inner = optimizer if "engine" in vars(optimizer) else optimizer.optimizer
    assert isinstance(inner, ZeroRedundancyOptimizer), type(inner)
    numel = sum(param.numel() for group in inner.param_groups for param in group["params"])
    share = inner.memory().state / (2 * 4 * numel)
    assert 0.45 < share < 0.55, share
    return f"{share:.2f} of the state"


def main(directory: Path) -> None:
    dist.init_process_group("gloo")
    setup, *others = snippets_of(PAGE)
    for position, snippet in enumerate(others):
        folder = directory / str(position)
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        namespace: dict[str, Any] = {"__name__": "__main__"}
        for part in (setup, snippet):
            exec(compile(GROUP.sub("", part.code), str(part), "exec"), namespace)
        print(f"rank {dist.get_rank()} ran {snippet}: {check(namespace['optimizer'])}", flush=True)
        namespace.clear()
        gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
