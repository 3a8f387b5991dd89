"""float32 masters: the plain optimizer over float32 copies, bit for bit, and parameters that are what they round to."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn import Parameter

from shardstep import ZeroRedundancyOptimizer
from shardstep.params.rounding import round_nearest
from tests.harness import run_ranks
from tests.ranks.test_every_optimizer import CLASSES, EXTRA, FUSED_ROUNDING, MATRICES, TRAINED, WHOLE_ONLY
from tests.twins import values
from tests.versions import with_muon_if_there

SHAPES = [(7, 5), (5,), (3, 2, 2), (37, 13), (1,)]
SMALL = 300 / 2**20  # MiB: several buckets
KEPT = [torch.float32, "remainder"]


def rounded(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(master.shape, dtype=dtype)
    round_nearest(master.contiguous(), out)
    return out


class MasterTwins:
    """A sharded optimizer over 16-bit parameters, and the plain one over float32 copies, with the same gradients.

    ``modes``: one, or one for each of several groups that have the same parameters.
    """

    def __init__(self, optimizer_class, modes, dtype=torch.bfloat16, shapes=SHAPES, sharded=None, **defaults):
        self.dtype = dtype
        modes = modes if isinstance(modes, list) else [modes]
        groups = [
            {
                "params": [Parameter(values(shape, 100 + i, dtype)) for i, shape in enumerate(shapes)],
                "master_weights": mode,
            }
            for mode in modes
        ]
        self.ours = [param for group in groups for param in group["params"]]
        self.theirs = [Parameter(param.detach().to(torch.float32)) for param in self.ours]
        options = {"bucket_cap_mb": SMALL, **(sharded or {})}
        self.opt = ZeroRedundancyOptimizer(groups, optimizer_class, **options, **defaults)
        self.plain = optimizer_class(self.theirs, **defaults)
        self.seed = 5000

    def step(self, count=1):
        for _ in range(count):
            for mine, theirs in zip(self.ours, self.theirs, strict=True):
                self.seed += 1
                mine.grad = values(mine.shape, self.seed, self.dtype)
                theirs.grad = mine.grad.to(torch.float32)
            self.opt.step()
            self.plain.step()

    def check(self, where="", close=None):
        for position, (mine, theirs) in enumerate(zip(self.ours, self.theirs, strict=True)):
            master = self.opt.full_state(mine)["master_weight"]
            if close is None:
                assert torch.equal(master, theirs.detach()), f"{where}: master {position}"
            else:
                torch.testing.assert_close(master, theirs.detach(), rtol=close[0], atol=close[1])
            assert torch.equal(mine.detach(), rounded(master, self.dtype)), f"{where}: parameter {position}"


def _train_class(rank, world, name, runs):
    """Both modes in one optimizer, as groups: building one takes a probe."""
    shapes = MATRICES if name == "Muon" else SHAPES
    for shard, variant, steps in runs:
        twins = MasterTwins(
            CLASSES[name], KEPT, shapes=shapes, sharded={"shard": shard}, **EXTRA.get(name, {}), **variant
        )
        twins.step(steps)
        close = FUSED_ROUNDING[torch.float32] if "fused" in variant and shard == "element" else None
        twins.check(f"{name} {shard} {variant}", close)


def _runs(name, thorough):
    known = inspect.signature(CLASSES[name]).parameters
    variants = [{}] + [{flag: True} for flag in ("foreach", "fused") if flag in known]
    shards = ["tensor"] if name in WHOLE_ONLY else ["element", "tensor"]
    if thorough:
        return [(shard, variant, 50) for shard in shards for variant in variants]
    return [(shards[0], {}, 50), *((shards[-1], variant, 8) for variant in variants[1:])]


@pytest.mark.extended
@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.again)])
@pytest.mark.parametrize("name", with_muon_if_there(sorted({*TRAINED, "Muon"})))
def test_masters_of_every_class_are_the_plain_optimizer_over_float32_copies(name, thorough):
    run_ranks(_train_class, 3, name, _runs(name, thorough))


def _two_classes(rank, world):
    for name in ("AdamW", "SGD"):
        _train_class(rank, world, name, [("element", {}, 10), ("tensor", {}, 10)])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_masters_are_exact_at_other_numbers_of_ranks(world):
    run_ranks(_two_classes, world)
