"""Steps on the device: the weights of the CPU, no race, no host read, and gathers beside the updates."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm.streams import Mark
from tests.accelerator import devices, simulated
from tests.accelerator.devices import (
    DEVICE,
    device,
    host_reads,
    module,
    on_accelerator_only,
    on_device,
    run_ranks,
    simulation_only,
    sizes,
)

CAP = 1e-3  # MiB: buckets of a few parameters
STEPS = 5


class Model(nn.Module):
    """Parameters of sizes that no number of ranks divides, in two dtypes, on one or two devices."""

    def __init__(self, first: torch.device | str, second: torch.device | str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(7, 13), nn.Linear(13, 11), nn.Linear(11, 5)]).double()
        self.scale = nn.Parameter(torch.rand(5, 3))  # float32
        self.first, self.second = torch.device(first), torch.device(second)
        self.layers.to(first)
        self.scale.data = self.scale.data.to(second)

    def forward(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        return batch.to(self.second) @ self.scale.double()


def batches(place: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(6, 7, dtype=torch.float64, generator=generator).to(place) for _ in range(12)]


def groups_of(model: Model) -> list[dict[str, Any]]:
    return [
        {"params": [model.layers[0].weight, model.layers[2].weight, model.scale]},
        {"params": [model.layers[0].bias, *model.layers[1].parameters(), model.layers[2].bias], "lr": 3e-3},
    ]


def train(model: Model, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> list[Tensor]:
    data = batches(model.first)
    for step in range(steps):
        optimizer.zero_grad()
        model.layers[1].weight.requires_grad_(step not in (2, 3))
        model(data[step]).square().mean().backward()  # the same on every rank, as DDP leaves gradients
        optimizer.step()
    return [param.detach().cpu() for param in model.parameters()]


def sharded(model: Model, **settings: Any) -> ZeroRedundancyOptimizer:
    options = {"lr": 1e-2, "weight_decay": 0.1, "bucket_cap_mb": CAP} | settings
    return ZeroRedundancyOptimizer(groups_of(model), options.pop("kind", torch.optim.AdamW), **options)


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"parameters_as_bucket_view": True},
    "whole": {"shard": "tensor"},
    "whole, views": {"shard": "tensor", "parameters_as_bucket_view": True},
    "lazy": {"lazy_gather": True},
    "lazy, views": {"lazy_gather": True, "parameters_as_bucket_view": True},
    "one bucket": {"bucket_cap_mb": 25},
    "whole, one bucket": {"shard": "tensor", "bucket_cap_mb": 25},
    "capturable": {"capturable": True},
    "fused": {"fused": True},
}


def train_in_all_modes(rank: int, world: int) -> None:
    here = device()
    for second in (here, devices.second_device()) if devices.has_two(world) else (here,):
        for mode, settings in MODES.items():
            for seed in (1, 2) if mode in ("plain", "lazy") else (1,):
                devices.seed(seed)
                model = Model(here, second)
                optimizer = sharded(model, **settings)
                weights = train(model, optimizer)
                if second == here:  # (the simulated ``arange`` allocates in the order of the current device)
                    optimizer.check_replicas()
                # Other kernels than the CPU's usual ones: their oracle is the plain optimizer on the device.
                kernels = {key: settings[key] for key in ("fused", "capturable") if key in settings}
                plain = Model(here, second) if kernels or DEVICE != "sim" else Model("cpu", "cpu")
                expected = train(plain, torch.optim.AdamW(groups_of(plain), lr=1e-2, weight_decay=0.1, **kernels))
                # The fused kernel rounds the tail of a piece otherwise (docs/design.md, Exactness): a last bit a step.
                # So may others on CUDA; a parameter is float32, and everything follows from its last bit.
                rtol, atol = (1e-5, 1e-7) if mode == "fused" or DEVICE != "sim" else (0, 0)
                torch.testing.assert_close(weights, expected, rtol=rtol, atol=atol, msg=f"{mode}, {second}, {seed}")


@on_device
def _train_in_all_modes(rank: int, world: int) -> None:
    train_in_all_modes(rank, world)


@on_accelerator_only
def _train_in_all_modes_without_gloo(rank: int, world: int) -> None:
    train_in_all_modes(rank, world)


@pytest.mark.parametrize("function", [_train_in_all_modes, _train_in_all_modes_without_gloo])
@pytest.mark.parametrize("world", sizes(1, 2, 3))
def test_every_mode_has_the_weights_of_the_cpu_and_no_race(world: int, function: Any) -> None:
    """Two dtypes, two groups, a parameter that is frozen for a while, one and two devices; whatever the seed."""
    run_ranks(function, world)


def warm(mode: str) -> tuple[ZeroRedundancyOptimizer, Callable[[int], None], Callable[[int], None]]:
    """An optimizer after two iterations, and what an iteration consists of: backward, step."""
    model = Model(device(), device())
    optimizer = sharded(model, **MODES[mode])
    data = batches(device())

    def backward(step: int) -> None:
        optimizer.zero_grad()
        model(data[step]).square().mean().backward()

    def step(number: int) -> None:
        optimizer.step()

    for number in range(2):
        backward(number)
        step(number)
    return optimizer, backward, step


def count(rank: int, world: int) -> None:
    for mode in MODES:
        optimizer, backward, step = warm(mode)
        buckets = len(optimizer.layout.buckets)
        with host_reads() as reads:
            for number in range(2, 12):
                backward(number)
                with devices.collectives() as launched:
                    step(number)
                assert launched is None or launched.total() == buckets, (mode, launched)
        assert reads == [], (mode, reads)
        with host_reads() as reads:
            optimizer.check_replicas()
        if DEVICE == "sim":
            assert [read.origin for read in reads] == ["shardstep"], (mode, reads)
        assert reads, mode  # the negative control


@on_device
def _count(rank: int, world: int) -> None:
    count(rank, world)


@on_accelerator_only
def _count_without_gloo(rank: int, world: int) -> None:
    count(rank, world)


@pytest.mark.parametrize("function", [_count, _count_without_gloo])
def test_ten_iterations_read_nothing_on_the_host_and_send_one_collective_per_bucket(function: Any) -> None:
    run_ranks(function, max(sizes(2, 3), default=2))


@on_device
def _stepping_log(rank: int, world: int, mode: str) -> tuple[simulated.Log, int]:
    optimizer, backward, step = warm(mode)
    backward(2)
    with simulated.tracing() as log:
        step(2)
    return log, len(optimizer.layout.buckets)


def _compute_stream(log: simulated.Log) -> int:
    """The one on which optimizers' kernels ran: that of the first kernel."""
    return next(entry.stream for entry in log.entries if entry.kind == "kernel")


