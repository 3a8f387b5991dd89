"""Sharded gradients: the same bits whatever the buckets, the timing and the transport are, and the memory they take."""

from __future__ import annotations

import copy
import gc
import random
import time
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
from tests.surroundings import choose

KB = 1 / 1024
LIMITS = {"timeout": 80, "pg_timeout": 20}


# --- bits ---------------------------------------------------------------------------------------------------------


def mean_in_rank_order(gradient: Tensor) -> Tensor:
    """The definition of docs/design.md: summed in rank order (16 bits in float32) and divided once."""
    parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, gradient.contiguous())
    wide = [part.float() for part in parts]
    return (sum(wide[1:], wide[0]) / len(wide)).to(gradient.dtype)


VARIANTS: tuple[dict[str, Any], ...] = (
    {"bucket_cap_mb": 25},
    {"bucket_cap_mb": KB, "gradient_buckets_in_flight": 1},
    {"bucket_cap_mb": 4 * KB, "gradient_buckets_in_flight": 7},
    {"bucket_cap_mb": 4 * KB, "overlap_backward": False, "shard": "tensor"},
)


def compare_bits(rank: int, world: int, transport: str, dtype: torch.dtype) -> None:
    """Ranks run at random speeds. Every variant begins each step with the same weights."""
    choose(transport)
    late = random.Random(rank)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 130), nn.Tanh(), nn.Linear(130, 50), nn.Tanh(), nn.Linear(50, 3)).to(dtype)
    for zero in VARIANTS:
        other = copy.deepcopy(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, shard_gradients=True, lr=0.01, **zero)
        plain = AdamW(other.parameters(), lr=0.01)
        hooks = [
            param.register_hook(lambda gradient: time.sleep(late.choice([0, 0, 0.001, 0.004])))
            for param in model.parameters()
        ]
        for step in range(3):
            for one, called in ((optimizer, model), (plain, other)):
                one.zero_grad()
                (called(batch(step, 4, 40).to(dtype)) - 1).square().sum().backward()
            for param, expected in zip(model.parameters(), other.parameters(), strict=True):
                expected.grad = mean_in_rank_order(expected.grad)
                assert torch.equal(optimizer.full_grad(param), expected.grad), f"{zero}, step {step}"
            optimizer.step()
            plain.step()
            assert all(map(torch.equal, model.parameters(), other.parameters())), f"{zero}, step {step}"
        for hook in hooks:
            hook.remove()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
def test_gradients_have_the_same_bits_for_every_cap_timing_and_transport(transport: str, dtype: torch.dtype) -> None:
    """A sum in the order of arrival, or that depends on buckets, shows in the last bits of these."""
    run_ranks(compare_bits, 3, transport, dtype, **LIMITS)


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


CASES: dict[str, tuple[dict[str, Any], torch.dtype, bool]] = {
    "as it is": ({}, torch.float64, False),
    "one in flight": ({"gradient_buckets_in_flight": 1}, torch.float64, False),
    "whole tensors": ({"shard": "tensor"}, torch.float64, False),
    "shards of four bytes": ({"reduce_dtype": torch.float32}, torch.bfloat16, False),
    "re-entrant segments": ({}, torch.float64, True),
}


def hold_a_share(rank: int, world: int, case: str) -> None:
    """What is alive after backward, and the most during it, on top of what there was before."""
    zero, dtype, reentrant = CASES[case]
    model = Deep(dtype)
    zero = {"shard_gradients": True, "bucket_cap_mb": CAP / 2**20} | zero
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, **zero)
    share = (TOTAL if dtype == torch.float64 else TOTAL // 2) // world + SMALL
    # A bucket under way is held packed, and its parts as they arrive; another one is being collected and packed.
    under_way = zero.get("gradient_buckets_in_flight", 2) * 2 * CAP
    assert share + under_way + 2 * CAP < TOTAL - 2 * CAP, "a full gradient would not be noticed"
    for step in range(3):
        x = batch(step, 2, WIDTH).to(dtype).requires_grad_(reentrant)
        with LiveMemory() as memory:
            loss = model(x, reentrant)
            before = memory.now()
            loss.backward()
            del loss
            after, peak = memory.now(), memory.peak - before
            # Nothing tells that a backward of re-entrant segments is over.
            assert after <= share + under_way * reentrant, f"step {step}: {after} bytes, a share is {share}"
            assert peak <= share + under_way + 2 * CAP, f"step {step}: {peak} bytes at most"
            if case == "as it is":
                assert abs(optimizer.memory().gradients - after) <= 1024
                with optimizer.no_sync():  # holds everything, until the next backward
                    model(x).backward()
                assert TOTAL <= memory.now() <= TOTAL + share
                model(x).backward()
                assert memory.now() <= share
            optimizer.step()
            if step:  # the first one makes the buffers of the parameters' gather, which stay
                assert memory.now() <= share
            optimizer.zero_grad()
            assert optimizer.memory().gradients == 0
            x.grad = None
            if step:
                assert memory.now() <= SMALL, "zero_grad leaves something behind"


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_its_share_of_the_gradients_and_a_bounded_number_of_buckets(case: str) -> None:
    run_ranks(hold_a_share, 4, case, **LIMITS)
