"""What the capture of a CUDA graph forbids, as the simulated device knows the rules. Nothing was captured on CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.accelerator import simulated
from tests.accelerator.modes import MODES, train_in
from tests.accelerator.simulated import EarlyFree, on_device
from tests.accelerator.training import small_model
from tests.harness import run_ranks

OWN_STEP = ("default", "views", "lazy")  # the others step in backward, or wait for reductions that began there


def _warm(mode: str) -> tuple[Any, Any]:
    """The backward of an iteration, and its optimizer, after four of them."""
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
    return backward, optimizer


@on_device
def _step(rank: int, world: int, mode: str) -> list[str]:
    backward, optimizer = _warm(mode)
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


@on_device
def _iterations(rank: int, world: int, mode: str) -> list[EarlyFree]:
    backward, optimizer = _warm(mode)
    with simulated.early_frees() as frees:
        for _ in range(5):
            backward()
            optimizer.step()
        optimizer.wait_for_parameters()
    return [one for one in frees if any("/shardstep/" in line for line in (one.made_at, one.use, one.freed_at))]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_no_memory_is_freed_before_its_stream_has_waited_for_its_users(mode: str, world: int) -> None:
    """So nothing needs ``record_stream``, also if its stream does not go on in the graph."""
    for frees in run_ranks(_iterations, world, mode, fresh=True):
        assert frees == []


# --- the device's own rules -------------------------------------------------------------------------------------------


@on_device
def _free_memory_of_a_side_stream(rank: int, world: int, how: str) -> list[EarlyFree]:
    sim = torch.get_device_module("sim")
    side, default = sim.Stream(), sim.current_stream()
    with simulated.early_frees() as frees:
        with sim.stream(side):
            made = torch.ones(1000, device="sim")
        default.wait_stream(side)
        total = made.sum()
        if how == "record_stream":
            made.record_stream(default)
        if how == "wait":
            side.wait_stream(default)
        if how == "host":
            total.item()
        del made  # the side stream does nothing afterwards, so the race detector has nothing to say
    return frees


@pytest.mark.parametrize("how", ["record_stream", "wait", "host"])
def test_memory_of_a_side_stream_may_be_freed_when_its_users_are_known_to_it(how: str) -> None:
    assert run_ranks(_free_memory_of_a_side_stream, 1, how, fresh=True) == [[]]


def test_memory_of_a_side_stream_that_is_freed_without_record_stream_is_noted() -> None:
    ((free,),) = run_ranks(_free_memory_of_a_side_stream, 1, "forget", fresh=True)
    assert free.stream.startswith("side")
    assert 'aten::sum reads on stream "default"' in free.use
    assert "_free_memory_of_a_side_stream" in free.made_at


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


def test_a_side_stream_that_is_forked_and_joined_may_be_captured() -> None:
    assert run_ranks(_capture, 1, "joined", fresh=True) == [[]]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("host", "the host waits (aten::_local_scalar_dense)"),
        ("outside", 'on stream "side 2", which is not captured'),
        ("allocation outside", 'an allocation on stream "side 2", which is not captured'),
        ("event before", "recorded outside of the capture"),
        ("unjoined", 'stream "side 2" is captured, and not waited for in the end'),
    ],
)
def test_what_capture_forbids_is_noted(how: str, told: str) -> None:
    ((forbidden, *_),) = run_ranks(_capture, 1, how, fresh=True)
    assert told in forbidden
