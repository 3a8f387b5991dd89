"""``torch.compile(model)`` against DDP and the plain optimizer without a compiler."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from tests.beside import Beside, batch, mlp
from tests.harness import run_ranks


class OwnForward(nn.Module):
    """If DDP calls the forward of torch's own containers, dynamo compiles nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def train(rank: int, world: int, backend: str, way: str) -> None:
    """The first backward is not compiled: dynamo meets gradients, which may be sharded, and adds to them."""
    torch._inductor.config.compile_threads = 1
    both = Beside(OwnForward, AdamW, {"bucket_cap_mb": 25}, way, lr=0.01)
    torch._dynamo.reset()
    compiled = torch.compile(both.ours.called, backend=backend)
    for step in range(4):
        for side in both:
            side.optimizer.zero_grad()
            side.backward(step)
            for number in (10 + step, 20 + step):
                called = compiled if side is both.ours else side.called
                called(batch(number)).square().mean().backward()
            side.optimizer.step()
        # Compiled kernels add up in another order, and have a tanh of their own: some roundings (1e-16) per element, in
        # gradients of 1e-3 and more. AdamW divides by their size: 1e-13 of a step of 1e-2, and four steps add up.
        both.check(step, rtol=0, atol=1e-12)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"], "nothing was compiled"


NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler"
)


@pytest.mark.parametrize("way", ["default", "shard_gradients"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.long, NEEDS_COMPILER])])
def test_a_compiled_model_trains_as_the_plain_optimizer_does(backend: str, way: str) -> None:
    run_ranks(train, 2, backend, way, timeout=300, pg_timeout=200)
