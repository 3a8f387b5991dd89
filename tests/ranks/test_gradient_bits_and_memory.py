"""Sharded gradients: the same bits whatever the buckets, the timing and the transport are, and the memory they take."""

from __future__ import annotations

import gc
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shardstep import ShardedGradient, ZeroRedundancyOptimizer
from tests.beside import batch
from tests.harness import run_ranks
from tests.oracle import assert_same, values_of
from tests.surroundings import choose

KB = 1 / 1024
LIMITS = {"timeout": 80, "pg_timeout": 20}


# --- bits ---------------------------------------------------------------------------------------------------------


def sum_in_rank_order(gradient: Tensor) -> Tensor:
    """The definition of docs/design.md: summed in rank order (16 bits in float32) and divided once."""
    parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, gradient.contiguous())
    wide = torch.float32 if gradient.dtype == torch.bfloat16 else gradient.dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return (total / len(parts)).to(gradient.dtype)


def train(rank: int, dtype: torch.dtype, zero: dict[str, Any] | None) -> list[Any]:
    """Gradients and weights of each step. Without ``zero``: by hand, else ours on ranks that run at random speeds."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 130), nn.Tanh(), nn.Linear(130, 50), nn.Tanh(), nn.Linear(50, 3)).to(dtype)
    params, late = list(model.parameters()), random.Random(rank)
    if zero is None:
        optimizer: Any = AdamW(params, lr=0.01)
    else:
        optimizer = ZeroRedundancyOptimizer(params, AdamW, shard_gradients=True, lr=0.01, **zero)
        for param in params:
            param.register_hook(lambda gradient: time.sleep(late.choice([0, 0, 0.001, 0.004])))
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        (model(batch(step, 4, 40).to(dtype)) - 1).square().sum().backward()
        if zero is None:
            for param in params:
                param.grad = sum_in_rank_order(param.grad)
        grads = [param.grad if zero is None else optimizer.full_grad(param) for param in params]
        optimizer.step()
        seen.append((grads, values_of(params)))
    return seen


VARIANTS: tuple[dict[str, Any], ...] = (
    {"bucket_cap_mb": 25},
    {"bucket_cap_mb": KB, "gradient_buckets_in_flight": 1},
    {"bucket_cap_mb": 4 * KB, "gradient_buckets_in_flight": 7},
    {"bucket_cap_mb": 4 * KB, "overlap_backward": False, "shard": "tensor"},
)


def compare_bits(rank: int, world: int, transport: str) -> None:
    choose(transport)
    for dtype in (torch.float32, torch.bfloat16):
        expected = train(rank, dtype, None)
        for zero in VARIANTS:
            assert_same(train(rank, dtype, zero), expected, f"{dtype} {zero}")


@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
def test_gradients_and_weights_have_the_same_bits_for_every_cap_timing_and_transport(transport: str) -> None:
    """A sum in the order of arrival, or that depends on buckets, shows in the last bits of these."""
    run_ranks(compare_bits, 3, transport, **LIMITS)


# --- memory -------------------------------------------------------------------------------------------------------


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of storages that were made while it is on and are still alive, whoever holds them."""

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), Tensor))
        storages = [tensor.untyped_storage() for tensor in tensors if type(tensor) is not ShardedGradient]
        self._old = {storage._cdata: StorageWeakRef(storage) for storage in storages}
        self._new: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(one, Tensor) and not isinstance(one, ShardedGradient):
                storage = one.untyped_storage()
                old = self._old.get(storage._cdata)  # one that is gone may have left its address to a new one
                if (old is None or old.expired()) and storage._cdata not in self._new:
                    self._new[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        self._new = {key: entry for key, entry in self._new.items() if not entry[0].expired()}
        return sum(size for _, size in self._new.values())


LAYERS, WIDTH = 24, 64
LAYER = WIDTH * WIDTH * 8
TOTAL = LAYERS * LAYER  # 768 KiB
CAP = 2 * LAYER  # two layers per bucket, twelve buckets
SMALL = 8192  # activations, headers and the like


class Deep(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(LAYERS))

    def forward(self, x: Tensor, reentrant: bool = False) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if reentrant else torch.tanh(layer(x))
        return x.sum()


def built(model: Deep, **zero: Any) -> ZeroRedundancyOptimizer:
    zero = {"bucket_cap_mb": CAP / 2**20, "shard_gradients": True, "lr": 0.1} | zero
    return ZeroRedundancyOptimizer(model.parameters(), SGD, **zero)


def hold_a_share(rank: int, world: int, zero: dict[str, Any]) -> None:
    """What is alive after backward, and the most during it, on top of what there was before."""
    model = Deep()
    optimizer = built(model, **zero)
    share = TOTAL // world + SMALL
    # A bucket under way is held packed, and its parts as they arrive; another one is being collected and packed.
    bound = share + (zero.get("gradient_buckets_in_flight", 2) + 1) * 2 * CAP
    assert bound < TOTAL - 2 * CAP, "a full gradient would not be noticed"
    for step in range(3):
        optimizer.zero_grad()
        x = batch(step, 2, WIDTH)
        with LiveMemory() as memory:
            loss = model(x)
            before = memory.now()
            loss.backward()
            del loss
            after, peak = memory.now(), memory.peak - before
            assert after <= share, f"step {step}: {after} bytes, a share is {share}"
            assert peak <= bound, f"step {step}: {peak} bytes at most, the bound is {bound}"
            assert abs(optimizer.memory().gradients - after) <= 1024
            with optimizer.no_sync():  # holds everything, until the next backward
                model(x).backward()
            assert TOTAL <= memory.now() <= TOTAL + share
            model(x).backward()
            assert memory.now() <= share
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.memory().gradients == 0
            if step:  # the first one makes the buffers of the parameters' gather, which stay
                assert memory.now() <= SMALL, "zero_grad leaves something behind"


@pytest.mark.parametrize("zero", [{}, {"gradient_buckets_in_flight": 1}, {"shard": "tensor"}], ids=str)
def test_a_rank_holds_its_share_of_the_gradients_and_a_bounded_number_of_buckets(zero: dict[str, Any]) -> None:
    run_ranks(hold_a_share, 4, zero, **LIMITS)


def hold_a_share_otherwise(rank: int, world: int) -> None:
    """Where nothing tells that backward has ended; and bfloat16 parameters with shards of four bytes."""
    for reentrant, dtype in ((True, torch.float64), (False, torch.bfloat16)):
        model = Deep(dtype)
        optimizer = built(model, reduce_dtype=None if reentrant else torch.float32)
        share, under_way = (TOTAL // world, 4 * CAP) if reentrant else (TOTAL // 2 // world, 0)
        for step in range(2):
            optimizer.zero_grad()
            with LiveMemory() as memory:
                model(batch(step, 2, WIDTH).to(dtype).requires_grad_(), reentrant).backward()
                assert memory.now() <= share + under_way + SMALL
                optimizer.step()
                if step:
                    assert memory.now() <= share + SMALL


def test_reentrant_checkpointing_and_a_reduce_dtype_leave_no_whole_gradients() -> None:
    run_ranks(hold_a_share_otherwise, 4, **LIMITS)


def mapped() -> int:
    """Bytes of shared memory that this process has mapped for shardstep."""
    ranges = re.findall(r"^(\w+)-(\w+) .*shardstep-", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return sum(int(stop, 16) - int(start, 16) for start, stop in ranges)


def share_slots(rank: int, world: int) -> None:
    for in_flight in (1, 3):
        before, model = mapped(), Deep()
        optimizer = built(model, gradient_buckets_in_flight=in_flight)
        gathers = 2 * 4 * (CAP + 4096)  # the parameters' own ring, as without shard_gradients
        assert mapped() - before <= 2 * in_flight * world * (CAP + 4096) + gathers + 65536
        del optimizer


def test_ranks_of_a_host_share_a_ring_of_twice_the_stated_number_of_buckets() -> None:
    run_ranks(share_slots, 3, **LIMITS)
