"""The training loops that the precision figures compare: a GPT in bfloat16, fused AdamW, with masters and without.

Each is behind the four calls of ``benchmarks.contestants``. One that needs what is not installed raises, and the
figures come without it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from benchmarks.contestants import ADAMW, ALONE, Contestant, deepspeed, forward_backward
from benchmarks.gpt import GPT
from shardstep import MemoryReport, ZeroRedundancyOptimizer, shard_ddp_gradients

BY_HAND = "DDP + float32 masters by hand"
PLAIN = "DDP + AdamW in bfloat16"
FSDP2 = "FSDP2, MixedPrecisionPolicy"
DEEPSPEED = {stage: f"DeepSpeed stage {stage}, bf16" for stage in (1, 2)}
MODES: dict[str, Any] = {"float32": torch.float32, "remainder": "remainder", "stochastic": "stochastic", "None": None}
ZERO1 = {mode: f"DDP + shardstep, {mode}" for mode in MODES}
SHARDED_DDP = {mode: f"DDP + shard_ddp_gradients, {mode}" for mode in MODES}
ZERO2 = {mode: f"shard_gradients, {mode}" for mode in MODES}
FAMILIES = (ZERO1, SHARDED_DDP, ZERO2)
EXACT = [family[mode] for family in FAMILIES for mode in ("float32", "remainder")] + [FSDP2, *DEEPSPEED.values()]


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


class DeepSpeedMemory:
    """Reads what DeepSpeed's optimizer of stage 1 and 2 holds, where version 0.19 keeps it."""

    def __init__(self, gpt: GPT, optimizer: Any) -> None:
        self.gpt = gpt
        self.optimizer = optimizer
        self.scratch = 0
        optimizer.optimizer.register_step_pre_hook(self._look)

    def _look(self, *given: Any) -> None:
        self.scratch = held_by(master.grad for master in self.optimizer.single_partition_of_fp32_groups)

    def memory(self) -> MemoryReport:
        masters = self.optimizer.single_partition_of_fp32_groups
        grads = [*all_tensors(self.optimizer.averaged_gradients), *(param.grad for param in self.gpt.parameters())]
        state = tensors_of(self.optimizer.optimizer)
        kept = map(held_by, (self.optimizer.bit16_groups_flat, grads, state, masters))
        return MemoryReport(*kept, scratch=self.scratch)


def tensors_of(optimizer: Optimizer) -> list[Tensor]:
    return [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]


def all_tensors(nested: Any) -> Iterator[Tensor]:
    """The tensors in dicts and lists of them."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, dict | list | tuple):
        for part in nested.values() if isinstance(nested, dict) else nested:
            yield from all_tensors(part)


def held_by(tensors: Iterable[Tensor | None]) -> int:
    """The bytes of their memory, which views share."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors if tensor is not None]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in local)}
    return sum(storages.values())


def memory_of(contestant: Contestant) -> MemoryReport:
    """On the live tensors of this rank."""
    if hasattr(contestant.optimizer, "memory"):
        return contestant.optimizer.memory()
    params = list(contestant.gpt.parameters())
    return MemoryReport(*map(held_by, (params, (param.grad for param in params), tensors_of(contestant.optimizer))))


# --- makers -------------------------------------------------------------------------------------------------------


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


def sharded_ddp(gpt: GPT, mode: Any) -> Contestant:
    model = wrapped(gpt)
    optimizer = ZeroRedundancyOptimizer(gpt.parameters(), AdamW, master_weights=mode, **ADAMW)
    shard_ddp_gradients(model, optimizer)
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


def deepspeed_bf16(gpt: GPT, stage: int) -> Contestant:
    contestant = deepspeed(gpt, stage, bf16={"enabled": True})
    engine: Any = contestant.model
    contestant.optimizer = DeepSpeedMemory(gpt, engine.optimizer)
    return contestant


MAKERS: dict[str, Callable[[GPT], Contestant]] = {
    ALONE: forward_backward,
    BY_HAND: by_hand,
    PLAIN: plain,
    **{ZERO1[name]: partial(zero1, mode=mode) for name, mode in MODES.items()},
    **{SHARDED_DDP[name]: partial(sharded_ddp, mode=mode) for name, mode in MODES.items()},
    **{ZERO2[name]: partial(zero2, mode=mode) for name, mode in MODES.items()},
    FSDP2: fsdp2,
    **{name: partial(deepspeed_bf16, stage=stage) for stage, name in DEEPSPEED.items()},
}


def make(name: str, template: GPT) -> Contestant:
    """A contestant over a copy of ``template``. Collective: call on every rank. Raises if there is none here."""
    return MAKERS[name](copy.deepcopy(template))
