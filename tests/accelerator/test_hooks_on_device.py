"""DDP's hooks that step inside backward, under real DDP on the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from shardstep import (
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
)
from tests.accelerator import devices, simulated
from tests.accelerator.devices import (
    DEVICE,
    device,
    host_reads,
    on_accelerator_only,
    on_device,
    run_ranks,
    same,
    simulation_only,
    sizes,
)

HOOKS = {"last": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}
# DDP divides before it adds and the oracle after: a few roundings of float64 in numbers of the order of 1.
SUMMED_OTHERWISE = 1e-12
SETTINGS: list[dict[str, Any]] = [{}, {"shard": "tensor"}, {"parameters_as_bucket_view": True}]
DDP: dict[str, dict[str, Any]] = {
    "plain": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "unused, view": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(7, 13), nn.Linear(13, 11), nn.Linear(11, 9), nn.Linear(9, 3)])
        self.extra = nn.Parameter(torch.ones(3))  # not used by everybody, and not always
        self.never = nn.Parameter(torch.ones(2))
        self.double()

    def forward(self, batch: Tensor, extra: bool) -> Tensor:
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        return batch * self.extra if extra else batch


def model_for(kind: str) -> Model:
    model = Model()
    if "unused" not in kind and kind != "static":
        model.never.requires_grad_(False)
    return model


def uses_extra(kind: str, step: int, rank: int) -> bool:
    return step % 3 != 1 and (rank == 0 or step > 3) if "unused" in kind else True


def batches(rank: int, place: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, 7, dtype=torch.float64, generator=generator).to(place) for _ in range(14)]


def train_plainly(kind: str, world: int, steps: int) -> list[Tensor]:
    """The oracle: one process, the CPU, the mean of all ranks' losses."""
    model, data = model_for(kind), [batches(rank, "cpu") for rank in range(world)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        losses = [model(data[r][step], uses_extra(kind, step, r)).square().mean() for r in range(world)]
        (sum(losses) / world).backward()  # type: ignore[union-attr]
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def wrapped(kind: str, hook: str, **settings: Any) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    model = model_for(kind).to(device())
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-3, **DDP[kind])  # type: ignore[arg-type]
    options = {"lr": 1e-2, "weight_decay": 0.1, "bucket_cap_mb": 1e-3} | settings
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, **options)
    ddp.register_comm_hook(None, HOOKS[hook](allreduce_hook, ddp, optimizer))
    return ddp, optimizer


def train(kind: str, hook: str, rank: int, steps: int, **settings: Any) -> list[Tensor]:
    ddp, optimizer = wrapped(kind, hook, **settings)
    data = batches(rank, DEVICE)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(data[step], uses_extra(kind, step, rank)).square().mean().backward()
        optimizer.step()
    return [param.detach().cpu() for param in ddp.module.parameters()]


def train_in_all_ways(rank: int, world: int) -> None:
    for kind in DDP:
        expected = train_plainly(kind, world, 6)
        for hook in HOOKS:
            for settings in (
                ({}, {"shard": "tensor"}, {"parameters_as_bucket_view": True}) if kind == "plain" else ({},)
            ):
                for seed in (1, 2) if kind == "plain" else (1,):
                    devices.seed(seed)
                    weights = train(kind, hook, rank, 6, **settings)
                    same(weights, expected, SUMMED_OTHERWISE, f"{kind}, {hook}, {settings}, {seed}")


@on_device
def _train_in_all_ways(rank: int, world: int) -> None:
    train_in_all_ways(rank, world)


@on_accelerator_only
def _train_in_all_ways_without_gloo(rank: int, world: int) -> None:
    train_in_all_ways(rank, world)


@pytest.mark.parametrize("function", [_train_in_all_ways, _train_in_all_ways_without_gloo])
@pytest.mark.parametrize("world", sizes(1, 2, 3))
def test_both_hooks_have_the_weights_of_one_process_and_no_race(world: int, function: Any) -> None:
    run_ranks(function, world)


def reads_of(kind: str, hook: str, rank: int) -> int:
    """Ten iterations, after the second one. ``hook`` empty: DDP alone."""
    model = model_for(kind).to(device())
    if hook:
        ddp, optimizer = wrapped(kind, hook)
    else:
        ddp = DistributedDataParallel(model, bucket_cap_mb=1e-3, **DDP[kind])  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(ddp.parameters())  # type: ignore[assignment]
    data = batches(rank, DEVICE)

    def iterate(step: int) -> None:
        optimizer.zero_grad()
        ddp(data[step], True).square().mean().backward()
        optimizer.step()

    iterate(0)
    iterate(1)
    with host_reads() as reads:
        for step in range(2, 12):
            iterate(step)
    return len(reads)


def own_reads(kinds: Iterable[str], rank: int) -> dict[tuple[str, str], int]:
    """What the hooks read besides what DDP itself does: it copies to the host which parameters were used."""
    return {(kind, hook): reads_of(kind, hook, rank) - reads_of(kind, "", rank) for kind in kinds for hook in HOOKS}


@on_device
def _reads(rank: int, world: int) -> dict[tuple[str, str], int]:
    assert reads_of("plain", "", rank) == 0
    return own_reads(DDP, rank)


