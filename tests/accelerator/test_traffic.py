"""Traffic stays on the device: initial parameters, buffers, whole gradients and lent ones, in few collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import collectives
from tests.accelerator import simulated
from tests.accelerator.devices import (
    device,
    host_reads,
    on_accelerator_only,
    on_device,
    run_ranks,
    same,
    simulation_only,
    sizes,
)

pytestmark = simulation_only  # who else knows what was sent
SMALL = 64  # bytes: a message of the ranks to each other, and no tensor of these tests


class Traffic:
    """What passes while it is watched."""

    def __init__(self) -> None:
        self.collectives: list[int] = []  # on the device, the bytes of each that are more than a message
        self.copies: list[tuple[int, str]] = []  # to and from the host, those that are more than a message: bytes, line
        self.reads: list[str] = []  # where the host waited for the device


@contextmanager
def watched() -> Iterator[Traffic]:
    traffic = Traffic()
    with simulated.tracing() as log, host_reads() as reads:
        yield traffic
    large = [entry for entry in log.entries if entry.bytes > SMALL]
    traffic.collectives = [entry.bytes for entry in large if entry.kind == "collective"]
    traffic.copies = [(entry.bytes, entry.line) for entry in large if entry.kind == "copy"]
    traffic.reads = [str(read) for read in reads]


class Net(nn.Module):
    """Many parameters and buffers, of two dtypes each."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(6)).double()
        self.norms = nn.ModuleList(nn.BatchNorm1d(20) for _ in range(6)).double()
        self.scale = nn.Parameter(torch.rand(20))
        for number, norm in enumerate(self.norms):
            norm.register_buffer("seen", torch.full((20,), 10 * seed + number))

    def forward(self, batch: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            batch = torch.tanh(norm(layer(batch)))
        return batch * self.scale.double()


def batch_of(rank: int, step: int = 0) -> Tensor:
    return torch.randn(8, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def nbytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def sharded(model: nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, shard_gradients=True)


def start(rank: int) -> None:
    """Initial parameters."""
    sharded(Net(rank).to(device()))  # the first of a kind tries tiny tensors, which are copied to the device
    model = Net(rank).to(device())
    with watched() as traffic:
        optimizer = sharded(model)
    assert len(traffic.collectives) == 2, traffic.collectives  # a dtype each
    assert sum(traffic.collectives) == nbytes(model.parameters())
    assert traffic.copies == [], traffic.copies
    same([param.detach() for param in model.parameters()], [param.detach() for param in Net(0).parameters()])
    del optimizer


def share_buffers(rank: int) -> None:
    model = Net(rank).to(device())
    optimizer = sharded(model)
    with watched() as traffic:
        optimizer.broadcast_buffers(model)
    # The counters of BatchNorm (int64) and "seen" are of one dtype, the statistics of another.
    assert len(traffic.collectives) == 2, traffic.collectives
    assert sum(traffic.collectives) == nbytes(model.buffers())
    assert traffic.copies == [], traffic.copies
    assert traffic.reads == []
    same(list(model.buffers()), list(Net(0).buffers()))


def look_at_gradients(rank: int, world: int) -> None:
    model, plain = Net(0).to(device()), Net(0)
    optimizer = sharded(model)
    model(batch_of(rank).to(device())).square().mean().backward()
    torch.stack([plain(batch_of(other)).square().mean() for other in range(world)]).mean().backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        with watched() as traffic:
            gradient = optimizer.full_grad(param)
        assert len(traffic.collectives) <= 1, traffic.collectives  # of all pieces, together
        assert len(traffic.collectives) == 1 or nbytes([param]) <= SMALL * world
        assert traffic.copies == [], traffic.copies
        # Sums of a few terms in another order; a parameter is float32.
        rtol = 1e-12 if param.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(gradient.cpu(), expected.grad, rtol=rtol, atol=1e-12)


@on_device
def _exchange(rank: int, world: int) -> None:
    start(rank)
    share_buffers(rank)
    look_at_gradients(rank, world)


@on_accelerator_only
def _exchange_without_gloo(rank: int, world: int) -> None:
    start(rank)
    share_buffers(rank)
    look_at_gradients(rank, world)


@pytest.mark.parametrize("function", [_exchange, _exchange_without_gloo])
@pytest.mark.parametrize("world", sizes(2, 3))
def test_parameters_buffers_and_gradients_travel_on_the_device_together(world: int, function: Any) -> None:
    run_ranks(function, world)


@on_device
def _lend(rank: int, world: int, coalesced: bool) -> list[tuple[int, int]]:
    """By step: the collectives of the step, and the bytes that were copied to or from the host."""
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(6))).double()
    if not coalesced:
        collectives._coalesced = lambda tensors: iter([[tensor] for tensor in tensors])
    model.to(device())
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    found = []
    with Join([ddp, optimizer]):
        for step in range(5 if rank == 0 else 2):
            optimizer.zero_grad()
            ddp(batch_of(rank, step).to(device())).square().mean().backward()
            with watched() as traffic:
                optimizer.step()
            found.append((len(traffic.collectives), sum(size for size, _ in traffic.copies)))
    return found


def test_gradients_are_lent_on_the_device_in_one_message() -> None:
    """To a rank without inputs: the last steps of rank 0 send one message more than the first, and no copy passes."""
    first, _ = run_ranks(_lend, 2, True)
    gathers = first[0][0]
    assert gathers == 1  # the all-gather of the only bucket
    assert first == [(1, 0), (1, 0), (2, 0), (2, 0), (2, 0)], first


def test_gradients_that_are_lent_one_by_one_would_be_noticed() -> None:
    """The negative control."""
    first, _ = run_ranks(_lend, 2, False)
    assert first[-1][0] > 2, first
