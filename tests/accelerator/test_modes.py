"""Every mode has the weights of DDP with the plain optimizer, on the device: the core of ``make test-gpu``.

The differential harness (``tests/differential``) says far more, on the simulated device. Here is what it has not: GPUs,
groups without a backend for the CPU, the kernels that a user may ask for.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from tests.accelerator import devices
from tests.accelerator.devices import DEVICE, device, on_accelerator_only, on_device, ranks, run_ranks, same
from tests.accelerator.modes import MODES, STEP_IN_BACKWARD, clone_weights, train_in
from tests.accelerator.training import SUMMED_OTHERWISE, loss_of, on_streams
from tests.differential.cases import run
from tests.differential.configurations import Configuration
from tests.differential.programs import Backward, Clip, Loop, Step, ZeroGrad

WORLD = ranks(3)
STEPS = 8
KERNELS: dict[str, dict[str, Any]] = {
    "usual": {},
    "fused": {"fused": True},
    "capturable": {"capturable": True, "foreach": True, "lr": "tensor"},
}


def train(side: str, rank: int, mode: str, kernels: str, unused: bool) -> tuple[list[Tensor], list[str]]:
    """Weights, and where our code made the host wait. ``side``: the mode, or "ddp", which does as it does.

    Two branches on streams of their own; gradients accumulate, are clipped, and are scaled.
    """
    options = {"lr": 1e-2, "weight_decay": 0.1, **KERNELS[kernels]}
    if options["lr"] == "tensor":
        options["lr"] = torch.tensor(1e-2, dtype=torch.float64, device=device())
    model = on_streams(device())
    called, optimizer = train_in(side, model, torch.optim.AdamW, options, find_unused=unused)
    no_sync = getattr(called, "no_sync", getattr(optimizer, "no_sync", None))
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=2, enabled=mode not in STEP_IN_BACKWARD)

    def backward(number: int, sync: bool = True) -> None:
        uses_extra = not unused or number % 3 == 0 or (number % 3 == 1 and rank == 0)
        with nullcontext() if sync else no_sync():
            scaler.scale(loss_of(called, number, rank, uses_extra=uses_extra)).backward()

    def iterate(step: int) -> None:
        optimizer.zero_grad()
        if step % 3 == 1:
            backward(100 + step, sync=False)
        backward(step)
        if mode not in STEP_IN_BACKWARD and step % 3 != 2:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()

    for step in range(3):
        iterate(step)
    with devices.host_reads() as reads:
        for step in range(3, STEPS):
            iterate(step)
    return clone_weights(model), devices.own_reads(reads)


def compare(rank: int, mode: str, cases: list[tuple[int, str, bool]]) -> None:
    for seed, kernels, unused in cases:
        devices.seed(seed)
        expected, _ = train("ddp", rank, mode, kernels, unused)
        weights, reads = train(mode, rank, mode, kernels, unused)
        same(weights, expected, SUMMED_OTHERWISE, f"{kernels}, seed {seed}, unused {unused}")
        assert unused or reads == [], reads


@on_device
def _train(rank: int, world: int, mode: str) -> None:
    compare(rank, mode, [(1, "usual", False), (2, "usual", True), (3, "fused", False), (1, "capturable", False)])


@on_accelerator_only
def _train_without_gloo(rank: int, world: int, mode: str) -> None:
    compare(rank, mode, [(1, "usual", False), (2, "usual", True)])


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_has_the_weights_of_ddp_and_never_makes_the_host_wait(mode: str) -> None:
    run_ranks(_train, WORLD, mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_group_that_serves_the_accelerator_only_is_enough(mode: str) -> None:
    run_ranks(_train_without_gloo, ranks(2), mode)


@on_device
def _overflow(rank: int, world: int) -> list[Tensor]:
    found = []
    for dtype in (torch.float16, torch.bfloat16):
        model = torch.nn.Linear(600, 1, bias=False, dtype=dtype, device=device())
        torch.nn.init.zeros_(model.weight)
        _, optimizer = train_in("shard_gradients", model, torch.optim.SGD, {"lr": 1.0})
        largest = torch.full((1, 600), 65504.0 / (1 + rank % 2), dtype=dtype, device=device())
        (model.weight * largest).sum().backward()
        optimizer.step()
        found.append(model.weight.detach().float().cpu())
    return found


def test_means_that_float16_can_hold_do_not_overflow_on_the_way() -> None:
    expected = -sum(65504.0 / (1 + rank % 2) for rank in range(WORLD)) / WORLD
    for half, brain in run_ranks(_overflow, WORLD):  # a few roundings of 11 and 8 bits
        torch.testing.assert_close(half, torch.full_like(half, expected), rtol=4 * 2.0**-11, atol=0)
        torch.testing.assert_close(brain, torch.full_like(brain, expected), rtol=4 * 2.0**-8, atol=0)


@devices.simulation_only
def test_replicas_of_a_mesh_are_summed_on_the_device() -> None:
    config = Configuration(mode="sharded", ranks=4, group="mesh replicated", device="sim", cap=0.0003)
    run(config, (Loop(4), ZeroGrad(), Backward(), Clip(), Step()))
