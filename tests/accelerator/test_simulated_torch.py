"""The simulated device as torch sees it. Its own code, which is right on CUDA, must pass here."""

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


@on_device
def _parameters_stay_the_same_objects_and_views_share_memory(rank: int, world: int) -> None:
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    model, kept = nn.Linear(3, 2), []
    kept += model.parameters()
    kept[0].grad = torch.ones(2, 3)
    model.to("sim")
    assert [one is other for one, other in zip(kept, model.parameters(), strict=True)] == [True, True]
    assert kept[0].grad.device == torch.device("sim:0")
    assert torch.ones(1, device="sim:1").device.index == 1

    base = torch.arange(12, device="sim").view(3, 4)
    base[1:, ::2].fill_(7)
    assert base.t().tolist() == [[0, 7, 7], [1, 5, 9], [2, 7, 7], [3, 7, 11]]
    resized = torch.empty(0, device="sim")
    torch.cat([torch.ones(2, device="sim"), torch.zeros(3, device="sim")], out=resized)
    assert resized.tolist() == [1, 1, 0, 0, 0]
    pairs = torch.view_as_real(torch.zeros(2, dtype=torch.complex64, device="sim"))
    assert pairs.add_(1).device.type == "sim"
    with pytest.raises(TypeError):  # its memory is not the CPU's
        torch.ones(2, device="sim").numpy()
    for other in ("cpu", "sim:1"):
        with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
            torch.ones(2, device="sim").add_(torch.ones(2, device=other))
    assert (torch.ones(1, device="sim") + torch.tensor(1.0)).tolist() == [2.0]


def test_what_is_missing_to_build_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulated.missing() == ""
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert simulated.missing() == "a C++ compiler (no-such-compiler)"


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
def _autocast_grad_scaler_and_aot_eager_work(rank: int, world: int) -> None:
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


@pytest.mark.parametrize(
    "rule",
    [
        _parameters_stay_the_same_objects_and_views_share_memory,
        _autocast_grad_scaler_and_aot_eager_work,
    ],
)
def test_the_device_keeps_the_rule(rule: Any) -> None:
    run_ranks(rule, 1, fresh=True)
