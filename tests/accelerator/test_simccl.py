"""The process group of the simulated device: NCCL's contract."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.accelerator import simulated
from tests.accelerator.simulated import ACCELERATOR_ONLY, BACKENDS, on_device
from tests.harness import run_ranks


def _numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device="sim")


def _collect(rank: int, world: int) -> None:
    """Every collective, against what it is to give."""
    ranks, total = range(world), sum(range(world))
    one = _numbers(rank, rank)
    dist.all_reduce(one)
    assert one.tolist() == [total] * 2
    for op, expected in [
        (dist.ReduceOp.AVG, total / world),
        (dist.ReduceOp.MAX, world - 1),
        (dist.ReduceOp.MIN, 0),
        (dist.ReduceOp.PRODUCT, 0),
    ]:
        one = _numbers(rank)
        dist.all_reduce(one, op=op)
        torch.testing.assert_close(one.cpu(), torch.tensor([float(expected)]))
    half = torch.full((2,), 40_000.0, dtype=torch.float16, device="sim")
    dist.all_reduce(half, op=dist.ReduceOp.AVG)  # its sum would overflow
    assert half.isfinite().all().item()
    one = _numbers(rank + 1)
    dist.broadcast(one, src=world - 1)
    assert one.item() == world
    one = _numbers(rank + 1)
    dist.reduce(one, dst=0)
    assert one.item() == (total + world if rank == 0 else rank + 1)
    rows = [torch.zeros(other + 1, device="sim") for other in ranks]  # of unequal sizes
    dist.all_gather(rows, torch.full((rank + 1,), float(rank), device="sim"))
    assert [row.tolist() for row in rows] == [[other] * (other + 1) for other in ranks]
    part = torch.zeros(rank + 1, device="sim")
    dist.reduce_scatter(part, [torch.full((other + 1,), float(rank), device="sim") for other in ranks])
    assert part.tolist() == [total] * (rank + 1)
    whole = torch.zeros(world * 2, device="sim")
    whole[rank * 2 : rank * 2 + 2] = rank
    dist.all_gather_into_tensor(whole, whole[rank * 2 : rank * 2 + 2])  # in place
    assert whole.tolist() == [other for other in ranks for _ in range(2)]
    part = torch.zeros(2, device="sim")
    dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.SUM)
    assert part.tolist() == [rank * world] * 2
    swapped = torch.zeros(world, device="sim")
    dist.all_to_all_single(swapped, torch.full((world,), float(rank), device="sim"))
    assert swapped.tolist() == list(ranks)
    gathered = [torch.zeros(1, device="sim") for _ in ranks] if rank == 0 else None
    dist.gather(_numbers(rank), gathered, dst=0)
    assert rank or [one.item() for one in gathered or ()] == list(ranks)
    one = _numbers(-1)
    dist.scatter(one, [_numbers(other) for other in ranks] if rank == 0 else None, src=0)
    assert one.item() == rank
    if world > 1:
        if rank == 0:
            dist.send(_numbers(5, 6), dst=1)
        if rank == 1:
            one = _numbers(0, 0)
            dist.recv(one, src=0)
            assert one.tolist() == [5, 6]
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": other} for other in ranks]
    group = dist.new_group(list(ranks))
    one = _numbers(1.0)
    dist.all_reduce(one, group=group)
    assert one.item() == world
    dist.barrier()


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("backends", [BACKENDS, ACCELERATOR_ONLY])
def test_its_collectives_give_what_they_are_to_give(world: int, backends: str) -> None:
    run_ranks(partial(_on, _collect, backends), world, fresh=True)


def _on(function: Any, backends: str, rank: int, world: int) -> Any:
    return on_device(function, backends)(rank, world)


@on_device
def _waiting_orders_the_current_stream_and_never_blocks_the_host(rank: int, world: int) -> None:
    sim = torch.get_device_module("sim")
    data = torch.ones(4, device="sim")
    with simulated.host_reads() as reads, simulated.tracing() as log:
        work = dist.all_reduce(data, async_op=True)
        future = work.get_future()
        assert future.done()  # it is enqueued
        with simulated.races_ignored():
            early = data.clone()
        seen = future.then(lambda done: done.value()[0] * 2)
        doubled = seen.wait()[0]
        future.wait()
        trebled = data * 3
    assert reads == []
    assert early.isnan().all().item()
    assert doubled.item() == 2 * world
    assert trebled.tolist() == [3 * world] * 4
    (launched,) = (entry for entry in log.entries if entry.kind == "collective")
    assert log.streams[launched.stream][1].startswith("simccl")
    # Without async_op it is on the current stream, as with NCCL in this version of torch.
    with simulated.tracing() as log:
        dist.all_reduce(data)
    (launched,) = (entry for entry in log.entries if entry.kind == "collective")
    assert log.streams[launched.stream][1] == "default"
    # Another stream that waits is in order; the current one still is not.
    side = sim.Stream()
    work = dist.all_reduce(data, async_op=True)
    with sim.stream(side):
        work.wait()
        assert data.sum().item() == 4 * world * world * world


@on_device
def _coalesced_collectives_are_one(rank: int, world: int) -> None:
    device = torch.device("sim", 0)
    tensors = [torch.full((size,), 1.0, device="sim") for size in (3, 5)]
    with simulated.collectives() as counts:
        with dist._coalescing_manager(async_ops=True) as manager:
            for one in tensors:
                dist.all_reduce(one)
        manager.wait()
        with dist._coalescing_manager(device=device, async_ops=True) as manager:
            for root in range(world):
                dist.broadcast(tensors[root % 2], src=root, async_op=True)
        manager.wait()
        wholes = [torch.zeros(world * size, device="sim") for size in (3, 5)]
        with dist._coalescing_manager(device=device, async_ops=True) as manager:
            for whole, one in zip(wholes, tensors, strict=True):
                dist.all_gather_into_tensor(whole, one, async_op=True)
        manager.wait()
        with dist._coalescing_manager(async_ops=True) as manager:
            for whole, one in zip(wholes, tensors, strict=True):
                dist.reduce_scatter_tensor(one, whole)
        manager.wait()
    assert counts == {
        "all_reduce_coalesced": 1,
        "broadcast_coalesced": 1,
        "all_gather_into_tensor_coalesced": 1,
        "reduce_scatter_tensor_coalesced": 1,
    }
    assert [whole.tolist() for whole in wholes] == [[float(world)] * world * size for size in (3, 5)]
    assert [one.tolist() for one in tensors] == [[float(world) * world] * size for size in (3, 5)]


@on_device
def _cross(rank: int, world: int, what: str) -> None:
    one, other = torch.ones(4, device="sim"), torch.ones(4 * world, device="sim")
    if what == "order":
        if rank == 0:
            dist.all_reduce(one, async_op=True)
            work = dist.all_gather_into_tensor(other, one, async_op=True)
        else:
            dist.all_gather_into_tensor(other, one, async_op=True)
            work = dist.all_reduce(one, async_op=True)
    else:
        work = dist.all_reduce(one[: 3 + rank].clone(), async_op=True)
    work.wait()
    one.tolist()


@pytest.mark.parametrize("what", ["order", "sizes"])
def test_collectives_in_different_orders_are_an_error_that_shows_both(what: str) -> None:
    with pytest.raises(AssertionError) as raised:
        run_ranks(_cross, 2, what, fresh=True)
    error = str(raised.value)
    assert "all ranks must call the same collectives in the same order" in error
    if what == "order":
        assert "rank 0: all_reduce(4 x Float, sum)" in error
        assert "rank 1: all_gather_into_tensor(4 x Float, 4 x Float)" in error
    else:
        assert "rank 0: all_reduce(3 x Float, sum)" in error
        assert "rank 1: all_reduce(4 x Float, sum)" in error
    assert error.count("in _cross") >= 2


@on_device
def _lose_a_rank(rank: int, world: int) -> str:
    if rank == 1:
        return ""
    data = torch.ones(4, device="sim")
    work = dist.all_reduce(data, async_op=True)
    work.wait()  # nobody knows yet
    with pytest.raises(RuntimeError) as raised:
        data.tolist()
    return str(raised.value)


def test_a_rank_that_leaves_is_noticed_by_who_needs_the_result() -> None:
    error, _ = run_ranks(_lose_a_rank, 2, fresh=True, pg_timeout=10)
    assert "simccl: all_reduce(4 x Float, sum)" in error
    assert "in _lose_a_rank" in error


@on_device
def _what_nccl_refuses_is_refused(rank: int, world: int) -> None:
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("sim"))
    with pytest.raises(RuntimeError, match="simccl expects tensors of the simulated device but got cpu"):
        backend.allreduce([torch.ones(1)])
    with pytest.raises(RuntimeError, match="expects contiguous tensors"):
        dist.all_reduce(torch.ones(2, 2, device="sim").t()[0])
    with pytest.raises(RuntimeError, match="no int16"):
        dist.all_reduce(torch.ones(2, device="sim", dtype=torch.int16))
    with pytest.raises(RuntimeError, match="no such reduction"):
        dist.all_reduce(torch.ones(2, device="sim", dtype=torch.int32), op=dist.ReduceOp.BAND)


@on_device
def _a_work_that_is_dropped_keeps_its_memory_until_the_host_has_seen_its_end(rank: int, world: int) -> None:
    """Nobody keeps the tensor or the work, as DDP in a Join context. NCCL keeps the memory until it sees the end."""
    sim = torch.get_device_module("sim")
    before = sim.memory_allocated()
    dist.all_reduce(torch.ones(1000, device="sim"), async_op=True)
    assert sim.memory_allocated() > before
    torch.ones(1000, device="sim").add_(1)  # a race, if the memory was given away
    sim.synchronize()
    assert sim.memory_allocated() == before


@pytest.mark.parametrize(
    "rule",
    [
        _waiting_orders_the_current_stream_and_never_blocks_the_host,
        _coalesced_collectives_are_one,
        _what_nccl_refuses_is_refused,
        _a_work_that_is_dropped_keeps_its_memory_until_the_host_has_seen_its_end,
    ],
)
def test_the_group_keeps_the_rule(rule: Any) -> None:
    run_ranks(rule, 2, fresh=True)
