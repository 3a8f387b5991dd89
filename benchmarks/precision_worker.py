"""One rank of the precision benchmark. Started by ``benchmarks.precision`` under torchrun with a task, as JSON."""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import precision_contestants
from benchmarks.contestants import ALONE, Contestant
from benchmarks.gpt import GPT, Size, make_batch, make_gpt
from benchmarks.precision_contestants import BY_HAND, EXACT, memory_of
from benchmarks.step_worker import attempt, everybodys
from benchmarks.traffic import allocated_bytes, counted_requests, sent_bytes

KINDS = ("parameters", "gradients", "state", "masters", "scratch")  # of memory
WARM_UP = 3
# Sums of 16-bit gradients in another order differ in their last bits, and AdamW makes much of those of a tiny gradient.
# A lost step of three, or a sum instead of a mean, is above this.
TOLERANCE = 0.25


def main() -> None:
    output, task = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    size = Size(*task["size"])
    template = make_gpt(size).to(torch.bfloat16)
    if task["kind"] == "times":
        result = measure_times(task["names"], template, size, task["rounds"])
    else:
        measure_demands(task["names"][0], template, size)  # what a process allocates once is nobody's
        result = {name: measure_demands(name, template, size) for name in task["names"]}
    if dist.get_rank() == 0:
        output.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def make(name: str, template: GPT, size: Size, iterations: int) -> Contestant:
    contestant = precision_contestants.make(name, template)
    for number in range(iterations):
        contestant.iterate(make_batch(dist.get_rank(), number, size=size))
    return contestant


# --- times --------------------------------------------------------------------------------------------------------


def measure_times(names: list[str], template: GPT, size: Size, rounds: int) -> dict:
    """Every contestant once per round, in another order every time; those whose masters are exact are checked first."""
    contestants: dict[str, Contestant] = {}
    failures: dict[str, str] = {}
    for name in names:
        made = attempt(lambda name=name: make(name, template, size, WARM_UP))
        if isinstance(made, str):
            failures[name] = made
        else:
            contestants[name] = made
        gc.collect()
    differences = compare(contestants, template)
    for name in EXACT:
        if name in contestants and not differences[name] <= TOLERANCE:
            failures[name] = f"not timed: its weights are {differences[name]:.2g} of the way from {BY_HAND}"
            del contestants[name]
    iterations, steps = alternate(contestants, rounds, size)
    return {
        "iterations": iterations,
        "steps": steps,
        "failures": failures,
        "differences": differences,
        "parameters": sum(param.numel() for param in template.parameters()),
    }


def alternate(
    contestants: dict[str, Contestant], rounds: int, size: Size
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Of every contestant, round by round, the ms of an iteration and of the step in it, each from barrier to barrier.

    The barrier before the step makes it nobody's step that another rank's backward is late.
    """
    iterations: dict[str, list[float]] = {name: [] for name in contestants}
    steps: dict[str, list[float]] = {name: [] for name in contestants}
    order = random.Random(0)  # the same on every rank
    for turn in range(rounds):
        batch = make_batch(dist.get_rank(), WARM_UP + turn, size=size)
        for name in order.sample(list(contestants), len(contestants)):
            contestant = contestants[name]
            dist.barrier()
            start = time.perf_counter()
            contestant.clear()
            contestant.reach(batch)
            dist.barrier()
            reached = time.perf_counter()
            contestant.step()
            dist.barrier()
            end = time.perf_counter()
            iterations[name].append((end - start) * 1e3)
            steps[name].append((end - reached) * 1e3)
    return iterations, steps


def compare(contestants: dict[str, Contestant], template: GPT) -> dict[str, float]:
    """How far weights are from those with masters by hand, relative to how far those have come; the worst rank."""
    start = joined(list(template.parameters()))
    reference = joined(contestants[BY_HAND].weights())
    way = (reference - start).abs().sum()
    return {
        name: max(everybodys(((joined(contestant.weights()) - reference).abs().sum() / way).item()))
        for name, contestant in contestants.items()
        if name not in (ALONE, BY_HAND)
    }


def joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().to(torch.bfloat16).float().flatten() for tensor in tensors])


# --- memory and wire ----------------------------------------------------------------------------------------------


def measure_demands(name: str, template: GPT, size: Size) -> dict:
    """One contestant alone: bytes that it holds, and sends in its step, per parameter."""
    result = attempt(lambda: demands(name, template, size))
    gc.collect()
    return {"failure": result} if isinstance(result, str) else result


def demands(name: str, template: GPT, size: Size) -> dict:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    elements = sum(param.numel() for param in template.parameters())
    gc.collect()
    bare = allocated_bytes()
    contestant = make(name, template, size, 2)
    contestant.clear()
    contestant.reach(make_batch(rank, 2, size=size))
    dist.barrier()
    gc.collect()
    allocated = allocated_bytes() - bare
    held = memory_of(contestant)
    before = sent_bytes()
    with counted_requests() as requests:
        contestant.step()
    written = sent_bytes() - before
    dist.barrier()
    # Of a gather no rank sends what the others have already: (ranks - 1) / ranks of the whole.
    gathered = ranks / (ranks - 1) / elements

    def mean(value: float) -> float:
        return sum(everybodys(value)) / ranks

    return {
        "held": {kind: max(everybodys(getattr(held, kind) / elements)) for kind in KINDS},
        "allocated": max(everybodys(allocated / elements)),
        "asked": mean(requests.bytes) * gathered,
        "written": mean(written) * gathered,
        "calls": dict(requests.calls),
    }


if __name__ == "__main__":
    main()
