"""One rank of a training job on several hosts: every mode and variant, one after the other.

    ... tests/hosts/training_worker.py FOLDER ARRANGEMENT    (JSON: the ranks of each host)

Leaves in FOLDER what each rank ended with, and on which host it ran.
"""

from __future__ import annotations

import gc
import json
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP needs it: see below
import torch.distributed as dist

from tests.hosts.training import MODES, SUMMED, VARIANTS, by_hand, ddp, make_model, train

DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16}


def main() -> None:
    folder, arrangement = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    gc.freeze()  # what was imported need not be searched for models every time that an optimizer is built
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results = {"host": socket.gethostname(), **trained(arrangement)}
    torch.save(results, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


def trained(arrangement: list[list[int]]) -> dict[str, Any]:
    """Weights: of DDP, of each mode by variant in float64, and of what we sum by dtype and variant."""
    by_mode = {mode: {variant: run(mode, variant, torch.float64) for variant in VARIANTS} for mode in MODES}
    narrow = {
        (mode, "bfloat16"): {variant: run(mode, variant, torch.bfloat16) for variant in VARIANTS} for mode in SUMMED
    }
    return {
        "ddp": train(ddp(make_model())),
        "modes": by_mode,
        "summed": {**{(mode, "float64"): by_mode[mode] for mode in SUMMED}, **narrow},
        "by hand": {name: by_hand(dtype, arrangement) for name, dtype in DTYPES.items()},
    }


def run(mode: str, variant: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    with variant.chosen():
        training = MODES[mode](make_model(dtype), bucket_cap_mb=variant.cap)
    return train(training)


if __name__ == "__main__":
    main()
