"""What the capture of a CUDA graph forbids, as the simulated device knows the rules. Nothing was captured on CUDA."""

from __future__ import annotations

import pytest
import torch

from tests.accelerator import simulated
from tests.accelerator.modes import MODES, train_in
from tests.accelerator.simulated import on_device
from tests.accelerator.training import small_model
from tests.harness import run_ranks

OWN_STEP = ("default", "views", "lazy")  # the others step in backward, or wait for reductions that began there


@on_device
def _step(rank: int, world: int, mode: str) -> list[str]:
    model = small_model().to("sim")
    lr = torch.tensor(1e-2, dtype=torch.float64, device="sim")
    options = {"lr": lr, "capturable": True, "foreach": True}
    called, optimizer = train_in(mode, model, torch.optim.AdamW, options)
    batch = torch.randn(6, 7, dtype=torch.float64, device="sim")

    def backward() -> None:
        optimizer.zero_grad()
        called(batch).square().mean().backward()

    for _ in range(4):
        backward()
        optimizer.step()
    if mode in OWN_STEP:
        backward()
    with simulated.captured() as forbidden:
        if mode not in OWN_STEP:
            backward()
        optimizer.step()
        optimizer.wait_for_parameters()  # what a lazy step leaves under way is joined inside
    return forbidden


@pytest.mark.parametrize("mode", MODES)
def test_a_step_of_a_capturable_optimizer_does_nothing_that_capture_forbids(mode: str) -> None:
    for forbidden in run_ranks(_step, 2, mode, fresh=True):
        assert forbidden == []


# --- the device's own rules -------------------------------------------------------------------------------------------


@on_device
def _capture(rank: int, world: int, how: str) -> list[str]:
    sim = torch.get_device_module("sim")
    side, default, data = sim.Stream(), sim.current_stream(), torch.ones(4, device="sim")
    with sim.stream(side):
        other = torch.ones(4, device="sim")
    before = side.record_event()
    with simulated.captured() as forbidden:
        data.add_(1)
        if how == "host":
            data.sum().item()
        elif how == "outside":
            with sim.stream(side):
                other.add_(1)
        elif how == "allocation outside":
            with sim.stream(side):
                torch.empty(4, device="sim")
        elif how == "event before":
            default.wait_event(before)
        else:
            side.wait_stream(default)
            with sim.stream(side):
                (data * 2).add_(1)
            if how == "joined":
                default.wait_stream(side)
    return forbidden


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("joined", ""),  # a side stream that is forked and joined may be captured
        ("host", "the host waits (aten::_local_scalar_dense)"),
        ("outside", 'on stream "side 2", which is not captured'),
        ("allocation outside", 'an allocation on stream "side 2", which is not captured'),
        ("event before", "recorded outside of the capture"),
        ("unjoined", 'stream "side 2" is captured, and not waited for in the end'),
    ],
)
def test_what_capture_forbids_is_noted(how: str, told: str) -> None:
    (forbidden,) = run_ranks(_capture, 1, how, fresh=True)
    assert told in forbidden[0] if told else forbidden == []
