"""What the user says about kernels reaches the local optimizer, in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.accelerator.devices import DEVICE, device, host_reads, on_device, run_ranks, same, sizes
from tests.accelerator.modes import MODES, clone_weights, train_in
from tests.accelerator.training import loss_of, small_model

# Sums of three ranks have another order than the oracle's mean: some roundings of float64 in numbers of the order of 1.
SUMMED_OTHERWISE = 1e-12
OPTIONS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True, "foreach": True},
    "tensor lr": {"capturable": True, "foreach": True, "lr": "tensor"},
}
STEPS = 3


def _options(name: str, where: torch.device) -> dict[str, Any]:
    options = {"lr": 1e-2, "weight_decay": 0.1, **OPTIONS[name]}
    if options["lr"] == "tensor":
        options["lr"] = torch.tensor(1e-2, dtype=torch.float64, device=where)
    return options


def _plainly(name: str, world: int, where: torch.device) -> list[torch.Tensor]:
    """The oracle: the plain optimizer on the batches of all ranks.

    On the CPU; but for capturable kernels, which torch has on accelerators only and which round differently (they take
    powers of the betas in float32).
    """
    model = small_model().to(where)
    optimizer = torch.optim.AdamW(model.parameters(), **_options(name, where))
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(loss_of(model, step, part) for part in range(world)).div(world).backward()  # type: ignore[union-attr]
        optimizer.step()
    return clone_weights(model)


@on_device
def _train(rank: int, world: int, mode: str, name: str) -> Any:
    model = small_model().to(device())
    called, optimizer = train_in(mode, model, torch.optim.AdamW, _options(name, device()))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(called, step, rank).backward()
        optimizer.step()
    group = optimizer.optim.param_groups[0]
    given = {key: value for key, value in OPTIONS[name].items() if key != "lr"}
    assert {key: group[key] for key in given} == given
    places = {
        value.device.type for state in optimizer.optim.state.values() for key, value in state.items() if key == "step"
    }
    optimizer.check_replicas()
    on_host = "capturable" not in OPTIONS[name]
    return clone_weights(model), places, None if on_host else _plainly(name, world, device())


@pytest.mark.parametrize("world", sizes())
@pytest.mark.parametrize("name", list(OPTIONS))
@pytest.mark.parametrize("mode", MODES)
def test_kernels_that_the_user_asks_for_are_used_and_give_the_weights_of_the_plain_optimizer(
    mode: str, name: str, world: int
) -> None:
    results = run_ranks(_train, world, mode, name)
    for weights, places, on_device_only in results:
        same(weights, on_device_only or _plainly(name, world, torch.device("cpu")), SUMMED_OTHERWISE)
        # As in torch: the count of steps is on the device for the kernels that read it there.
        assert places <= ({"cpu"} if name == "foreach" else {DEVICE})
    assert any(places for _, places, _ in results)


@on_device
def _capturable(rank: int, world: int, mode: str) -> Any:
    model = small_model().to(device())
    called, optimizer = train_in(mode, model, torch.optim.AdamW, _options("tensor lr", device()))
    batches = [torch.randn(6, 7, dtype=torch.float64, device=device()) for _ in range(12)]
    for batch in batches[:2]:
        optimizer.zero_grad()
        called(batch).square().mean().backward()
        optimizer.step()
    with host_reads() as reads:
        for batch in batches[2:]:
            optimizer.zero_grad()
            called(batch).square().mean().backward()
            optimizer.step()
    return [str(read) for read in reads]


@pytest.mark.parametrize("world", sizes(2, 3))
@pytest.mark.parametrize("mode", MODES)
def test_an_iteration_of_a_capturable_optimizer_reads_nothing_on_the_host(mode: str, world: int) -> None:
    for reads in run_ranks(_capturable, world, mode):
        assert reads == []
