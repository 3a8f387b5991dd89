"""Small models that have the same bits on the CPU and on the simulated device, and plain training of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.accelerator.devices import module

ADAMW: tuple[type, dict[str, Any]] = (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1})
MOMENTUM: tuple[type, dict[str, Any]] = (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9})
OPTIMIZERS = {"AdamW": ADAMW, "SGD": MOMENTUM}
# Gradients of several ranks are added up in another order than the oracle's: some roundings of float64 in numbers of
# the order of 1, over a few steps.
SUMMED_OTHERWISE = 1e-11


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 3)).double()


class Branches(nn.Module):
    """Two branches without a common parameter, of layers in turn: a bucket has gradients of both.

    Each may be on a device of its own, where autograd has a thread for each of them, or on a stream of its own.
    ``swaps``: the branches have each other's stream.
    """

    def __init__(self, first: torch.device | str = "cpu", second: torch.device | str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        places = torch.device(first), torch.device(first if second is None else second)
        self.layers = nn.ModuleList(nn.Linear(7, 7).double().to(places[at % 2]) for at in range(8))
        self.extra = nn.Parameter(torch.ones(7, dtype=torch.float64, device=places[1]))  # is not always used
        self.streams: tuple[Any, ...] = ()
        self.swaps = False

    def forward(self, batch: Tensor, uses_extra: bool = True) -> Tensor:
        one, other = (self._branch(at, batch) for at in (0, 1))
        for stream, result in zip(self.streams, (other, one) if self.swaps else (one, other), strict=False):
            here = module().current_stream(result.device)
            here.wait_stream(stream)
            result.record_stream(here)
        product = one.to(other.device) * other
        return product * self.extra if uses_extra else product

    def _branch(self, at: int, batch: Tensor) -> Tensor:
        layers = nn.Sequential(*self.layers[at::2])
        batch = batch.to(self.layers[at].weight.device)
        if not self.streams:
            return layers(batch)
        stream = self.streams[at ^ self.swaps]
        stream.wait_stream(module().current_stream(batch.device))
        with module().stream(stream):
            return layers(batch)


def on_streams(place: torch.device) -> Branches:
    """A model whose branches compute on a stream each."""
    model = Branches(place)
    model.streams = module().Stream(place), module().Stream(place)
    return model


def batch(step: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * part + step)
    return torch.randn(6, 7, dtype=torch.float64, generator=generator)


def loss_of(model: nn.Module, step: int, part: int = 0, **others: Any) -> Tensor:
    """On the device of the model, where the host does not wait for the batch."""
    data, device = batch(step, part), next(model.parameters()).device
    if device.type != "cpu":  # as a DataLoader with pin_memory does it
        data = data.pin_memory().to(device, non_blocking=True)
    return model(data, **others).square().mean()


def train_plainly(
    name: str, steps: int, parts: Sequence[int] = (0,), make: Any = small_model, max_norm: float | None = None
) -> tuple[list[Tensor], dict[str, Any]]:
    """The oracle: one process, the CPU, the plain optimizer, the mean over all parts. Weights, and the state dict."""
    kind, options = OPTIMIZERS[name]
    model = make()
    optimizer = kind(model.parameters(), **options)
    for step in range(steps):
        optimizer.zero_grad()
        torch.stack([loss_of(model, step, part) for part in parts]).mean().backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()], optimizer.state_dict()
