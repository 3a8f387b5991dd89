"""What is trained: small models whose parts can be left out, and batches that both sides see alike."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch import Tensor, nn

BRANCHES = 3


class Fault(torch.autograd.Function):
    """Passes a value on; raises in forward or in backward if told to, or is late in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, place: str) -> Tensor:  # type: ignore[override]
        ctx.place = place
        if place == "forward":
            raise Expected("raised in forward")
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        if ctx.place == "backward":
            raise Expected("raised in backward")
        if ctx.place == "late":
            time.sleep(0.05)
        return gradient, None


class Expected(Exception):
    """What a program raises on purpose."""


class Net(nn.Module):
    """Branches that may be left out, between a layer before and a layer after; and a layer that is added late.

    ``kind`` chooses what the branches are: "plain" (matrices and vectors), "conv" (4-dim weights, for channels_last),
    "single" (one parameter in all, so that ranks own nothing), "odd" (no elements, one element, no dimension, a
    transposed weight), "two dtypes" (a branch in float32), "tied" (one weight used twice), "attention", "streams" (each
    branch computes on a stream of its own, if it is on a device that has streams), "two devices" (a branch stays on
    the CPU).
    """

    def __init__(self, kind: str, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.kind, width = kind, 6
        if kind == "single":
            self.only = nn.Parameter(torch.empty(5, width))
        else:
            self.before = nn.Linear(width, 8)
            self.branches = nn.ModuleList(self._branch(kind, at) for at in range(BRANCHES))
            self.after = nn.Linear(8, width)
            self.gain = nn.Parameter(torch.empty(1))
        self.late = nn.Linear(width, width)  # the optimizer gets it with add_param_group
        self.register_buffer("seen", torch.zeros(()))
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter is self.late.weight:
                    generator.manual_seed(7)  # nobody sends what the optimizer does not have: the same on all ranks
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
        self.to(dtype)
        if kind == "two dtypes":
            self.branches[1].float()
            self.after.float()
        if kind == "odd":
            self.branches[0].weight.data = self.branches[0].weight.data.t().contiguous().t()

    @staticmethod
    def _branch(kind: str, at: int) -> nn.Module:
        if kind == "conv" and at != 1:
            return nn.Conv2d(2, 2, 2, padding=1, bias=at == 0)
        if kind == "attention" and at == 2:
            return nn.MultiheadAttention(8, 2, batch_first=True)
        branch = nn.Linear(8, 8, bias=at != 2)
        if kind == "odd":
            branch.gain = nn.Parameter(torch.empty((), requires_grad=True)) if at == 0 else nn.Parameter(torch.empty(1))
            if at == 2:
                branch.nothing = nn.Parameter(torch.empty(0, 3))
        return branch

    def place(self, device: str) -> None:
        """Put it where it is trained."""
        self.to(device)
        if self.kind == "two devices":
            self.branches[1].cpu()

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """What the optimizer has from the start."""
        return [(name, param) for name, param in self.named_parameters() if not name.startswith("late.")]

    def forward(self, data: Tensor, skip: tuple[int, ...] = (), place: str = "") -> Tensor:
        if self.kind == "single":
            value = data @ self.only.t() @ self.only
        else:
            value = torch.tanh(self.before(data))
            for at, branch in enumerate(self.branches):
                if at not in skip:
                    value = value + torch.tanh(self._beside(at, branch, value))
            if self.kind == "tied":
                value = value + torch.tanh(self._through(self.branches[0], value))
            value = Fault.apply(value, place if place != "forward" else "")  # in the middle of backward
            value = self.after(value.to(self.after.weight.dtype)) * self.gain
            place = place if place == "forward" else ""
        value = Fault.apply(value, place).to(self.late.weight.dtype)
        return self.late(value)

    def _beside(self, at: int, branch: nn.Module, value: Tensor) -> Tensor:
        if self.kind != "streams" or value.device.type == "cpu":
            return self._through(branch, value)
        here, stream = torch.accelerator.current_stream(value.device), _stream(value.device, at)
        stream.wait_stream(here)
        with stream:
            result = self._through(branch, value)
        here.wait_stream(stream)
        result.record_stream(here)
        return result

    def _through(self, branch: nn.Module, value: Tensor) -> Tensor:
        if isinstance(branch, nn.Conv2d):
            return branch(value.view(-1, 2, 2, 2))[:, :, :2, :2].reshape(-1, 8)
        if isinstance(branch, nn.MultiheadAttention):
            rows = value.unsqueeze(0)
            return branch(rows, rows, rows, need_weights=False)[0].squeeze(0)
        result = branch(value.to(branch.weight.device, branch.weight.dtype))
        if hasattr(branch, "gain"):
            result = result * branch.gain
        if hasattr(branch, "nothing"):
            result = result + branch.nothing.sum()
        return result.to(value.device, value.dtype)


@functools.cache
def _stream(device: torch.device, number: int) -> torch.Stream:
    return torch.Stream(device)


def batch(number: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Another one for every number and rank."""
    generator = torch.Generator().manual_seed(1009 * number + rank)
    return torch.randn(5, 6, generator=generator, dtype=torch.float64).to(dtype)
