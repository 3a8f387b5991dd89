"""Checkpoints and state dicts of what is on a device: copies run beside the computation, and nobody changes them.

The differential harness saves and resumes on the simulated device, in every mode and at other numbers of ranks.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardstep import ZeroRedundancyOptimizer, checkpoint
from shardstep.checkpoint import saving
from tests.accelerator import simulated
from tests.accelerator.devices import device, host_reads, on_device, ranks, run_ranks, same, simulation_only
from tests.accelerator.simulated import Entry, Log
from tests.accelerator.timeline import Timeline
from tests.accelerator.training import OPTIMIZERS, loss_of, small_model, train_plainly


class WithBuffer(nn.Module):
    """Its forward changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_model()
        self.register_buffer("mean", torch.zeros(7, dtype=torch.float64))

    def forward(self, data: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(data.mean(0), alpha=0.1)
        return self.net(data - self.mean)


def build(model: nn.Module, **settings: Any) -> ZeroRedundancyOptimizer:
    kind, options = OPTIMIZERS["AdamW"]
    return ZeroRedundancyOptimizer(model.parameters(), kind, **options, **settings)


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()


def values_of(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Weights, buffers and state, on the host."""
    states = [optimizer.full_state(param) for param in model.parameters()]
    state = [entry[key].cpu().clone() for entry in states for key in ("exp_avg", "exp_avg_sq")]
    return [value.cpu().clone() for value in model.state_dict().values()] + state


@contextmanager
def writing_later() -> Iterator[None]:
    """Threads begin to write at the end. (What one has waited for counts for all on the simulated device.)"""
    run, may_begin = saving.Save.run, threading.Event()
    saving.Save.run = lambda job: (may_begin.wait(), run(job))[1]  # type: ignore[method-assign]
    try:
        yield
    finally:
        may_begin.set()
        saving.Save.run = run  # type: ignore[method-assign]


def _write(how: str, model: nn.Module, optimizer: Any, before: Any) -> None:
    if how == "train":
        train(model, optimizer, 0, range(2, 4))
    elif how == "state":
        for entry in filter(None, optimizer.state.values()):  # of what this rank owns
            entry["exp_avg"].zero_()
    elif how == "sharded_state_dict":
        for entry in filter(None, optimizer.sharded_state_dict()["state"].values()):
            entry["exp_avg"].local.zero_()
    elif how == "load":
        optimizer.load_sharded_state_dict(before)
        train(model, optimizer, 0, range(1))
    else:
        optimizer.state.clear()
        made = [torch.zeros(numel, dtype=torch.float64, device=device()) for numel in range(8, 200, 3)]
        torch._foreach_add_(made, 1.0)


@on_device
def _change_after_a_save(rank: int, world: int, how: str, folder: str) -> None:
    model = WithBuffer().to(device())
    optimizer = build(model, shard_gradients=True)
    train(model, optimizer, 0, range(2))  # all ranks have one batch, and so one buffer
    before, expected = optimizer.sharded_state_dict(), values_of(model, optimizer)
    extra = {"random": torch.arange(5, device=device()), "nested": {"mean": [torch.ones(3, device=device()), 2]}}
    with writing_later():
        with host_reads() as reads:
            handle = checkpoint.save(folder, optimizer, model=model, extra=extra, asynchronous=True)
        assert reads == [], "the call only enqueues copies"
        extra["random"].zero_()
        _write(how, model, optimizer, before)
    handle.wait()
    for place in (device(), "cpu"):
        fresh = WithBuffer().to(place)
        other = build(fresh)
        found = checkpoint.load(folder, other, model=fresh)
        same(values_of(fresh, other), expected)
        assert found["random"].tolist() == [0, 1, 2, 3, 4]
        assert found["nested"]["mean"][0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("how", ["train", "state", "sharded_state_dict", "load", "clear"])
def test_whoever_writes_after_an_asynchronous_save_does_not_change_what_is_saved(how: str, tmp_path: Path) -> None:
    """And the host does not wait for the device. The copies come first: else that is a race."""
    run_ranks(_change_after_a_save, ranks(2), how, str(tmp_path / "c"))


@on_device
def _trace_after_a_save(rank: int, world: int, folder: str) -> Log:
    model = WithBuffer().to(device())
    optimizer = build(model, shard_gradients=True)
    train(model, optimizer, rank, range(2))
    optimizer.zero_grad()
    with writing_later(), simulated.tracing() as log:
        simulated.mark("save")
        handle = checkpoint.save(folder, optimizer, model=model, asynchronous=True)
        simulated.mark("forward")
        loss_of(model, 2, rank).backward()
        simulated.mark("step")
        optimizer.step()
        simulated.mark("end")
    handle.wait()
    return log


@simulation_only
def test_forward_and_backward_run_while_the_state_is_copied_and_the_step_waits(tmp_path: Path) -> None:
    logs = run_ranks(_trace_after_a_save, 2, str(tmp_path / "c"))

    def duration(entry: Entry) -> float:
        return 50.0 if entry.kind == "copy" and "/shardstep/" in entry.line else 1.0

    timeline = Timeline(logs, duration, launching=0.0)
    for rank in range(2):
        copies = timeline.of(rank, kind="copy", between=("save", "forward"))
        computed = timeline.of(rank, kind="kernel", stream="default", between=("forward", "step"))
        updated = timeline.of(rank, kind="kernel", stream="default", between=("step", "end"))
        early = [one for one in copies if one.end <= computed[0].start]  # of the model: parameters and a buffer
        assert 0 < len(early) <= len(list(small_model().parameters())) + 1
        assert computed[-1].end <= copies[-1].start, "forward and backward run beside the rest"
        assert updated[0].start >= copies[-1].end, "which the step waits for"


class Large(nn.Module):
    """Five buffers of 16 MiB with its momentum; one parameter under two names, one in another memory format."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.large = nn.Parameter(torch.randn(10 * 2**20, generator=generator))
        self.tied = self.other = nn.Parameter(torch.randn(6, 6, generator=generator))
        image = torch.randn(4, 3, 3, 3, generator=generator)
        self.image = nn.Parameter(image.contiguous(memory_format=torch.channels_last))


@on_device
def _save_large(rank: int, world: int, folder: str) -> None:
    """And to a disk that is full: the error, and so all that was there when it was raised, is kept for a while."""
    model, (kind, options) = Large().to(device()), OPTIMIZERS["SGD"]
    optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, **options)

    def step(factor: float) -> None:
        for param in model.parameters():
            param.grad = param.detach() * factor
        optimizer.step()

    step(0.5)
    saved = [param.detach().cpu().clone() for param in model.parameters()]
    checkpoint.save(f"{folder}/good", optimizer, model=model)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20 * 2**20, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match="File too large") as kept:
        checkpoint.save(f"{folder}/full", optimizer, model=model)
    step(0.25)
    del kept
    # Momentum 0.9 and lr 0.1, as the plain optimizer steps.
    stepped = [weight - 0.1 * (0.9 * 0.5 * weight / (1 - 0.05) + 0.25 * weight) for weight in saved]
    torch.testing.assert_close([param.detach().cpu() for param in model.parameters()], stepped, rtol=1e-5, atol=1e-6)
    checkpoint.load(f"{folder}/good", optimizer, model=model)
    same([param.detach() for param in model.parameters()], saved)
    assert model.tied is model.other
    momentum = [optimizer.full_state(param)["momentum_buffer"].cpu() for param in model.parameters()]
    torch.testing.assert_close(momentum, [0.5 * weight / (1 - 0.05) for weight in saved], rtol=1e-5, atol=1e-6)


def test_a_full_disk_stops_nobody_and_what_was_saved_before_is_loaded(tmp_path: Path) -> None:
    run_ranks(_save_large, 1, str(tmp_path))


@on_device
def _consolidate(rank: int, world: int) -> Any:
    model = small_model().to(device())
    optimizer = build(model)
    train(model, optimizer, 0, range(2))
    optimizer.consolidate_state_dict(to=world - 1, chunk_mb=0.0005)
    return optimizer.state_dict()["state"]


def test_state_is_collected_from_devices_in_chunks_and_lies_on_the_host() -> None:
    _, expected = train_plainly("AdamW", 2)
    found = run_ranks(_consolidate, ranks())[-1]
    for index, entry in expected["state"].items():
        same([found[index][key] for key in entry], list(entry.values()))
        assert all(value.device.type == "cpu" for value in found[index].values())
