"""One rank of a job on several hosts: calls a function of a test, and leaves in FOLDER what it returns.

... tests/hosts/worker.py FOLDER TASK    (JSON, see ``launch.Task``)
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # DDP needs it: see below
import torch.distributed as dist


def main() -> None:
    folder, (module, name, args, timeout) = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    function = getattr(importlib.import_module(module), name)
    gc.freeze()  # what was imported need not be searched for models every time that an optimizer is built
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    torch.save(function(folder, *args), folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