@simulation_only
@pytest.mark.parametrize("mode", ["plain", "views", "whole"])
def test_the_stream_of_the_step_waits_for_gathers_once_and_after_its_last_update(mode: str) -> None:
    for log, buckets in run_ranks(_stepping_log, 2, mode):
        computing = _compute_stream(log)
        kernels = [place for place, one in enumerate(log.entries) if one.kind == "kernel" and one.stream == computing]
        waits = [place for place, one in enumerate(log.entries) if one.kind == "wait" and one.order == computing]
        sent = [place for place, one in enumerate(log.entries) if one.kind == "collective"]
        assert len(sent) == buckets
        # Once, which is an entry for the gather stream and one for what that waits for.
        assert waits[-1] - waits[0] == len(waits) - 1
        assert waits[0] > max(kernels)  # every update was free to run before any gather was over
        assert min(sent) < max(kernels)  # and gathers were under way by then


@simulation_only
def test_a_lazy_step_leaves_its_stream_to_the_next_forward() -> None:
    for log, buckets in run_ranks(_stepping_log, 2, "lazy"):
        computing = _compute_stream(log)
        assert not [one for one in log.entries if one.kind == "wait" and one.order == computing]
        assert sum(one.kind == "collective" for one in log.entries) == buckets


@on_device
def _touch(rank: int, world: int) -> None:
    optimizer, backward, step = warm("lazy")
    backward(2)
    step(2)
    side = module().Stream()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    side.wait_stream(module().current_stream())
    with module().stream(side):  # touched here first: both streams have to wait
        copies = [param.detach().clone() for param in params]
    here = [param.detach().clone() for param in params]
    module().current_stream().wait_stream(side)
    for one, other in zip(copies, here, strict=True):
        assert torch.equal(one, other)
    optimizer.check_replicas()
    # Nobody touches the parameters of this one, and they go: the device says if their memory is given back too early.
    other, backward, step = warm("lazy")
    backward(2)
    step(2)
    del other, backward, step
    gc.collect()
    assert torch.ones(4096, device=device()).sum().item() == 4096


def test_a_lazy_gather_is_awaited_by_the_stream_that_touches_and_the_one_that_stepped() -> None:
    run_ranks(_touch, 2)


@on_device
def _step_without_waiting(rank: int, world: int) -> str:
    _, backward, step = warm("plain")
    backward(2)
    Mark.hold = lambda self, stream: None  # type: ignore[method-assign]
    step(2)
    try:
        backward(3)
    except RuntimeError as error:
        with simulated.races_ignored():
            module().synchronize()
        return str(error)
    return ""


@simulation_only
def test_a_step_that_does_not_wait_for_its_gathers_is_caught() -> None:
    """The negative control of this file."""
    for error in run_ranks(_step_without_waiting, 2):
        assert "A race on the simulated device" in error
