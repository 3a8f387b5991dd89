"""ZeRO-2: the same bits whatever the buckets, the timing and the transport are; and how much memory gradients take.

The oracle of bits is the definition in docs/design.md: everybody's gradients, summed in rank order and divided once.
Memory is measured on live storages, also those that only autograd holds.
"""

from __future__ import annotations

import gc
import random
import re
import time
from collections.abc import Iterator
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

from shardstep import ShardedGradient
from tests.harness import run_ranks
from tests.oracle import assert_same, values_of
from tests.ranks.test_shard_gradients import (
    KB,
    KB64,
    LIMITS,
    Checkpointed,
    batch,
    make_mlp,
    mlp_loss,
    sharded,
    transport,
)

# --- bits ---------------------------------------------------------------------------------------------------------


def mean_in_rank_order(gradient: Tensor) -> Tensor:
    """Half precision is summed in float32 and rounded once."""
    parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, gradient.contiguous())
    wide = torch.float32 if gradient.dtype == torch.bfloat16 else gradient.dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return (total / len(parts)).to(gradient.dtype)


def by_hand(rank: int, dtype: torch.dtype, options: dict[str, Any]) -> list[list[Tensor]]:
    """Gradients and weights of each step."""
    model = make_mlp(dtype)
    optimizer = AdamW(model.parameters(), **options)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        mlp_loss(model, rank, step).backward()
        for param in model.parameters():
            param.grad = mean_in_rank_order(param.grad)
        optimizer.step()
        seen += [[param.grad.clone() for param in model.parameters()], values_of(model.parameters())]
    return seen


def sharded_run(rank: int, dtype: torch.dtype, zero: dict[str, Any], options: dict, late: random.Random) -> list:
    """The same, ours, on ranks that run at different speeds."""
    model = make_mlp(dtype)
    optimizer = sharded(model.parameters(), AdamW, **zero, **options)
    for param in model.parameters():
        param.register_hook(lambda gradient: time.sleep(late.choice([0, 0, 0.001, 0.004])))
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        time.sleep(late.choice([0, 0.005]))
        mlp_loss(model, rank, step).backward()
        gradients = [optimizer.full_grad(param) for param in model.parameters()]
        optimizer.step()
        seen += [gradients, values_of(model.parameters())]
    return seen


