"""GradScaler on the CPU: all ranks skip together, and training goes on as with the plain optimizer."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import shardstep
from tests.contract.subjects import assert_equal, clones, everybody, full_state_dict
from tests.harness import run_ranks

STEPS = 8
OVERFLOWS = {0, 3, 4}  # the first step among them: there is no state yet
SCALE = 2.0**10


class Training:
    """One model, optimizer and scaler under DDP."""

    def __init__(self, sharded: bool, options: dict, **ours) -> None:
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5)).double()
        self.ddp = DistributedDataParallel(self.model)
        self.params = list(self.model.parameters())
        if sharded:
            self.optimizer = shardstep.ZeroRedundancyOptimizer(self.params, torch.optim.AdamW, **options, **ours)
        else:
            self.optimizer = torch.optim.AdamW(self.params, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=3)

    def step(self, batch: torch.Tensor, clip: bool) -> torch.Tensor | None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.ddp(batch).square().mean()).backward()
        norm = None
        if clip:
            self.scaler.unscale_(self.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(self.params, 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm


def _batch(rank: int, world_size: int, step: int) -> torch.Tensor:
    """On one rank only, an input that overflows: the others see it in the reduced gradient."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    batch = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    if step in OVERFLOWS and rank == world_size - 1:
        batch[1, 2] = float("inf")
    return batch


def _state_values(optimizer) -> list[torch.Tensor]:
    local = getattr(optimizer, "optim", optimizer)
    return clones(value for entry in local.state.values() for value in entry.values())


def _assert_last_bit(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], what: str) -> None:
    """For cut parameters under fused AdamW only: its kernel treats the last elements of a tensor, fewer than a vector,
    with other instructions (no fused multiply-add), so elements near a cut may differ in the last bit, 2e-16. A few
    steps carry it on; 1e-13 leaves room for that and for nothing else.
    """
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=0, msg=lambda text: f"{what}: {text}")


def _skips_together(
    rank: int, world_size: int, clip: bool, fused: bool = False, tensor_lr: bool = False, **ours: Any
) -> None:
    compare = _assert_last_bit if fused and ours.get("shard") != "tensor" else assert_equal
    options = {"weight_decay": 0.1, "fused": fused}
    rates = [torch.tensor(0.02, dtype=torch.float64) if tensor_lr else 0.02 for _ in range(2)]
    training = Training(True, {**options, "lr": rates[0]}, **ours)
    oracle = Training(False, {**options, "lr": rates[1]})
    calls = []
    training.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for step in range(STEPS):
        weights, state = clones(training.params), _state_values(training.optimizer)
        scale = training.scaler.get_scale()
        calls.clear()
        norm = training.step(_batch(rank, world_size, step), clip)
        oracle_norm = oracle.step(_batch(rank, world_size, step), clip)
        scales = everybody(training.scaler.get_scale(), world_size)
        assert scales == [oracle.scaler.get_scale()] * world_size, f"step {step}"
        if step in OVERFLOWS:
            assert scales[0] == scale / 2, f"step {step}"
            assert_equal(training.params, weights, f"step {step}: weights after a skipped step,")
            assert_equal(_state_values(training.optimizer), state, f"step {step}: state after a skipped step,")
            assert calls == [], f"step {step}: step() ran although the gradients overflowed"
        else:
            assert calls == [1]
            if clip:  # of gradients that come from the compared weights
                compare([norm], [oracle_norm], f"step {step}: norm")
            assert not torch.equal(training.params[0], weights[0])
        compare(training.params, oracle.params, f"step {step}: weights")
    assert training.scaler.state_dict() == oracle.scaler.state_dict()
    saved = full_state_dict(training.optimizer, rank, world_size)
    plain = copy.deepcopy(oracle.optimizer.state_dict())
    assert saved["state"].keys() == plain["state"].keys()
    for index, entry in plain["state"].items():
        for key, value in entry.items():
            compare([saved["state"][index][key]], [value], f"{key} of parameter {index}")
        assert float(saved["state"][index]["step"]) == STEPS - len(OVERFLOWS)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "unscaled and clipped"])
def test_an_overflow_skips_the_step_on_all_ranks_together(world_size, clip):
    run_ranks(_skips_together, world_size, clip)


@pytest.mark.parametrize("shard", ["tensor", "element"])
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "unscaled and clipped"])
def test_an_overflow_skips_the_step_of_fused_adamw_on_all_ranks_together(clip, shard):
    """Plain fused AdamW divides by the scale in its kernel. The scale is a power of two, so both ways are exact."""
    run_ranks(_skips_together, 3, clip, fused=True, shard=shard)


def test_an_overflow_skips_the_step_with_bucket_views_whole_tensors_and_a_tensor_learning_rate():
    run_ranks(_skips_together, 3, True, tensor_lr=True, shard="tensor", parameters_as_bucket_view=True)
