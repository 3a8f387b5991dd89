"""Stochastic rounding: unbiased, never more than one spacing, and a function of names and elements.

(That bits are the same on any number of ranks, in every mode and after a resume is the differential harness's claim.)
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import values

SHAPES = {"a": (7, 5), "b": (5,), "c": (3, 2, 2), "d": (67, 13), "e": (1,), "f": (700, 700)}  # f: in several blocks


def _trained(rank, world, order=("abcdef",), named=True, turned=None, seed=0, **options):
    params = {name: Parameter(values(shape, ord(name), torch.float16)) for name, shape in SHAPES.items()}

    def turn():
        params["f"].data = params["f"].data.t().contiguous().t()

    if turned == "before":
        turn()
    groups = [{"params": [(name, params[name]) if named else params[name] for name in names]} for names in order]
    given = {"master_weights": "stochastic", "rounding_seed": seed, "bucket_cap_mb": 300 / 2**20, **options}
    opt = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.01, **given)
    if turned == "afterwards":
        turn()
    for step in range(3):
        for param in params.values():
            param.grad = values(param.shape, 1000 * step + param.numel(), torch.float16)
        opt.step()
    opt.check_replicas()
    return {name: param.detach().contiguous() for name, param in params.items()}


def test_the_bits_depend_on_names_and_elements_and_on_no_order_of_groups_or_memory():
    expected = run_ranks(_trained, 1)[0]
    ways = [
        (3, {"order": ("da", "febc"), "turned": "afterwards", "shard": "element"}),
        (2, {"order": ("fe", "dcba"), "turned": "before", "shard": "tensor"}),
        (3, {"order": ("cb", "fade"), "turned": "before", "parameters_as_bucket_view": True}),
    ]
    for world, changes in ways:
        found = run_ranks(_trained, world, **changes)[0]
        for name, value in expected.items():
            assert torch.equal(found[name], value), f"{name} at {world} ranks with {changes}"
    # The negative controls: the seed counts, and without names the position does.
    for changes in ({"seed": 1}, {"named": False, "order": ("fabcde",)}):
        assert not torch.equal(run_ranks(_trained, 1, **changes)[0]["f"], expected["f"])


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