def variants(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    plain = {"lr": 0.01}
    yield "shared memory", {"bucket_cap_mb": 25}, plain
    yield "shared memory", {"bucket_cap_mb": KB}, plain
    yield "sockets", {"bucket_cap_mb": KB64, "shard": "tensor"}, plain
    if dtype == torch.float32:
        yield "sockets", {"bucket_cap_mb": 25}, plain
        yield "shared memory", {"bucket_cap_mb": 4 * KB, "overlap_backward": False}, plain
        yield "sockets", {"bucket_cap_mb": 4 * KB, "overlap_backward": False, "shard": "tensor"}, plain
        yield "sockets", {"bucket_cap_mb": KB, "gradient_buckets_in_flight": 1}, plain
        yield "shared memory", {"bucket_cap_mb": 4 * KB, "gradient_buckets_in_flight": 7}, plain
        yield "shared memory", {"bucket_cap_mb": KB64, "parameters_as_bucket_view": True}, plain
        # A fused kernel handles the end of a tensor differently, so tensors must be whole.
        yield "shared memory", {"bucket_cap_mb": 25, "shard": "tensor"}, {"lr": 0.01, "fused": True}


def every_variant(rank: int, world: int, seed: int) -> list:
    late = random.Random(100 * seed + rank)
    kept = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        expected: dict[bool, list] = {}
        for way, zero, options in variants(dtype):
            fused = "fused" in options
            if fused not in expected:
                expected[fused] = by_hand(rank, dtype, options)
            with transport(way):
                seen = sharded_run(rank, dtype, zero, options, late)
            assert_same(seen, expected[fused], f"{dtype} {way} {zero}")
        kept.append(expected[False])
    return kept


@pytest.mark.extended
@pytest.mark.long
@pytest.mark.parametrize(("world", "runs"), [(3, 2), pytest.param(4, 1, marks=pytest.mark.again)])
def test_gradients_and_weights_are_the_same_bits_for_every_cap_timing_transport_and_run(world, runs):
    """A sum in order of arrival, or cut by bucket, shows in the last bits of these."""
    seen = [rank for seed in range(runs) for rank in run_ranks(every_variant, world, seed, **LIMITS)]
    assert_same(seen, seen[:1] * len(seen), "ranks and runs")


def shared_segments(rank: int, world: int) -> None:
    """A parameter shared by re-entrant segments comes in parts; when they come must not show in the bits."""
    seen = []
    for cap, overlap in ((KB, True), (25, True), (KB, False), (25, False)):
        model = Checkpointed()
        optimizer = sharded(model.parameters(), AdamW, bucket_cap_mb=cap, overlap_backward=overlap, lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(rank, step, 3, 8).requires_grad_(), "shared", True).square().sum().backward()
            optimizer.step()
        seen.append(values_of(model.parameters()))
        assert_same(seen[-1], seen[0], f"cap {cap} overlap {overlap}")


@pytest.mark.xfail(
    strict=True,
    reason="in the first backward its gradient comes in parts, reduced apart: see docs/design.md, Gradients",
)
def test_the_bits_of_a_parameter_shared_by_reentrant_segments_do_not_depend_on_caps_and_overlap():
    run_ranks(shared_segments, 3, **LIMITS)


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


def every_setting(rank: int, world: int, way: str) -> None:
    live_bytes(rank, world, way, {}, 2)
    live_bytes(rank, world, way, {"gradient_buckets_in_flight": 1}, 1)
    live_bytes(rank, world, way, {"shard": "tensor"}, 2)
    live_bytes(rank, world, way, {"overlap_backward": False}, 2)


def live_bytes(rank: int, world: int, way: str, zero: dict[str, Any], in_flight: int) -> None:
    """What is alive after backward, and the most during it, on top of what there was before."""
    with transport(way):
        model = Deep()
        optimizer = sharded(model.parameters(), SGD, bucket_cap_mb=CAP / 2**20, lr=0.1, **zero)
    share = TOTAL // world + SMALL
    # A bucket under way is held packed, and its parts as they arrive; another one is being collected and packed.
    bound = share + (in_flight + 1) * 2 * CAP
    assert bound < TOTAL - 2 * CAP, "a full gradient would not be noticed"
    for step in range(3):  # the second and third are like the first
        optimizer.zero_grad()
        x = batch(rank, step, 2, WIDTH)
        with LiveMemory() as memory:
            loss = model(x)
            before = memory.now()
            loss.backward()
            del loss
            after, peak = memory.now(), memory.peak - before
            where = f"{way} {zero} step {step}: {after} after, {peak} at most"
            assert after <= share, f"{where}, share {share}"
            assert abs(optimizer.memory().gradients - after) <= 1024, f"{where}, {optimizer.memory()}"
            if zero.get("overlap_backward", True):
                assert peak <= bound, f"{where}, bound {bound}"
            model(x).backward()  # accumulates in the shards
            assert memory.now() <= share
            optimizer.step()
            if step:  # the first one makes the buffers of the parameters' gather, which stay
                assert memory.now() <= share, "something of the step stays"
            optimizer.zero_grad()
            if step:
                assert memory.now() <= SMALL, "zero_grad leaves something behind"
            assert optimizer.memory().gradients == 0


@pytest.mark.parametrize("way", ["shared memory", pytest.param("sockets", marks=pytest.mark.extended)])
def test_a_rank_holds_its_share_of_the_gradients_and_a_bounded_number_of_buckets(way):
    run_ranks(every_setting, 4, way, **LIMITS)


def full_gradients(rank: int, world: int) -> None:
    """The meter shows what it should: a plain backward, and one within no_sync, hold everything."""
    model = Deep()
    with LiveMemory() as memory:
        model(batch(rank, 0, 2, WIDTH)).backward()
        assert TOTAL <= memory.now() <= TOTAL + SMALL
        model.zero_grad()
        assert memory.now() <= SMALL
    optimizer = sharded(model.parameters(), SGD, bucket_cap_mb=CAP / 2**20)
    with LiveMemory() as memory:
        with optimizer.no_sync():
            model(batch(rank, 0, 2, WIDTH)).backward()
        assert TOTAL <= memory.now() <= TOTAL + SMALL
        assert optimizer.memory().gradients == TOTAL
        model(batch(rank, 1, 2, WIDTH)).backward()
        assert memory.now() <= TOTAL // world + SMALL
        assert optimizer.memory().gradients <= TOTAL // world + SMALL


def test_within_no_sync_full_gradients_are_held_and_the_next_backward_frees_them():
    run_ranks(full_gradients, 4, **LIMITS)


def reentrant_segments(rank: int, world: int) -> None:
    """No parameter outside: backward ends without a word to us, with no more than the stated buckets under way."""
    for way in ("shared memory", "sockets"):
        with transport(way):
            model = Deep()
            optimizer = sharded(model.parameters(), SGD, bucket_cap_mb=CAP / 2**20)
        for step in range(2):
            optimizer.zero_grad()
            with LiveMemory() as memory:
                model(batch(rank, step, 2, WIDTH).requires_grad_(), reentrant=True).backward()
                assert memory.now() <= TOTAL // world + 2 * 2 * CAP + SMALL
                optimizer.step()
                if step:  # the first one makes the buffers of the parameters' gather, which stay
                    assert memory.now() <= TOTAL // world + SMALL


def test_reentrant_checkpointing_of_everything_leaves_no_full_gradients():
    run_ranks(reentrant_segments, 4, **LIMITS)


def wide_shards(rank: int, world: int) -> None:
    """reduce_dtype=float32 with bf16 parameters: a share in four bytes, and no more."""
    model = Deep(torch.bfloat16)
    optimizer = sharded(model.parameters(), SGD, bucket_cap_mb=CAP / 2**20, reduce_dtype=torch.float32)
    for step in range(2):
        optimizer.zero_grad()
        with LiveMemory() as memory:
            model(batch(rank, step, 2, WIDTH, dtype=torch.bfloat16)).backward()
            share = TOTAL // 2 // world
            assert share <= memory.now() <= share + SMALL
            optimizer.step()


def test_shards_in_float32_take_four_bytes_per_owned_element():
    run_ranks(wide_shards, 4, **LIMITS)


def mapped() -> int:
    """Bytes of shared memory that this process has mapped for shardstep."""
    ranges = re.findall(r"^(\w+)-(\w+) .*shardstep-", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return sum(int(stop, 16) - int(start, 16) for start, stop in ranges)


def shared_slots(rank: int, world: int) -> None:
    """Per rank of a host a ring of twice the stated number of buckets, shared by all ranks."""
    for in_flight in (1, 3):
        there = mapped()
        model = Deep()
        plain = sharded(model.parameters(), SGD, bucket_cap_mb=CAP / 2**20, gradient_buckets_in_flight=in_flight)
        ring = mapped() - there
        gathers = 2 * 4 * (CAP + 4096)  # the parameters' own ring, as without shard_gradients
        assert ring <= 2 * in_flight * world * (CAP + 4096) + gathers + 65536, f"{ring} for {in_flight}"
        del plain


def test_the_memory_that_ranks_of_a_host_share_is_bounded_too():
    run_ranks(shared_slots, 3, **LIMITS)
