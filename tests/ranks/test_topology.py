"""Several hosts, pretended: ranks of one machine that say they are on different hosts share no memory with each other.

Everything else is real: slots per host, messages between hosts. (Hosts with a network between them: ``tests/hosts``.)
"""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, AdamW

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import topology
from shardstep.comm.process_group import open_group
from shardstep.grads import scheduler
from shardstep.layout.shares import share
from tests.harness import run_ranks
from tests.surroundings import choose
from tests.twins import Twins, parameters

# By rank: on which host it is. Halves, 3 + 1, not in the order of ranks, every rank for itself.
ARRANGEMENTS = [
    pytest.param((0, 0, 0, 1), id="(0, 0, 0, 1)", marks=pytest.mark.extended),
    *(pytest.param(hosts, id=str(hosts)) for hosts in ((0, 1, 0, 1), (1, 0, 0))),
    *(pytest.param(hosts, id=str(hosts), marks=pytest.mark.again) for hosts in ((0, 0, 1, 1), (0, 1, 2, 3))),
]
SHAPES = [(7, 5), (130, 90), (5,), (33, 3), (11,), (40, 41), (257,), (300, 100)]  # the last is larger than a slot
KB = 1 / 1024


def settle_on(hosts: tuple[int, ...], rank: int, way: str) -> None:
    topology._host_number = lambda: hosts[rank]  # type: ignore[assignment]
    choose(way)


def test_hosts_are_ordered_by_their_lowest_rank_and_ranks_within_them():
    found = topology.topology_of(2, [70, 50, 70, 60, 50])
    assert found.hosts == ((0, 2), (1, 4), (3,))
    assert (found.host, found.place, found.other_hosts) == ((0, 2), 1, [(1, 4), (3,)])


def test_shares_lie_side_by_side_and_are_nearly_equal():
    for length in range(20):
        for count in range(1, 6):
            shares = [share(length, count, position) for position in range(count)]
            assert (shares[0][0], shares[-1][1]) == (0, length)
            assert all(one[1] == other[0] for one, other in pairwise(shares))
            assert max(high - low for low, high in shares) - min(high - low for low, high in shares) <= 1


def _real(rank: int, world_size: int) -> tuple:
    return topology.find_topology(open_group(None)).hosts


def test_the_ranks_of_this_machine_are_on_one_host():
    assert run_ranks(_real, 3) == [((0, 1, 2),)] * 3


def gather(rank: int, world_size: int, hosts: tuple[int, ...], way: str) -> None:
    settle_on(hosts, rank, way)
    for shard in ("element", "tensor"):
        for further in ({}, {"parameters_as_bucket_view": True}, {"lazy_gather": True}):
            twins = Twins(
                lambda: parameters(SHAPES),
                AdamW,
                name=f"{hosts} {way} {shard} {further}",
                sharded={"shard": shard, "bucket_cap_mb": 20 * KB, **further},
                lr=0.01,
            )
            twins.step(5)
            twins.check()


@pytest.mark.parametrize("hosts", ARRANGEMENTS)
def test_parameters_gathered_between_hosts_have_the_bits_of_the_plain_optimizer(hosts):
    run_ranks(gather, len(hosts), hosts, "shared memory")


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


WAYS = [
    ("shared memory", {"bucket_cap_mb": 20 * KB}),
    ("shared memory", {"bucket_cap_mb": 25, "shard": "tensor"}),
    ("sockets", {"bucket_cap_mb": 3 * KB}),
    ("sockets", {"bucket_cap_mb": 20 * KB, "shard": "tensor"}),
]


def reduce(rank: int, world_size: int, hosts: tuple[int, ...]) -> None:
    """Oracle: the mean of all ranks' gradients, added up by hand."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        drawn = [[torch.randn(shape).to(dtype) for shape in SHAPES] for _ in range(world_size)]  # alike on all ranks
        expected = [by_hosts(list(of_ranks), hosts) for of_ranks in zip(*drawn, strict=True)]
        for way, options in WAYS:
            settle_on(hosts, rank, way)
            params = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in SHAPES]
            optimizer = ZeroRedundancyOptimizer(params, SGD, lr=1.0, shard_gradients=True, **options)
            for _ in range(2):
                sum((param * one).sum() for param, one in zip(params, drawn[rank], strict=True)).backward()
            for param, mean in zip(params, expected, strict=True):
                assert torch.equal(optimizer.full_grad(param), mean + mean), (hosts, dtype, way, options)
            optimizer.step()
            assert all(torch.equal(param, -(mean + mean)) for param, mean in zip(params, expected, strict=True))


@pytest.mark.parametrize("hosts", ARRANGEMENTS)
def test_gradients_are_added_up_host_by_host_whatever_the_transport(hosts):
    run_ranks(reduce, len(hosts), hosts)


def late(rank: int, world_size: int, hosts: tuple[int, ...]) -> None:
    """One rank is later than the others wait in backward; then all ranks do something together before they step."""
    settle_on(hosts, rank, "shared memory")
    scheduler.PATIENCE = 0.2
    params = [torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in SHAPES]
    optimizer = ZeroRedundancyOptimizer(params, SGD, lr=1.0, shard_gradients=True, bucket_cap_mb=20 * KB)
    for step in range(3):
        optimizer.zero_grad()
        loss = sum((param * (rank + step + 1)).sum() for param in params)
        if step == 1 and rank == 1:
            time.sleep(1)
        loss.backward()
        dist.all_reduce(loss.detach())  # for a log
        optimizer.step()
    total = sum(sum(other + step + 1 for other in range(world_size)) / world_size for step in range(3))
    assert all(torch.equal(param, torch.full_like(param, -total)) for param in params)


@pytest.mark.parametrize("hosts", [(0, 1), (0, 1, 0)], ids=str)
def test_a_rank_that_is_late_in_backward_is_waited_for_in_the_step(hosts):
    run_ranks(late, len(hosts), hosts, pg_timeout=20)


def skipped(rank: int, world_size: int, hosts: tuple[int, ...]) -> None:
    """A rank raises in the middle of backward, the others leave theirs, and all skip the batch."""
    settle_on(hosts, rank, "shared memory")
    scheduler.PATIENCE = 0.2
    params = [torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in SHAPES]
    optimizer = ZeroRedundancyOptimizer(params, SGD, lr=1.0, shard_gradients=True, bucket_cap_mb=20 * KB)
    fails = False

    def maybe_fail(gradient: Tensor) -> None:
        if fails:
            raise ValueError("here")

    params[3].register_hook(maybe_fail)
    for step in range(6):
        optimizer.zero_grad()
        fails = step in (1, 3) and rank == step % world_size
        failed = torch.zeros(1)
        try:
            sum((param * (rank + 1)).sum() for param in params).backward()
        except ValueError:
            failed += 1
        dist.all_reduce(failed)
        if not failed:
            optimizer.step()
    total = 4 * (world_size + 1) / 2
    assert all(torch.equal(param, torch.full_like(param, -total)) for param in params)


@pytest.mark.parametrize("hosts", [(0, 1), (0, 1, 0)], ids=str)
def test_a_batch_that_fails_on_one_host_is_skipped_on_all(hosts):
    run_ranks(skipped, len(hosts), hosts, pg_timeout=20)
