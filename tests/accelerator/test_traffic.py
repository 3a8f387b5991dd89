"""What is sent and launched: traffic stays on the device, in few collectives, with little padding and few kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shardstep import ZeroRedundancyOptimizer
from tests.accelerator import devices, simulated
from tests.accelerator.devices import device, host_reads, on_accelerator_only, on_device, run_ranks, same
from tests.accelerator.modes import MODES, STEP_IN_BACKWARD, train_in

pytestmark = devices.simulation_only  # who else knows what was sent
SMALL = 64  # bytes: a message of the ranks to each other, and no tensor of these tests
OWN_STEP = [mode for mode in MODES if mode not in STEP_IN_BACKWARD]


class Traffic(NamedTuple):
    """What passes while it is watched, without messages of the ranks to each other."""

    collectives: list[int]  # on the device: the bytes of each
    copies: list[tuple[int, str]]  # to and from the host: bytes, line
    reads: list[str]  # where the host waited for the device


@contextmanager
def watched() -> Iterator[Traffic]:
    traffic = Traffic([], [], [])
    with simulated.tracing() as log, host_reads() as reads:
        yield traffic
    large = [entry for entry in log.entries if entry.bytes > SMALL]
    traffic.collectives.extend(entry.bytes for entry in large if entry.kind == "collective")
    traffic.copies.extend((entry.bytes, entry.line) for entry in large if entry.kind == "copy")
    traffic.reads.extend(map(str, reads))


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


def batch_of(rank: int) -> Tensor:
    return torch.randn(8, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def nbytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def sharded(model: nn.Module, **settings: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, shard_gradients=True, **settings)


def exchange(rank: int, world: int) -> None:
    """Initial parameters, buffers, whole gradients: one collective for each dtype, or parameter."""
    sharded(Net(rank).to(device()))  # the first of a kind tries tiny tensors, which are copied to the device
    model, plain = Net(rank).to(device()), Net(0)
    with watched() as traffic:
        optimizer = sharded(model)
    assert (len(traffic.collectives), sum(traffic.collectives)) == (2, nbytes(model.parameters()))
    assert traffic.copies == []
    same([param.detach() for param in model.parameters()], [param.detach() for param in plain.parameters()])
    with watched() as traffic:
        optimizer.broadcast_buffers(model)
    assert (len(traffic.collectives), sum(traffic.collectives)) == (2, nbytes(model.buffers()))
    assert (traffic.copies, traffic.reads) == ([], [])
    same(list(model.buffers()), list(plain.buffers()))
    model(batch_of(rank).to(device())).square().mean().backward()
    torch.stack([plain(batch_of(other)).square().mean() for other in range(world)]).mean().backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        with watched() as traffic:
            gradient = optimizer.full_grad(param)
        assert len(traffic.collectives) == 1 or nbytes([param]) <= SMALL * world  # of all pieces, together
        assert traffic.copies == []
        # Sums of a few terms in another order; a parameter is float32.
        rtol = 1e-12 if param.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(gradient.cpu(), expected.grad, rtol=rtol, atol=1e-12)


@on_device
def _exchange(rank: int, world: int) -> None:
    exchange(rank, world)


@on_accelerator_only
def _exchange_without_gloo(rank: int, world: int) -> None:
    exchange(rank, world)


@pytest.mark.parametrize("function", [_exchange, _exchange_without_gloo])
def test_parameters_buffers_and_gradients_travel_on_the_device_together(function: Any) -> None:
    run_ranks(function, 3)


@on_device
def _send(rank: int, world: int, shard: str) -> tuple[dict[bool, int], int]:
    """The bytes of reductions and gathers in an iteration, and those of the parameters."""
    # Sizes that no number of ranks divides. (Parameters begin at aligned places, which is much of smaller ones.)
    model = nn.Sequential(*(nn.Linear(61, 61, bias=False) for _ in range(6))).double().to(device())
    optimizer = sharded(model, bucket_cap_mb=0.06, shard=shard)
    batch = torch.ones(3, 61, dtype=torch.float64, device=device())
    for _ in range(2):
        optimizer.zero_grad()
        with simulated.tracing() as log:
            model(batch).square().mean().backward()
            optimizer.step()
    sent = Counter[bool]()
    for entry in log.entries:
        if entry.kind == "collective":
            sent["reduce_scatter" in entry.name] += entry.bytes
    return sent, nbytes(model.parameters())


@pytest.mark.parametrize("shard", ["element", "tensor"])
def test_padding_is_at_most_a_twentieth_of_what_is_sent(shard: str) -> None:
    for sent, size in run_ranks(_send, 3, shard):
        for reduces in (True, False):
            assert size <= sent[reduces] <= 1.05 * size, (sent, size)


class Flat(torch.optim.SGD):
    """Steps with one kernel for all parameters, so that what is counted is ours."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                torch._foreach_sub_(params, [param.grad for param in params], alpha=0.1)


class Many(nn.Module):
    """Parameters of one size, as many as one wants."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(numel) for _ in range(count))

    def forward(self, factor: Tensor) -> Tensor:
        return torch.stack([weight.sum() for weight in self.weights]).sum() * factor


@on_device
def _launch(rank: int, world: int, mode: str) -> tuple[list[tuple[int, Counter[str]]], list[int]]:
    """For few parameters and for many: how many buckets, and the kernels of clipping and a step.

    And how often the host waited while gradients were clipped: usually, and if they must be finite.
    """
    found = []
    for count, numel in ((20, 800), (80, 200)):
        model = Many(count, numel).to(device())
        called, optimizer = train_in(mode, model, Flat, {"lr": 0.1}, cap_mb=0.02)
        waits = []
        for checks in (True, False, True):
            optimizer.zero_grad()
            called(torch.ones((), device=device())).backward()
            with simulated.tracing() as log, host_reads() as reads:
                optimizer.clip_grad_norm_(1e9, error_if_nonfinite=checks)
                optimizer.step()
            waits.append(len(reads))
        found.append((len(optimizer.layout.buckets), log.kernels))
    return found, waits[1:]


@pytest.mark.parametrize("mode", OWN_STEP)
def test_clipping_and_stepping_take_as_many_kernels_for_many_parameters_as_for_few(mode: str) -> None:
    """Packing, unpacking, norms and scaling are calls over lists. (60 parameters more would be 60 kernels more.)"""
    for ((buckets, few), (as_many, many)), waits in run_ranks(_launch, 2, mode):
        assert buckets == as_many > 1
        assert many.total() <= few.total() + 2 * buckets, many - few
        assert waits == [0, 1]  # whoever wants finite norms pays with one read, and nobody else
