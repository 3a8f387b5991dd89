"""How much is launched: kernels per bucket and not per parameter, means in the reduction, little padding, one read."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import torch_versions
from tests.accelerator import simulated
from tests.accelerator.devices import (
    device,
    host_reads,
    on_device,
    run_ranks,
    simulation_only,
    sizes,
)
from tests.accelerator.modes import MODES, train_in
from tests.accelerator.training import small_model
from tests.ranks.test_python_work import Flat

OWN_STEP = [mode for mode in MODES if mode not in ("hook", "interleaved", "scattering")]


class Many(nn.Module):
    """Parameters of one size, as many as one wants."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(numel) for _ in range(count))

    def forward(self, factor: Tensor) -> Tensor:
        return torch.stack([weight.sum() for weight in self.weights]).sum() * factor


@on_device
def _launch(rank: int, world: int, mode: str) -> list[tuple[int, Counter[str]]]:
    """For few parameters and for many: how many buckets, and the kernels of clipping and a step."""
    found = []
    for count, numel in ((20, 800), (80, 200)):
        model = Many(count, numel).to(device())
        called, optimizer = train_in(mode, model, Flat, {"lr": 0.1}, cap_mb=0.02)
        for _ in range(3):
            optimizer.zero_grad()
            called(torch.ones((), device=device())).backward()
            with simulated.tracing() as log:
                optimizer.clip_grad_norm_(1e9)
                optimizer.step()
        found.append((len(optimizer.layout.buckets), log.kernels))
    return found


@simulation_only
@pytest.mark.parametrize("mode", OWN_STEP)
def test_clipping_and_stepping_take_as_many_kernels_for_many_parameters_as_for_few(mode: str) -> None:
    """Packing, unpacking, norms and scaling are calls over lists. (60 parameters more would be 60 kernels more.)"""
    for (buckets, few), (as_many, many) in run_ranks(_launch, 2, mode):
        assert buckets == as_many > 1
        assert many.total() <= few.total() + 2 * buckets, many - few


def reduce_ops() -> list[Any]:
    """By which operation things are reduced from now on."""
    ops: list[Any] = []

    def noting(reduce: Any) -> Any:
        def noted(out: Tensor, source: Any, op: Any, **others: Any) -> Any:
            ops.append(op)
            return reduce(out, source, op, **others)

        return noted

    torch_versions.reduce_scatter = noting(torch_versions.reduce_scatter)
    dist.reduce_scatter = noting(dist.reduce_scatter)
    return ops


@on_device
def _send(rank: int, world: int, shard: str) -> tuple[list[tuple[str, int]], int, int]:
    """The collectives of an iteration with their bytes, the bytes of the parameters, and how many means were made."""
    # Sizes that no number of ranks divides. (Parameters begin at aligned places, which is much of smaller ones.)
    model = nn.Sequential(*(nn.Linear(61, 61, bias=False) for _ in range(6))).double().to(device())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, shard_gradients=True, bucket_cap_mb=0.06, shard=shard
    )
    batch, ops = torch.ones(3, 61, dtype=torch.float64, device=device()), reduce_ops()
    for _ in range(2):
        optimizer.zero_grad()
        ops.clear()
        with simulated.tracing() as log:
            model(batch).square().mean().backward()
            optimizer.step()
    sent = [(entry.name, entry.bytes) for entry in log.entries if entry.kind == "collective"]
    return sent, sum(param.nbytes for param in model.parameters()), ops.count(dist.ReduceOp.AVG)


@simulation_only
@pytest.mark.parametrize("shard", ["element", "tensor"])
@pytest.mark.parametrize("world", sizes(2, 3))
def test_means_are_made_by_the_reduction_and_padding_is_at_most_a_twentieth(world: int, shard: str) -> None:
    for sent, nbytes, means in run_ranks(_send, world, shard):
        reductions = [(name, size) for name, size in sent if "reduce_scatter" in name]
        gathers = [(name, size) for name, size in sent if "reduce_scatter" not in name]
        assert means == len(reductions) > 1
        for kind in (reductions, gathers):
            assert sum(size for _, size in kind) <= 1.05 * nbytes, (kind, nbytes)


@on_device
def _clear(rank: int, world: int, mode: str) -> list[tuple[Counter[str], Counter[str], int]]:
    """Of the first and the second zero_grad of an iteration: collectives, kernels, and how often the host waited."""
    model = small_model().to(device())
    called, optimizer = train_in(mode, model, torch.optim.SGD, {"lr": 0.1})
    batch = torch.ones(3, 7, dtype=torch.float64, device=device())
    found: list[tuple[Counter[str], Counter[str], int]] = []
    for _ in range(4):
        found.clear()
        for _ in range(2):
            with simulated.collectives() as sent, simulated.tracing() as log, host_reads() as reads:
                optimizer.zero_grad()
            found.append((sent, log.kernels, len(reads)))
        with simulated.collectives() as sent:
            called(batch).square().mean().backward()
            optimizer.step()
        found.append((sent, Counter(), 0))
    return found


@simulation_only
@pytest.mark.parametrize("mode", MODES)
def test_zero_grad_launches_nothing_however_often_it_is_called(mode: str) -> None:
    for first, second, iteration in run_ranks(_clear, 2, mode):
        assert first == second == (Counter(), Counter(), 0)
        assert iteration[0].total() > 1  # it counts something


@on_device
def _clip(rank: int, world: int, mode: str) -> list[int]:
    """How often the host waits while gradients are clipped: usually, and if they must be finite."""
    model = small_model().to(device())
    called, optimizer = train_in(mode, model, torch.optim.SGD, {"lr": 0.1})
    batch = torch.ones(3, 7, dtype=torch.float64, device=device())
    counts = []
    for checks in (False, False, False, True):
        optimizer.zero_grad()
        called(batch).square().mean().backward()
        with host_reads() as reads:
            optimizer.clip_grad_norm_(1.0, error_if_nonfinite=checks)
        counts.append(len(reads))
        optimizer.step()
    return counts[2:]


@pytest.mark.parametrize("mode", OWN_STEP)
def test_whoever_wants_finite_norms_pays_with_one_read_and_nobody_else(mode: str) -> None:
    for counts in run_ranks(_clip, max(sizes(1, 2)), mode):
        assert counts == [0, 1]
