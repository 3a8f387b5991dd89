"""Shared memory and sockets carry the same bits, in any order of arrival, and all ranks choose the same one."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm.topology import find_topology
from tests.harness import run_ranks
from tests.surroundings import choose
from tests.twins import Twins, parameters

# Small, cut, larger than a message is packed for (64 KiB), and one larger than a bucket.
SHAPES = [(7, 5), (130, 90), (5,), (33, 3), (11,), (40, 41), (257,), (19, 23), (3,), (61, 7)]
CAP_MB = 0.02  # a dozen buckets, so that every slot of the ring is used again within a step


def uses_shared_memory(optimizer: ZeroRedundancyOptimizer) -> bool:
    return optimizer.engine.sharded._ring is not None


def _train(rank, world_size, transport):
    choose(transport)
    delays = random.Random(rank)
    for shard in ("element", "tensor"):
        for views in (False, True):
            twins = Twins(
                lambda: parameters(SHAPES),
                torch.optim.AdamW,
                name=f"{transport} {shard} {views=}",
                sharded={"shard": shard, "parameters_as_bucket_view": views, "bucket_cap_mb": CAP_MB},
                lr=0.01,
            )
            assert uses_shared_memory(twins.opt) == (transport == "shared memory" and world_size > 1)
            update = twins.opt.engine.local.bucket

            def late(*args, update=update):
                time.sleep(delays.choice([0, 0, 0.001, 0.004]))
                update(*args)

            twins.opt.engine.local.bucket = late
            for _ in range(6):
                twins.step()
                twins.check_weights()
            twins.opt.add_param_group({"params": [added := parameters([(9, 9)])[0]]})  # a new bucket: the ring may grow
            twins.ours.append(added)
            twins.theirs.append(parameters([(9, 9)])[0])
            twins.plain.add_param_group({"params": [twins.theirs[-1]]})
            twins.step(3)
            twins.check()


@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_that_run_at_different_speeds_end_with_the_bits_of_the_plain_optimizer(world_size, transport):
    run_ranks(_train, world_size, transport)


def _decide(rank, world_size, unwilling):
    if rank == unwilling:
        os.environ["SHARDSTEP_SHARED_MEMORY"] = "0"
    twins = Twins(lambda: parameters(SHAPES), torch.optim.AdamW)
    twins.step(3)
    twins.check()
    dist.barrier()
    return uses_shared_memory(twins.opt), [name for name in os.listdir("/dev/shm") if name.startswith("shardstep")]


@pytest.mark.parametrize("unwilling", [None, 0, 2])
def test_one_rank_without_shared_memory_means_sockets_for_all(unwilling):
    answers = run_ranks(_decide, 3, unwilling)
    assert [shared for shared, _ in answers] == [unwilling is None] * 3


def _names(rank, world_size):
    made = [ZeroRedundancyOptimizer(parameters(SHAPES), torch.optim.AdamW) for _ in range(2)]
    dist.barrier()
    # The memory is mapped, and deleted: nothing is left when a process is killed.
    maps = Path("/proc/self/maps").read_text()
    return [uses_shared_memory(optimizer) for optimizer in made], maps.count("shardstep-"), maps.count("(deleted)")


def test_shared_memory_leaves_no_name_behind():
    for shared, mapped, deleted in run_ranks(_names, 2):
        assert shared == [True, True]
        assert mapped >= 2
        assert deleted >= mapped


def _full(rank, world_size):
    from shardstep.comm import process_group, shared_memory

    group = process_group.open_group(None)
    there_is = os.statvfs("/dev/shm")
    too_much = there_is.f_bavail * there_is.f_frsize  # twice of it would be needed
    return shared_memory.open_ring(group, find_topology(group), 1, too_much) is None


def test_a_full_memory_file_system_means_sockets_not_a_crash():
    assert run_ranks(_full, 2) == [True, True]


def _killed(rank, world_size):
    twins = Twins(lambda: parameters(SHAPES), torch.optim.AdamW)
    twins.step(2)
    dist.barrier()
    if rank == 1:
        twins.opt.step = lambda: None  # leaves without a word
        return "left"
    twins.set_gradients()
    with pytest.raises(RuntimeError, match="step: the parameters could not be gathered"):
        twins.opt.step()
    return "told"


def test_a_rank_that_leaves_makes_the_others_raise():
    assert run_ranks(_killed, 3, pg_timeout=5, fresh=True) == ["told", "left", "told"]


def _reduce_with_many_in_flight(rank, world_size, transport):
    """Eight buckets, then two more. Oracle: the plain optimizer with the mean of all ranks' gradients."""
    choose(transport)
    shapes = [(300,)] * 8
    for in_flight in (1, 4, 5, 8, 1000):
        ours, theirs = parameters(shapes), parameters(shapes)
        plain = torch.optim.SGD(theirs, lr=0.1)
        options = {"bucket_cap_mb": 2400 / 2**20, "shard_gradients": True, "gradient_buckets_in_flight": in_flight}
        sharded = ZeroRedundancyOptimizer(ours, torch.optim.SGD, lr=0.1, **options)
        for step in range(6):
            if step == 3:
                for params, optimizer in ((ours, sharded), (theirs, plain)):
                    params.extend(added := parameters([(300,)] * 2))
                    optimizer.add_param_group({"params": added})
            sharded.zero_grad()
            sum((param * (rank + step + i)).sum() for i, param in enumerate(ours)).backward()
            for i, param in enumerate(theirs):
                mean = sum(other + step + i for other in range(world_size)) / world_size
                param.grad = torch.full_like(param, mean)
            for optimizer in (sharded, plain):
                optimizer.step()
            assert all(map(torch.equal, ours, theirs)), (in_flight, step)
        assert len(sharded.layout.buckets) == 10
        ring = sharded.engine.source._reducer._transports._ring
        assert (ring is not None) == (transport == "shared memory")
        assert ring is None or ring.in_flight == min(in_flight, 10)  # and not as much memory as for a thousand


@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
def test_any_number_of_gradient_buckets_may_be_in_flight(transport):
    run_ranks(_reduce_with_many_in_flight, 2, transport)


def _take_too_many(rank, world_size):
    from shardstep.comm import process_group, shared_memory

    group = process_group.open_group(None)
    ring = shared_memory.open_ring(group, find_topology(group), 2, 100)
    assert not ring.is_full
    ring.take(), ring.take()
    assert ring.is_full
    with pytest.raises(RuntimeError, match="expects at most 2 collectives in flight"):
        ring.take()
    ring.release()
    ring.take()


def test_a_full_ring_gives_out_no_slot_whatever_its_owner_believes():
    """An error, not an assert: ``python -O`` leaves those out."""
    run_ranks(_take_too_many, 2)
