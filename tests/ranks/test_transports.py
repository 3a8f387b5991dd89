"""How ranks talk: the same bits through shared memory and sockets, on one host and on several, and no pickles.

Several hosts are pretended: a process says that it sees another ``/dev/shm``, so it shares no memory with the others.
Everything else is real. (Hosts with a network between them: ``tests/hosts``.)
"""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import error_of, parameters, train
from tests.surroundings import choose, full_disk
from tests.twins import Twins

SHAPES = [(7, 5), (130, 90), (5,), (33, 3), (257,), (300, 100)]  # the last is larger than a slot
SMALL = 20 / 1024  # MiB


def decide(rank: int, world: int, reason: str) -> None:
    if reason == "told not to" and rank == 2:
        os.environ["SHARDSTEP_SHARED_MEMORY"] = "0"
    with full_disk(reason == "no room" and rank == 0):
        twins = Twins(lambda: parameters(SHAPES), AdamW)
    twins.step(3)
    twins.check()
    dist.barrier()
    # Memory is mapped, and deleted: nothing is left when a process is killed.
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/shardstep-" in line]
    assert bool(mapped) == (reason == "none")
    assert all(line.endswith("(deleted)") for line in mapped)


@pytest.mark.parametrize("reason", ["none", "told not to", "no room"])
def test_one_rank_without_shared_memory_means_sockets_for_all_and_no_name_is_left(reason):
    run_ranks(decide, 3, reason)


# --- several hosts ----------------------------------------------------------------------------------------------------


def settle_on(host: int) -> Any:
    real = os.stat

    def stat(path: Any, *args: Any, **options: Any) -> os.stat_result:
        found = real(path, *args, **options)
        return os.stat_result((found.st_mode, found.st_ino + host, *found[2:])) if path == "/dev/shm" else found

    return patch.object(os, "stat", stat)


def by_hosts(parts: list[Tensor], hosts: tuple[int, ...]) -> Tensor:
    """The mean in the promised order: the ranks of a host, then hosts by their lowest rank. Halves in float32."""
    wide = torch.float32 if parts[0].dtype.itemsize == 2 else parts[0].dtype
    sums: dict[int, Tensor] = {}
    for part, host in zip(parts, hosts, strict=True):
        sums[host] = sums[host] + part.to(wide) if host in sums else part.to(wide)
    first, *others = sums.values()
    for other in others:
        first = first + other
    return (first / len(hosts)).to(parts[0].dtype)


def between_hosts(rank: int, world: int, hosts: tuple[int, ...], way: str) -> None:
    choose(way)
    with settle_on(hosts[rank]):
        for options in ({"shard": "element"}, {"shard": "tensor"}, {"lazy_gather": True}):
            twins = Twins(lambda: parameters(SHAPES), AdamW, sharded={"bucket_cap_mb": SMALL, **options}, lr=0.01)
            twins.step(4)
            twins.check()
        for dtype in (torch.float64, torch.bfloat16):
            drawn = [[torch.randn(shape).to(dtype) for shape in SHAPES] for _ in range(world)]  # alike on all ranks
            expected = [by_hosts(list(of_ranks), hosts) for of_ranks in zip(*drawn, strict=True)]
            params = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in SHAPES]
            opt = ZeroRedundancyOptimizer(params, SGD, lr=1.0, shard_gradients=True, bucket_cap_mb=SMALL)
            sum((param * one).sum() for param, one in zip(params, drawn[rank], strict=True)).backward()
            opt.step()
            assert all(torch.equal(param, -mean) for param, mean in zip(params, expected, strict=True)), dtype


@pytest.mark.parametrize("hosts", [(0, 1, 0, 1), (1, 0, 0)], ids=str)
@pytest.mark.parametrize("way", ["shared memory", "sockets"])
def test_between_hosts_parameters_are_gathered_and_gradients_added_up_host_by_host(hosts, way):
    run_ranks(between_hosts, len(hosts), hosts, way)


def skipped(rank: int, world: int, hosts: tuple[int, ...]) -> None:
    """A rank raises in the middle of backward, the others leave theirs, and all skip the batch."""
    with settle_on(hosts[rank]):
        params = [torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in SHAPES]
        opt = ZeroRedundancyOptimizer(params, SGD, lr=1.0, shard_gradients=True, bucket_cap_mb=SMALL)
        fails = False

        def maybe_fail(gradient: Tensor) -> None:
            if fails:
                raise ValueError("here")

        params[3].register_hook(maybe_fail)
        for step in range(3):
            opt.zero_grad()
            fails, failed = step == 1 and rank == 1, torch.zeros(1)
            try:
                sum((param * (rank + 1)).sum() for param in params).backward()
            except ValueError:
                failed += 1
            dist.all_reduce(failed)
            if not failed:
                opt.step()
    assert all(torch.equal(param, torch.full_like(param, -(world + 1.0))) for param in params)


@pytest.mark.long
def test_a_batch_that_fails_on_one_host_is_skipped_on_all():
    run_ranks(skipped, 2, (0, 1), pg_timeout=20)


# --- what is sent, and what is said about it --------------------------------------------------------------------------

UNPICKLES = {
    dist: ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "recv_object_list"),
    dist.distributed_c10d: ("_tensor_to_object",),
    pickle: ("load", "loads"),
    torch: ("load",),
}


def unpickling(rank: int, world: int) -> None:
    def forbidden(*args: Any, **options: Any) -> Any:
        raise AssertionError("something from another rank is unpickled")

    for module, names in UNPICKLES.items():
        for name in names:
            setattr(module, name, forbidden)
    params = parameters()
    optimizer = ZeroRedundancyOptimizer(params[:4], Adam, lr=0.1)
    train(optimizer, params, range(1))
    optimizer.add_param_group({"params": params[4:]})
    optimizer.consolidate_state_dict(to=world - 1)
    optimizer.full_state(params[0])
    optimizer.check_replicas()
    oracle = Adam(parameters(), lr=0.1)
    train(oracle, oracle.param_groups[0]["params"], range(1))
    ZeroRedundancyOptimizer(params, Adam, lr=0.1).load_state_dict(oracle.state_dict())
    assert "lr is" in str(error_of(lambda: ZeroRedundancyOptimizer(params, Adam, lr=0.1 + rank)))


def test_nothing_from_another_rank_is_unpickled():
    run_ranks(unpickling, 3, fresh=True)


def logged(rank: int, world: int) -> list[str]:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardstep").addHandler(handler)
    logging.getLogger("shardstep").setLevel(logging.INFO)
    Twins(parameters, Adam)
    assert not texts
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    # At DETAIL torch wraps its process groups.
    twins = Twins(parameters, Adam, sharded={"process_group": dist.new_group()})
    twins.step(2)
    twins.check()
    return texts


def test_with_torch_distributed_debug_construction_logs_the_layout_and_training_is_the_same():
    for rank, (text,) in enumerate(run_ranks(logged, 3, fresh=True)):
        assert all(part in text for part in (f"rank {rank} of 3", "161 elements", "buckets", "bytes")), text
