"""``torch.compile(model)`` with inductor, in every mode, against the plain optimizer without a compiler."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch

from tests.accelerator.modes import MODES, train_in
from tests.accelerator.training import OPTIMIZERS, CountingBackend, OwnForward, loss_of, train_plainly
from tests.harness import run_ranks

STEPS = 4
# Compiled kernels add up in another order, and have a tanh of their own, which is as good: some roundings (1e-16) per
# element, forward and backward, in gradients of 1e-3 and more. AdamW divides by their size, so that they are 1e-13 of a
# step of 1e-2, and four steps add up.
COMPILED_OTHERWISE = 1e-12


def train_compiled(rank: int, world: int, modes: list[str]) -> dict[str, Any]:
    """The weights by mode. All modes compile the same graphs, so what the first has compiled is there for the rest."""
    kind, options = OPTIMIZERS["AdamW"]
    found = {}
    # One thread: no pool of compiling processes. No precompiled headers: they take longer than two small kernels.
    settings: dict[str, Any] = {"compile_threads": 1}
    if hasattr(torch._inductor.config, "cpp_cache_precompile_headers"):  # since torch 2.7
        settings["cpp_cache_precompile_headers"] = False
    with torch._inductor.config.patch(settings):
        for mode in modes:
            torch._dynamo.reset()
            model, backend = OwnForward(), CountingBackend("inductor")
            called, optimizer = train_in(mode, model, kind, options, ddp_cap_mb=25)  # dynamo wants its usual buckets
            compiled = torch.compile(called, backend=backend)
            for step in range(STEPS):
                optimizer.zero_grad()
                optimizer.wait_for_parameters()  # as the docstring of lazy_gather asks for with a compiled model
                loss_of(compiled, step, rank).backward()
                optimizer.step()
            optimizer.check_replicas()
            found[mode] = [param.detach() for param in model.parameters()]
            assert backend.graphs > 0, f"{mode}: nothing was compiled"
    return found


# DDP's way through dynamo and the one without DDP; the others share one of them.
FEW = ["shard_gradients", "default"]


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize(
    ("world", "modes"),
    [pytest.param(2, FEW, marks=pytest.mark.extended), pytest.param(3, list(MODES), marks=pytest.mark.again)],
    ids=["few", "every"],
)
def test_a_model_compiled_with_inductor_trains_as_the_plain_optimizer_does(world: int, modes: list[str]) -> None:
    expected, _ = train_plainly("AdamW", STEPS, range(world))
    for found in run_ranks(train_compiled, world, modes, timeout=300, pg_timeout=200):
        assert found.keys() == set(modes)
        for mode, weights in found.items():
            for weight, other in zip(weights, expected, strict=True):
                assert (weight - other).abs().max() <= COMPILED_OTHERWISE, mode
