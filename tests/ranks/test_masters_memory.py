"""float32 masters and memory: parameters that lie in another order, or are laid out anew; any default dtype."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from shardstep import ZeroRedundancyOptimizer
from shardstep.params import master_blocks
from tests.harness import run_ranks
from tests.ranks.test_masters import KEPT, SMALL, MasterTwins
from tests.twins import assert_same, values

SHAPES = [(16, 8, 4, 4), (40,), (6, 5, 3, 3)]


def _turn(params):
    for param in (params[0], params[2]):
        param.data = param.data.to(memory_format=torch.channels_last)


def _rounded_at_random(rank, world, turned, block, options):
    master_blocks._ON_CPU = block  # with a small one they are stepped where they lie
    params = [Parameter(values(shape, i, torch.bfloat16)) for i, shape in enumerate(SHAPES)]
    if turned == "before":
        _turn(params)
    opt = ZeroRedundancyOptimizer(
        params, torch.optim.AdamW, lr=0.01, master_weights="stochastic", bucket_cap_mb=SMALL, **options
    )
    if turned == "afterwards":
        _turn(params)
    for step in range(4):
        for i, param in enumerate(params):
            param.grad = values(param.shape, 10 * step + i, torch.bfloat16)
        opt.step()
    opt.check_replicas()
    return [param.detach().contiguous() for param in params], params[0].is_contiguous()


@pytest.mark.parametrize("block", [1 << 17, 128])
def test_random_numbers_are_for_elements_in_whatever_order_these_lie(block):
    """A parameter that is cut lies in the order of its elements, one in a bucket view as at first."""
    expected, _ = run_ranks(_rounded_at_random, 1, "never", block, {})[0]
    ways = [
        (1, "before", {}, False),
        (1, "afterwards", {}, False),
        (3, "afterwards", {"shard": "element"}, True),
        (3, "before", {"shard": "tensor"}, False),
        (3, "before", {"parameters_as_bucket_view": True}, False),
        (3, "afterwards", {"parameters_as_bucket_view": True}, True),
    ]
    for world, turned, options, expects_order in ways:
        found, lies_in_order = run_ranks(_rounded_at_random, world, turned, block, options)[0]
        assert lies_in_order == expects_order, "the case that this test is about"
        for position, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(one, other), (world, turned, options, position)


def _laid_out_anew(rank, world, mode):
    """With ``model.to(memory_format=...)`` in the middle of training."""
    twins = MasterTwins(torch.optim.AdamW, mode, shapes=SHAPES, sharded={"shard": "tensor"}, lr=0.01)
    for memory_format in (torch.channels_last, torch.contiguous_format):
        twins.step(2)
        for param in (twins.ours[0], twins.ours[2]):
            param.data = param.data.to(memory_format=memory_format)
        twins.check(f"{memory_format}, read")
        twins.step(2)
        twins.check(f"{memory_format}, stepped")


@pytest.mark.parametrize("mode", KEPT)
@pytest.mark.parametrize("world", [1, 3])
def test_masters_of_a_parameter_that_is_laid_out_anew_stay_with_their_elements(world, mode):
    run_ranks(_laid_out_anew, world, mode)


def _with_default(rank, world, dtype):
    """``torch.set_default_dtype`` around all of it, as programs do that make their model in bfloat16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        shapes = [(7, 5), (), (1,), (301,)]
        twins = MasterTwins(torch.optim.Adagrad, KEPT, shapes=shapes, lr=0.01)
        twins.step(3)
        twins.check(f"{dtype} is the default")
        states = [twins.opt.full_state(param) for param in twins.ours]
        assert all(state["sum"].dtype == torch.float32 for state in states)
        twins.opt.consolidate_state_dict()
        box = [twins.opt.state_dict() if rank == 0 else None]
        dist.broadcast_object_list(box, 0)
        twins.step(1)
        twins.opt.load_state_dict(box[0])
        for param, state in zip(twins.ours, states, strict=True):
            assert_same(twins.opt.full_state(param), state, "loaded")
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_masters_are_float32_whatever_the_default_dtype_is(dtype):
    run_ranks(_with_default, 3, dtype)
