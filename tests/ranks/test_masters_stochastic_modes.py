"""Stochastic rounding wherever gradients come from: the same bits at any number of ranks, and after a resume.

Gradients must not depend on the number of ranks, down to the last bit. So rank 0 has them times the number of ranks,
the others zeros, and they are numbers of few bits: neither sum nor mean rounds, in whatever order they are made.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from shardstep import (
    ZeroRedundancyOptimizer,
    checkpoint,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
    shard_ddp_gradients,
)
from tests.harness import run_ranks
from tests.twins import assert_same, values

pytestmark = pytest.mark.extended  # the other files about masters have a cheaper test of each claim

SHAPES = {"a": (7, 5), "b": (5,), "c": (3, 2, 2), "d": (67, 13), "e": (1,), "f": (40, 7)}
WAYS = ("ddp", "sharded", "under ddp", "hook", "interleaved", "scattering hook")
STEPS = 6


class Products(nn.Module):
    """The sum of its parameters times given numbers: those are the gradients."""

    def __init__(self, dtype):
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            self.register_parameter(name, nn.Parameter(values(shape, 100 + i, dtype)))

    def forward(self, factors):
        parts = [(param * factor).sum() for param, factor in zip(self.parameters(), factors, strict=True)]
        return torch.stack(parts).sum()


def gradients(step, dtype, times=1):
    """Multiples of 1/8 between -2 and 2: 5 bits and the sign, so there is room for 8 times them."""
    found = [values(shape, 1000 * step + i) for i, shape in enumerate(SHAPES.values())]
    return [(value.clamp(-2, 2) * 8).round().div(8).mul(times).to(dtype) for value in found]


class Run:
    """A model trained one way."""

    def __init__(self, way, dtype=torch.bfloat16, order=("abcdef",), cap=300, **options):
        self.dtype = dtype
        self.model = Products(dtype)
        self.net = self.model if way in ("alone", "sharded") else DistributedDataParallel(self.model)
        groups = [{"params": [(name, getattr(self.model, name)) for name in names]} for names in order]
        given = {"lr": 0.01, "bucket_cap_mb": cap / 2**20, "master_weights": "stochastic", "rounding_seed": 5}
        given["shard_gradients"] = way == "sharded"
        given["overlap_with_ddp"] = way in ("hook", "interleaved", "scattering hook")
        self.opt = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **{**given, **options})
        if way == "under ddp":
            shard_ddp_gradients(self.net, self.opt)
        elif way in ("hook", "scattering hook"):
            inner = reduce_scatter_hook if way == "scattering hook" else allreduce_hook
            self.net.register_comm_hook(None, hook_with_zero_step(inner, self.net, self.opt))
        elif way == "interleaved":
            self.net.register_comm_hook(None, hook_with_zero_step_interleaved(allreduce_hook, self.net, self.opt))

    def train(self, steps, rank=0, world=1):
        for step in steps:
            self.opt.zero_grad()
            self.net(gradients(step, self.dtype, world if rank == 0 else 0)).backward()
            self.opt.step()
        return self.weights()

    def weights(self):
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}


def alone(dtype=torch.bfloat16, **options):
    run = Run("alone", dtype, **options)
    return run.train(range(STEPS))


def _every_way(rank, world, dtype, expected):
    for way in WAYS:
        for shard, cap in (("element", 300), ("tensor", 1100), ("element", 10**7)):
            run = Run(way, dtype, shard=shard, cap=cap)
            found = run.train(range(STEPS), rank, world)
            assert_same(found, expected, f"{way}, {shard}, buckets of {cap} bytes")
            assert run.opt.param_groups[0]["rounding_step"] == STEPS


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_bits_are_the_same_wherever_gradients_come_from(world):
    run_ranks(_every_way, world, torch.bfloat16, alone())


def test_the_bits_of_float16_are_the_same_wherever_gradients_come_from():
    run_ranks(_every_way, 3, torch.float16, alone(torch.float16))


def test_the_numbers_are_drawn_at_all():
    """The negative control: another seed gives other bits, and so do masters that are rounded to nearest."""
    expected = alone()
    for options in ({"rounding_seed": 6}, {"master_weights": torch.float32, "rounding_seed": 0}):
        found = alone(**options)
        assert any(not torch.equal(found[name], expected[name]) for name in expected)


def _interrupted(rank, world, way, root):
    """Half of a run, saved; a later save that is cut off."""
    run = Run(way, order=("da", "febc"))
    run.train(range(3), rank, world)
    checkpoint.save(root / "step-3", run.opt, run.model)
    run.train([3], rank, world)
    checkpoint.save(root / "step-4", run.opt, run.model)
    if rank == 0:
        data = max((root / "step-4").glob("*.distcp"), key=lambda path: path.stat().st_size)
        data.write_bytes(data.read_bytes()[:-20])


def _resumed(rank, world, way, root):
    run = Run(way, order=("cb", "fade"), rounding_seed=99, cap=900)  # the seed is loaded
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        path, _ = checkpoint.resume(root, run.opt, run.model)
    assert path.name == "step-3"
    assert any("step-4" in str(warning.message) for warning in told)
    found = [(group["rounding_seed"], group["rounding_step"]) for group in run.opt.param_groups]
    assert found == [(5, 3), (5, 3)]
    found = run.train(range(3, STEPS), rank, world)
    run.opt.check_replicas()
    return found


@pytest.mark.parametrize(("first", "then"), [("sharded", "interleaved"), ("hook", "under ddp"), ("ddp", "sharded")])
def test_a_run_resumed_from_a_directory_after_a_damaged_save_goes_on_with_the_same_bits(first, then, tmp_path):
    expected = alone()
    run_ranks(_interrupted, 3, first, tmp_path)
    for world, way in ((3, first), (2, then), (1, then)):
        assert_same(run_ranks(_resumed, world, way, tmp_path)[0], expected, f"{way} at {world} ranks")
