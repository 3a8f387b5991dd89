"""One rank of the core benchmark. Started by ``benchmarks.core`` under torchrun."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.optim import Optimizer

from benchmarks.figures import forget_freed_memory, memory_kb, reset_peak
from shardstep import ZeroRedundancyOptimizer

Shapes = list[tuple[int, ...]]
SMALL: Shapes = [(256,)] * 2000
# 8 layers, width 512, vocabulary 8192, head not tied: 33.6 M parameters in 100 tensors.
NORM: Shapes = [(512,), (512,)]
LAYER = [*NORM, (1536, 512), (1536,), (512, 512), (512,), *NORM, (2048, 512), (2048,), (512, 2048), (512,)]
GPT: Shapes = [(8192, 512), *LAYER * 8, *NORM, (8192, 512)]

VARIANTS: dict[str, Callable[[list], Optimizer]] = {
    "torch default": lambda params: TorchZero(params, torch.optim.AdamW, fused=True, lr=1e-3),
    "torch views": lambda params: TorchZero(
        params, torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, lr=1e-3
    ),
    "shardstep default": lambda params: ZeroRedundancyOptimizer(params, torch.optim.AdamW, fused=True, lr=1e-3),
    "shardstep views": lambda params: ZeroRedundancyOptimizer(
        params, torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, lr=1e-3
    ),
}


def main() -> None:
    output, rounds, consolidations = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    models = {"2000 tensors of 256 elements": SMALL, "33.6 M parameters in a GPT's shapes": GPT}
    result = {
        "steps": {name: time_steps(shapes, rounds) for name, shapes in models.items()},
        "consolidation": measure_consolidation(consolidations),
        "collectives": [count_calls(name, shapes, variant) for name, shapes in models.items() for variant in VARIANTS],
    }
    if dist.get_rank() == 0:
        output.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def make_params(shapes: Shapes) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def time_steps(shapes: Shapes, rounds: int) -> dict[str, list[float]]:
    """Every variant once per round, from barrier to barrier, gradients given."""
    optimizers = {name: make(make_params(shapes)) for name, make in VARIANTS.items()}
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for turn in range(rounds + 2):
        for name, optimizer in optimizers.items():
            dist.barrier()
            start = time.perf_counter()
            optimizer.step()
            dist.barrier()
            if turn >= 2:  # the first rounds make the state
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def measure_consolidation(rounds: int) -> dict:
    """Time and peak memory of collecting the same state, alternating."""
    optimizers = {"shardstep": VARIANTS["shardstep default"], "torch": VARIANTS["torch default"]}
    made = {name: make(make_params(GPT)) for name, make in optimizers.items()}
    for optimizer in made.values():
        optimizer.step()
        optimizer.zero_grad()
    figures: dict = {name: {"ms": [], "others_mb": [], "recipient_mb": []} for name in made}
    for _ in range(rounds):
        for name, optimizer in made.items():
            elapsed, extra = _consolidate(optimizer)
            rows: list = [None] * dist.get_world_size()
            dist.all_gather_object(rows, extra)
            figures[name]["ms"].append(elapsed)
            figures[name]["others_mb"].append(max(rows[1:]))
            figures[name]["recipient_mb"].append(rows[0])
    figures["state_mb"] = sum(torch.Size(shape).numel() for shape in GPT) * 8 / 1e6
    return figures


def _consolidate(optimizer: Optimizer) -> tuple[float, float]:
    """Milliseconds, and MB that this process held at its peak beyond what it held before."""
    forget_freed_memory()
    dist.barrier()
    reset_peak()
    before = memory_kb("VmRSS")
    start = time.perf_counter()
    optimizer.consolidate_state_dict(to=0)  # type: ignore[attr-defined]
    dist.barrier()
    elapsed = (time.perf_counter() - start) * 1e3
    extra = (memory_kb("VmHWM") - before) / 1e3
    optimizer.step()  # lets the collected state go (torch's class keeps it until the next time)
    if hasattr(optimizer, "_all_state_dicts"):
        optimizer._all_state_dicts = []  # type: ignore[attr-defined]
    return elapsed, extra


def count_calls(model: str, shapes: Shapes, variant: str) -> dict:
    """The calls of torch.distributed that one step makes on this rank."""
    optimizer = VARIANTS[variant](make_params(shapes))
    optimizer.step()
    counts: Counter[str] = Counter()
    names = ("broadcast", "isend", "irecv", "all_gather_into_tensor", "all_gather", "all_reduce", "send", "recv")
    originals = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Callable:
        def call(*args, **kwargs):
            counts[name] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        optimizer.step()
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    buckets = len(optimizer.layout.buckets) if isinstance(optimizer, ZeroRedundancyOptimizer) else "-"
    calls = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return {"model": model, "variant": variant, "buckets": buckets, "calls": calls}


if __name__ == "__main__":
    main()
