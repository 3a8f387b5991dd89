"""The simulated device itself: what torch and the other tests rely on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.accelerator import simulated
from tests.accelerator.simulated import on_device
from tests.accelerator.training import OPTIMIZERS, loss_of, small_model
from tests.harness import run_ranks


@on_device
def _be_a_device(rank: int, world: int) -> None:
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


def test_parameters_stay_the_same_objects_and_views_share_memory() -> None:
    run_ranks(_be_a_device, 1, fresh=True)


@on_device
def _train_on_both(rank: int, world: int) -> None:
    for kind, options in OPTIMIZERS.values():
        for foreach in (False, True):
            outcomes = []
            for place in ("cpu", "sim"):
                model = small_model().to(place)
                optimizer = kind(model.parameters(), **options, foreach=foreach)
                for step in range(3):
                    optimizer.zero_grad()
                    loss_of(model, step).backward()
                    optimizer.step()
                outcomes.append([param.detach().cpu() for param in model.parameters()])
            assert all(map(torch.equal, *outcomes))


def test_the_model_of_these_tests_has_the_same_bits_on_both_devices() -> None:
    run_ranks(_train_on_both, 1, fresh=True)


@on_device
def _communicate(rank: int, world: int) -> None:
    mine = torch.full((4,), float(rank + 1), device="sim")
    dist.all_reduce(mine)
    assert mine.tolist() == [sum(range(1, world + 1))] * 4
    rows = torch.empty(world, 2, device="sim")
    dist.all_gather_into_tensor(rows.view(-1), torch.full((2,), float(rank), device="sim"))
    assert rows[:, 0].tolist() == list(range(world))
    part = torch.empty(2, device="sim")
    dist.reduce_scatter_tensor(part, torch.arange(2.0 * world, device="sim"))
    assert part.tolist() == [2 * rank * world, (2 * rank + 1) * world]
    future = dist.all_reduce(torch.ones(1, device="sim"), async_op=True).get_future()
    assert future.wait()[0].device.type == "sim"
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("sim"))
    with pytest.raises(RuntimeError, match="simccl expects tensors of the simulated device but got cpu"):
        backend.allreduce([torch.ones(1)]).wait()


def test_its_process_group_carries_its_tensors_and_refuses_others() -> None:
    run_ranks(_communicate, 2, fresh=True)


def test_what_is_missing_to_build_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulated.missing() == ""
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert simulated.missing() == "a C++ compiler (no-such-compiler)"
