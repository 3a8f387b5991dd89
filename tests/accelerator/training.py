"""A small model that has the same bits on the CPU and on the simulated device, and plain training of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

ADAMW: tuple[type, dict[str, Any]] = (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1})
MOMENTUM: tuple[type, dict[str, Any]] = (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9})
OPTIMIZERS = {"AdamW": ADAMW, "SGD": MOMENTUM}


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 3)).double()


class OwnForward(nn.Module):
    """A model with a forward of the user's: if DDP calls that of torch's own containers, dynamo compiles nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = small_model()

    def forward(self, data: Tensor) -> Tensor:
        return self.layers(data)


class CountingBackend:
    """For ``torch.compile``: another backend, and how many graphs it has compiled."""

    def __init__(self, name: str) -> None:
        self._compile = torch._dynamo.lookup_backend(name)
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self._compile(graph, inputs)


def batch(step: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * part + step)
    return torch.randn(6, 7, dtype=torch.float64, generator=generator)


def loss_of(model: nn.Module, step: int, part: int = 0) -> Tensor:
    """On the device of the model."""
    device = next(model.parameters()).device
    return model(batch(step, part).to(device)).square().mean()


def train_plainly(name: str, steps: int, parts: Sequence[int] = (0,)) -> tuple[list[Tensor], dict[str, Any]]:
    """The oracle: one process, the CPU, the plain optimizer, the mean over all parts. Weights, and the state dict."""
    kind, options = OPTIMIZERS[name]
    model = small_model()
    optimizer = kind(model.parameters(), **options)
    for step in range(steps):
        optimizer.zero_grad()
        sum(loss_of(model, step, part) for part in parts).div(len(parts)).backward()  # type: ignore[union-attr]
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()], optimizer.state_dict()