@on_accelerator_only
def _reads_without_gloo(rank: int, world: int) -> dict[tuple[str, str], int]:
    return own_reads(("plain", "static", "unused"), rank)


def test_ten_iterations_read_nothing_on_the_host() -> None:
    for counts in run_ranks(_reads, 2):
        assert set(counts.values()) == {0}, counts


def test_without_a_backend_for_the_cpu_unused_parameters_cost_one_read_per_iteration_and_a_static_graph_none() -> None:
    for counts in run_ranks(_reads_without_gloo, 2):
        for (kind, _), count in counts.items():
            if kind == "unused" and DEVICE != "sim":
                assert count <= 10, counts  # CUDA does not warn of an event that is waited for
            else:
                assert count == (10 if kind == "unused" else 0), counts


@on_device
def _log_of_backward(rank: int, world: int) -> tuple[simulated.Log, int]:
    ddp, optimizer = wrapped("plain", "interleaved")
    data = batches(rank, DEVICE)
    for step in range(3):
        optimizer.zero_grad()
        ddp(data[step], True).square().mean().backward()
    loss = ddp(data[3], True).square().mean()
    with simulated.tracing() as log:
        loss.backward()
    return log, len(optimizer.layout.buckets)


@simulation_only
def test_the_interleaved_hook_leaves_backwards_stream_alone_until_its_last_kernel() -> None:
    for log, buckets in run_ranks(_log_of_backward, 2):
        computing = next(one.stream for one in log.entries if one.kind == "kernel")
        sent = [place for place, one in enumerate(log.entries) if one.kind == "collective"]
        assert len(sent) > buckets  # DDP's reductions, and our gathers
        waits = [place for place, one in enumerate(log.entries) if one.kind == "wait" and one.order == computing]
        # Backward's matrix products, all of which are launched before its stream waits for anything of ours.
        products = [
            place
            for place, one in enumerate(log.entries)
            if one.kind == "kernel" and one.stream == computing and "mm" in one.name
        ]
        assert len(products) >= 7
        assert waits
        assert not [place for place in waits if min(sent) < place < max(products)]
        # A bucket was gathered before backward was over: the step is interleaved with it.
        gathers = [
            place for place in sent if "gather" in log.entries[place].name or "broadcast" in log.entries[place].name
        ]
        assert min(gathers) < max(products)


@on_device
def _join(rank: int, world: int, seed: int) -> list[Tensor]:
    devices.seed(seed)
    model = model_for("plain").to(device())
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-3)  # type: ignore[arg-type]
    options = {"lr": 1e-2, "weight_decay": 0.1, "bucket_cap_mb": 1e-3}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    data = batches(rank, DEVICE)
    # (DDP starts an all-reduce in every forward of a Join context whose result, memory and work it drops at once. The
    # simulated backend keeps the memory, as NCCL does.)
    with Join([ddp, optimizer], divide_by_initial_world_size=False):
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            ddp(data[step], True).square().mean().backward()
            optimizer.step()
    optimizer.check_replicas()
    return [param.detach().cpu() for param in model.parameters()]


def _joined_oracle(world: int) -> list[Tensor]:
    model, data = model_for("plain"), [batches(rank, "cpu") for rank in range(world)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(3 + 2 * (world - 1)):
        here = [rank for rank in range(world) if step < 3 + 2 * rank]
        optimizer.zero_grad()
        (sum(model(data[r][step], True).square().mean() for r in here) / len(here)).backward()  # type: ignore[union-attr]
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("world", sizes(1, 2, 3))
def test_a_rank_without_inputs_is_lent_gradients_on_the_device(world: int, seed: int) -> None:
    expected = _joined_oracle(world)
    for weights in run_ranks(_join, world, seed):
        same(weights, expected, SUMMED_OTHERWISE)


class _FailsLate(torch.optim.SGD):
    """Raises after it has updated a bucket, if told to."""

    calls_left: int | None = None

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left == 0:
                raise RuntimeError("on purpose")
        return result


@on_device
def _fail_in_backward(rank: int, world: int, inner: str) -> None:
    ddp = DistributedDataParallel(model_for("plain").to(device()), bucket_cap_mb=1e-3)  # type: ignore[arg-type]
    params = ddp.module.parameters()
    optimizer = ZeroRedundancyOptimizer(params, _FailsLate, overlap_with_ddp=True, bucket_cap_mb=1e-3, lr=1e-2)
    reduces = {"allreduce": allreduce_hook, "reduce_scatter": reduce_scatter_hook}[inner]
    ddp.register_comm_hook(None, hook_with_zero_step_interleaved(reduces, ddp, optimizer))
    data = batches(rank, DEVICE)
    for step in range(3):
        ddp(data[step], True).square().mean().backward()
    optimizer.optim.calls_left = 1  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="on purpose"):
        ddp(data[3], True).square().mean().backward()
    for param in ddp.module.parameters():
        assert torch.isfinite(param.detach().cpu()).all()  # a race, if something still writes to it


@pytest.mark.parametrize("inner", ["allreduce", "reduce_scatter"])
def test_parameters_can_be_read_after_an_update_failed_inside_backward(inner: str) -> None:
    run_ranks(_fail_in_backward, 2, inner)
