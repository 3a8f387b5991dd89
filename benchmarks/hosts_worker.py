"""One rank of the benchmark of several hosts. Started by ``benchmarks.hosts`` on each of them with a task, as JSON."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpt import make_gpt
from benchmarks.step_worker import measure_times
from tests.hosts.links import traffic


def main() -> None:
    output, task = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    measured = measure_times(make_gpt(), task["names"], task["rounds"], counter=lambda: sum(traffic()))
    if dist.get_rank() == 0:
        output.write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
