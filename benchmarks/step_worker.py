"""One rank of the step benchmark. Started by ``benchmarks.step`` under torchrun with a task, as JSON."""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contestants import ALONE, DDP, LEARNING_RATE, Contestant, make
from benchmarks.gpt import DEFAULT, GPT, Size, make_batch, make_gpt
from benchmarks.traffic import Peak, allocated_bytes, counted_requests, sent_bytes, shared_bytes

WARM_UP = 3  # DDP makes its buckets again after the first iteration
# Where gradients are summed in another order their last bits differ, and AdamW makes much of a tiny gradient's last
# bits. A tenth of what one step may change an element by is far above that, and below a lost update or a missing mean.
TOLERANCE = LEARNING_RATE / 10
Made = TypeVar("Made")


def main() -> None:
    output, task = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    template = make_gpt()
    if task["kind"] == "times":
        result = measure_times(template, task["names"], task["rounds"])
    else:
        contestant = make(ALONE, template)  # what a process allocates once is nobody's
        contestant.iterate(make_batch(dist.get_rank(), 0))
        contestant.clear()
        result = {name: measure_demands(template, name) for name in task["names"]}
    if dist.get_rank() == 0:
        output.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def attempt(action: Callable[[], Made]) -> Made | str:
    """What ``action`` returns if it succeeds on every rank, else why it failed on one."""
    try:
        made, reason = action(), ""
    except Exception as error:  # whatever a rival may raise here: the figures say so and go on without it
        made, reason = None, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    if max(everybodys(float(bool(reason)))) == 0:
        assert made is not None
        return made
    return reason or "failed on another rank"


def everybodys(value: float) -> list[float]:
    """The value of every rank."""
    rows = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, torch.tensor([value], dtype=torch.float64))
    return [row.item() for row in rows]


# --- times --------------------------------------------------------------------------------------------------------


def measure_times(template: GPT, names: list[str], rounds: int, counter: Callable[[], int] = lambda: 0) -> dict:
    """Every contestant once per round, in another order every time, from barrier to barrier, each on the same batches.

    Before and after, their weights are compared with those of DDP + AdamW: nobody is timed doing something else.
    ``counter``: of anything that an iteration may use, as of bytes; how much it advances is noted beside the times.
    """
    contestants: dict[str, Contestant] = {}
    failures: dict[str, str] = {}
    shared: dict[str, int] = {}
    for name in names:
        before = shared_bytes()
        made = attempt(lambda name=name: warmed_up(name, template))
        shared[name] = shared_bytes() - before
        if isinstance(made, str):
            failures[name] = made
        else:
            contestants[name] = made
        gc.collect()
    first = compare(contestants)
    for name, difference in first.items():
        if not difference <= TOLERANCE:
            failures[name] = f"not timed: its weights differ from those of {DDP} by {difference:.2g}"
            del contestants[name]
    times, counts = alternate(contestants, rounds, counter)
    resident = sum(everybodys(_resident_megabytes()))
    return {
        "times": times,
        "counts": counts,
        "failures": failures,
        "differences": {"at first": first, "at last": compare(contestants)},
        "tolerance": TOLERANCE,
        "warm_up": WARM_UP,
        "gradient_bytes": sum(param.nbytes for param in template.parameters()),
        "shared_bytes": shared,
        "resident_mb": resident,
    }


def warmed_up(name: str, template: GPT) -> Contestant:
    contestant = make(name, template)
    for number in range(WARM_UP):
        contestant.iterate(make_batch(dist.get_rank(), number))
    return contestant


def alternate(
    contestants: dict[str, Contestant], rounds: int, counter: Callable[[], int], size: Size = DEFAULT
) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """Of every contestant, round by round: ms, and how much the counter advanced."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    counts: dict[str, list[int]] = {name: [] for name in contestants}
    order = random.Random(0)  # the same on every rank
    for turn in range(rounds):
        batch = make_batch(dist.get_rank(), WARM_UP + turn, size=size)
        for name in order.sample(list(contestants), len(contestants)):
            dist.barrier()
            before, start = counter(), time.perf_counter()
            contestants[name].iterate(batch)
            dist.barrier()
            times[name].append((time.perf_counter() - start) * 1e3)
            counts[name].append(counter() - before)
    return times, counts


def compare(contestants: dict[str, Contestant]) -> dict[str, float]:
    """The largest difference of any weight on any rank from DDP's on the same rank."""
    reference = contestants[DDP].weights()
    return {
        name: max(everybodys(largest_difference(contestant.weights(), reference)))
        for name, contestant in contestants.items()
        if name not in (ALONE, DDP)
    }


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def _resident_megabytes() -> float:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("VmRSS"))
    return int(line.split()[1]) / 1e3


# --- wire and memory ----------------------------------------------------------------------------------------------


def measure_demands(template: GPT, name: str) -> dict:
    """One contestant alone: bytes on the wire, and memory of gradients."""
    result = attempt(lambda: _demands(template, name))
    gc.collect()
    return {"failure": result} if isinstance(result, str) else result


def _demands(template: GPT, name: str) -> dict:
    rank = dist.get_rank()
    bare, shared = allocated_bytes(), shared_bytes()
    contestant = make(name, template)
    for number in range(2):
        contestant.iterate(make_batch(rank, number))
    contestant.clear()
    gc.collect()
    dist.barrier()
    between = allocated_bytes()
    with Peak() as peak:
        contestant.reach(make_batch(rank, 2))
    held = allocated_bytes()
    memory = getattr(contestant.optimizer, "memory", None)
    reported = memory().gradients if memory is not None else None
    contestant.step()
    dist.barrier()
    before = sent_bytes()
    with counted_requests() as requests:
        contestant.iterate(make_batch(rank, 3))
    dist.barrier()
    sent = sent_bytes() - before
    return {
        "between_mb": megabytes(between - bare),
        "shared_mb": (shared_bytes() - shared) / 1e6,  # once per host
        "held_mb": megabytes(held - between),
        "peak_mb": megabytes(peak.bytes - between),
        "reported_gradients_mb": None if reported is None else megabytes(reported),
        "sent_mb": megabytes(sent),
        "requested_mb": megabytes(requests.bytes),
        "calls": dict(requests.calls),
    }


def megabytes(value: float) -> list[float]:
    """By rank."""
    return [row / 1e6 for row in everybodys(value)]


if __name__ == "__main__":
    main()
