"""One rank of the precision benchmark. Started by ``benchmarks.precision`` under torchrun with a task, as JSON."""

from __future__ import annotations

import copy
import gc
import json
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from benchmarks.contestants import ADAMW, ALONE, Contestant, forward_backward
from benchmarks.gpt import GPT, Size, make_batch, make_gpt
from benchmarks.step_worker import alternate, attempt, everybodys
from benchmarks.traffic import allocated_bytes, counted_requests, sent_bytes
from shardstep import MemoryReport, ZeroRedundancyOptimizer

WARM_UP = 3
# Sums of 16-bit gradients in another order differ in their last bits, and AdamW makes much of those of a tiny gradient.
# A lost step of three, or a sum instead of a mean, is above this.
TOLERANCE = 0.25

BY_HAND = "DDP + float32 masters by hand"
PLAIN = "DDP + AdamW in bfloat16"
FSDP2 = "FSDP2, MixedPrecisionPolicy"
MODES: dict[str, Any] = {"float32": torch.float32, "remainder": "remainder", "stochastic": "stochastic", "None": None}
ZERO1 = {mode: f"DDP + shardstep, {mode}" for mode in MODES}
ZERO2 = {mode: f"shard_gradients, {mode}" for mode in MODES}
EXACT = [names[mode] for names in (ZERO1, ZERO2) for mode in ("float32", "remainder")]


class MastersByHand:
    """What a training loop without a framework does: on every rank a float32 copy of every parameter."""

    def __init__(self, gpt: GPT) -> None:
        self.params: list[Tensor] = list(gpt.parameters())
        self.masters = [param.detach().float().requires_grad_() for param in self.params]
        self.optimizer = AdamW(self.masters, **ADAMW)
        self.scratch = 0

    @torch.no_grad()
    def step(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        self.optimizer.step()
        torch._foreach_copy_(self.params, self.masters)
        self.scratch = held_by(master.grad for master in self.masters)
        self.optimizer.zero_grad()

    def memory(self) -> MemoryReport:
        state, grads = tensors_of(self.optimizer), (param.grad for param in self.params)
        kept = [held_by(tensors) for tensors in (self.params, grads, state, self.masters)]
        return MemoryReport(*kept, scratch=self.scratch)


def tensors_of(optimizer: Optimizer) -> list[Tensor]:
    return [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]


def held_by(tensors: Any) -> int:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors if tensor is not None]
    return sum(tensor.nbytes for tensor in local)


def wrapped(gpt: GPT) -> DistributedDataParallel:
    """Without views DDP holds every gradient twice."""
    return DistributedDataParallel(gpt, gradient_as_bucket_view=True)


def by_hand(gpt: GPT) -> Contestant:
    model, masters = wrapped(gpt), MastersByHand(gpt)
    return Contestant(gpt, model, gpt.zero_grad, masters.step, optimizer=masters)


def plain(gpt: GPT) -> Contestant:
    model, optimizer = wrapped(gpt), AdamW(gpt.parameters(), **ADAMW)
    return Contestant(gpt, model, optimizer.zero_grad, optimizer.step, optimizer=optimizer)


def zero1(gpt: GPT, mode: Any) -> Contestant:
    model = wrapped(gpt)
    optimizer = ZeroRedundancyOptimizer(gpt.parameters(), AdamW, master_weights=mode, **ADAMW)
    return Contestant(gpt, model, optimizer.zero_grad, optimizer.step, optimizer=optimizer)


def zero2(gpt: GPT, mode: Any) -> Contestant:
    optimizer = ZeroRedundancyOptimizer(gpt.parameters(), AdamW, shard_gradients=True, master_weights=mode, **ADAMW)
    return Contestant(gpt, gpt, optimizer.zero_grad, optimizer.step, optimizer=optimizer)


def fsdp2(gpt: GPT) -> Contestant:
    """Float32 parameters, of which it computes with 16-bit copies: its shard is the master."""
    gpt.float()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in [*gpt.blocks, gpt]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = AdamW(gpt.parameters(), **ADAMW)
    return Contestant(gpt, gpt, optimizer.zero_grad, optimizer.step, optimizer=optimizer)


MAKERS: dict[str, Callable[[GPT], Contestant]] = {
    ALONE: forward_backward,
    BY_HAND: by_hand,
    PLAIN: plain,
    **{ZERO1[name]: partial(zero1, mode=mode) for name, mode in MODES.items()},
    **{ZERO2[name]: partial(zero2, mode=mode) for name, mode in MODES.items()},
    FSDP2: fsdp2,
}


def main() -> None:
    output, task = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    size = Size(*task["size"])
    template = make_gpt(size).to(torch.bfloat16)
    if task["kind"] == "times":
        result = measure_times(template, size, task["rounds"])
    else:
        make(ALONE, template, size, 1).clear()  # what a process allocates once is nobody's
        result = {name: measure_demands(name, template, size) for name in MAKERS if name != ALONE}
    if dist.get_rank() == 0:
        output.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def make(name: str, template: GPT, size: Size, iterations: int) -> Contestant:
    contestant = MAKERS[name](copy.deepcopy(template))
    for number in range(iterations):
        contestant.iterate(make_batch(dist.get_rank(), number, size=size))
    return contestant


# --- times --------------------------------------------------------------------------------------------------------


def measure_times(template: GPT, size: Size, rounds: int) -> dict:
    """Every contestant once per round, in another order every time; those whose masters are exact are checked first."""
    contestants: dict[str, Contestant] = {}
    failures: dict[str, str] = {}
    for name in MAKERS:
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
    times, _ = alternate(contestants, rounds, lambda: 0, size)
    return {
        "times": times,
        "failures": failures,
        "differences": differences,
        "parameters": sum(param.numel() for param in template.parameters()),
    }


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
        "held": {kind: max(everybodys(size / elements)) for kind, size in held._asdict().items()},
        "allocated": max(everybodys(allocated / elements)),
        "asked": mean(requests.bytes) * gathered,
        "written": mean(written) * gathered,
        "calls": dict(requests.calls),
    }


def memory_of(contestant: Contestant) -> MemoryReport:
    """On the live tensors of this rank."""
    if isinstance(contestant.optimizer, ZeroRedundancyOptimizer | MastersByHand):
        return contestant.optimizer.memory()
    params = list(contestant.gpt.parameters())
    return MemoryReport(*map(held_by, (params, (param.grad for param in params), tensors_of(contestant.optimizer))))


if __name__ == "__main__":
    main()
