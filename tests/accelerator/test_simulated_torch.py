"""Torch's own code on the simulated device: what is right there, for CUDA, must pass here, and with few kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.accelerator import simulated
from tests.accelerator.simulated import on_device
from tests.accelerator.training import loss_of, small_model, train_plainly
from tests.harness import run_ranks


def _train(model: nn.Module, rank: int) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


@on_device
def _wrap(rank: int, world: int, how: str) -> list[torch.Tensor]:
    model = small_model().to("sim")
    if how == "FSDP2":
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor

        mesh = dist.device_mesh.init_device_mesh("sim", (world,))
        for layer in model:  # type: ignore[union-attr]
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        weights = _train(model, rank)
        return [weight.full_tensor().cpu() for weight in weights if isinstance(weight, DTensor)]
    settings = {"views": {"gradient_as_bucket_view": True}, "unused": {"find_unused_parameters": True}}
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-3, **settings.get(how, {}))  # type: ignore[arg-type]
    return [weight.cpu() for weight in _train(ddp, rank)]


@pytest.mark.parametrize("how", ["DDP", "views", "unused", "FSDP2"])
def test_ddp_and_fsdp2_train_without_a_race(how: str) -> None:
    expected, _ = train_plainly("AdamW", 3, range(2))
    for weights in run_ranks(_wrap, 2, how, fresh=True):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)  # float64; means in another order


@on_device
def _step(rank: int, world: int, options: dict[str, Any]) -> tuple[list[str], int, list[torch.Tensor]]:
    model = small_model().to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, **options)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with simulated.host_reads() as reads, simulated.tracing() as log:
            optimizer.step()
    kernels = [entry.name for entry in log.entries if entry.kind == "kernel"]
    return kernels, len(reads), [param.detach().cpu() for param in model.parameters()]


@pytest.mark.parametrize(
    ("options", "most", "tolerance"),
    [
        ({"lr": 1e-2}, 10, 1e-14),  # foreach is what it chooses by itself
        ({"lr": 1e-2, "fused": True}, 2, 1e-14),
        # Its counter of steps is a tensor of float32, and so are the corrections that are computed from it.
        ({"lr": torch.tensor(1e-2, dtype=torch.float64), "capturable": True}, 20, 1e-6),
    ],
)
def test_an_optimizer_of_torch_takes_one_kernel_per_operation_and_reads_nothing(
    options: dict[str, Any], most: int, tolerance: float
) -> None:
    ((kernels, reads, weights),) = run_ranks(_step, 1, options, fresh=True)
    assert reads == 0
    assert len(kernels) <= most  # of six parameters: a loop over them would be six times as many
    expected, _ = train_plainly("AdamW", 3)
    torch.testing.assert_close(weights, expected, rtol=0, atol=tolerance)


@on_device
def _mix(rank: int, world: int) -> None:
    model = nn.Linear(4, 4).to("sim")
    data = torch.ones(2, 4, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert model(data).dtype == torch.bfloat16
    scaler, optimizer = torch.amp.GradScaler("sim"), torch.optim.SGD(model.parameters(), lr=0.1)
    for factor, stepped in ((1.0, True), (float("inf"), False)):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(model(data).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model.weight) != stepped
    compiled = torch.compile(nn.Linear(4, 4).to("sim"), backend="aot_eager")
    compiled(data).sum().backward()
    assert compiled.weight.grad.device.type == "sim"


def test_autocast_grad_scaler_and_aot_eager_work_on_it() -> None:
    run_ranks(_mix, 1, fresh=True)


@on_device
def _log(rank: int, world: int) -> simulated.Log:
    ddp = DistributedDataParallel(small_model().to("sim"), bucket_cap_mb=1e-3)
    with simulated.tracing() as log:
        _train(ddp, rank)
    return log


def test_two_runs_launch_the_same_in_the_same_order() -> None:
    first, second = (run_ranks(_log, 2, fresh=True) for _ in range(2))
    assert len(first[0].entries) > 100
    assert [entry.kind for entry in first[0].entries].count("collective") >= 3  # one per iteration, or more
    assert first == second
