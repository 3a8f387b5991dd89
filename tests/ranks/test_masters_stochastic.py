"""Stochastic rounding: the same bits whatever the ranks, cuts and buckets; unbiased; never more than one spacing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import Parameter

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.twins import values

SHAPES = {"a": (7, 5), "b": (5,), "c": (3, 2, 2), "d": (67, 13), "e": (1,), "f": (400, 7)}


def named_params(dtype=torch.bfloat16):
    return {name: Parameter(values(shape, 100 + i, dtype)) for i, (name, shape) in enumerate(SHAPES.items())}


def train(params, opt, steps):
    for step in steps:
        for i, param in enumerate(params.values()):
            param.grad = values(param.shape, 1000 * step + i, param.dtype)
        opt.step()


def build(params, order=None, seed=0, named=True, shard="element", cap=300, **options):
    names = order or [["a", "b", "c", "d", "e", "f"]]
    groups = [{"params": [(n, params[n]) if named else params[n] for n in group]} for group in names]
    arguments = {"shard": shard, "bucket_cap_mb": cap / 2**20, "rounding_seed": seed, **options}
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.01, master_weights="stochastic", **arguments)


def _trained(rank, world, dtype, changes):
    params = named_params(dtype)
    opt = build(params, **changes)
    train(params, opt, range(8))
    opt.check_replicas()
    return {name: param.detach() for name, param in params.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.extended)])
def test_the_bits_depend_on_no_rank_cut_bucket_or_order_of_groups(dtype):
    expected = run_ranks(_trained, 1, dtype, {})[0]
    ways = [
        (2, {"shard": "tensor"}),
        (3, {}),
        (3, {"shard": "tensor", "cap": 90}),
        (4, {"cap": 10**7}),
        (3, {"cap": 1500, "order": [["d", "a"], ["f", "e", "b", "c"]]}),
        (2, {"order": [["f", "e"], ["d", "c", "b", "a"]], "shard": "tensor"}),
        (3, {"parameters_as_bucket_view": True}),
    ]
    for world, changes in ways:
        found = run_ranks(_trained, world, dtype, changes)[0]
        for name, value in expected.items():
            assert torch.equal(found[name], value), f"{name} at {world} ranks with {changes}"
    other = run_ranks(_trained, 1, dtype, {"seed": 1})[0]  # the negative control: the seed counts
    assert not torch.equal(other["f"], expected["f"])


def _without_names(rank, world):
    return _trained(rank, world, torch.bfloat16, {"named": False, "order": [["a", "b", "c"], ["d", "e", "f"]]})


def test_without_names_positions_count():
    one, three = run_ranks(_without_names, 1)[0], run_ranks(_without_names, 3)[0]
    assert all(torch.equal(one[name], three[name]) for name in one)


def _resumed(rank, world, first, saved):
    params = named_params()
    opt = build(params, seed=7)
    if saved is None:
        train(params, opt, range(first))
        opt.consolidate_state_dict()
        return opt.state_dict(), {name: param.detach() for name, param in params.items()}
    opt = build(params, seed=0)  # the seed is loaded
    state, weights = copy.deepcopy(saved)
    for name, param in params.items():
        param.data.copy_(weights[name])
    opt.load_state_dict(state)
    train(params, opt, range(first, 8))
    return {name: param.detach() for name, param in params.items()}


def test_a_resumed_run_goes_on_with_the_same_numbers_at_another_number_of_ranks():
    _, expected = run_ranks(_resumed, 1, 8, None)[0]
    saved = run_ranks(_resumed, 3, 4, None)[0]
    assert saved[0]["param_groups"][0]["rounding_step"] == 4
    for world in (1, 2, 4):
        found = run_ranks(_resumed, world, 4, saved)[0]
        assert all(torch.equal(found[name], expected[name]) for name in expected), world


def _statistics(rank, world, dtype):
    """SGD by a tenth, and 37 hundredths, of a spacing, from exactly representable values, often and in many places."""
    spacing = 2.0 ** (-7 if dtype == torch.bfloat16 else -10)
    count, steps, results = 40000, 25, []
    for part in (0.1, 0.37):
        param = Parameter(torch.ones(count, dtype=dtype))
        opt = ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=1.0, master_weights="stochastic")
        for _ in range(steps):
            param.data.fill_(1.0)
            param.grad = torch.full_like(param, -part * spacing)
            opt.step()
            moved = param.detach().to(torch.float64) - 1
            assert moved.min() >= 0
            assert moved.max() <= spacing
            results.append((moved / spacing).mean().item() - float(param.grad[0].double() / -spacing))
    return results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_unbiased_and_never_moves_a_value_by_more_than_one_spacing(dtype):
    """40000 independent elements go up with probability p: the mean has a deviation of sqrt(p(1-p)/40000) <= 0.0025.

    Of 50 means, none may be beyond 4.5 deviations (chance: 1 in 3000), nor their own mean (50 times as many elements).
    (The generator counts, so the test gives the same numbers every time.)
    """
    for errors in run_ranks(_statistics, 2, dtype):
        assert max(map(abs, errors)) < 4.5 * 0.0025
        assert abs(sum(errors) / len(errors)) < 4.5 * 0.0025 / 50**0.5


def _independent(rank, world):
    """Whether an element goes up says nothing about its neighbours, or about itself a step later."""
    param = Parameter(torch.ones(1 << 16, dtype=torch.bfloat16))
    opt = ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=1.0, master_weights="stochastic")
    ups = []
    for _ in range(12):
        param.data.fill_(1.0)
        param.grad = torch.full_like(param, -0.5 * 2.0**-7)
        opt.step()
        ups.append((param.detach() > 1).to(torch.float64) - 0.5)
    found = []
    for step, up in enumerate(ups):
        found += [(up[:-lag] * up[lag:]).mean().item() * 4 for lag in (1, 2, 3, 64, 4096)]
        found += [(up * other).mean().item() * 4 for other in ups[:step]]
    return found


def test_ups_and_downs_are_uncorrelated():
    """A correlation over 65536 pairs has a deviation of 1/256; of 126, none may be beyond 4.5 (chance: 1 in 1000)."""
    for found in run_ranks(_independent, 1):
        assert max(map(abs, found)) < 4.5 / 256
