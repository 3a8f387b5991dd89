"""float32 masters: what the differential harness cannot say of them (docs/precision.md).

The oracle is the plain optimizer over float32 copies, with the same gradients: the masters are its parameters, bit for
bit, and ours are what those round to.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import Parameter
from torch.optim import SGD, AdamW

from shardstep import ZeroRedundancyOptimizer
from tests.differential.sides import rounded
from tests.harness import run_ranks
from tests.oracle import error_of, values

SHAPES = [(7, 5), (5,), (3, 2, 2), (37, 13), (1,)]
PADDED = [(17,)] * 3  # at 3 ranks each owns one of three parameters in a bucket, and the padding behind it
LARGE = [(700, 700), (7, 5), (5,), (300, 300)]  # pieces of more and of less than a block (131,072 elements)
SMALL = 300 / 2**20  # MiB: several buckets
KEPT = [torch.float32, "remainder"]
SPACING = 2.0**-7  # of bfloat16, between 1 and 2


def local(param):
    return (param.to_local() if isinstance(param, DTensor) else param).detach()


class MasterTwins:
    """Ours over bfloat16 parameters, a group for each of ``modes``, and the plain optimizer over float32 copies.

    ``wrap`` makes parameters and gradients of plain tensors.
    """

    def __init__(self, kind=AdamW, modes=KEPT, shapes=SHAPES, sharded=None, wrap=lambda value: value, **defaults):
        self.modes, self.wrap, self.seed = [mode for mode in modes for _ in shapes], wrap, 5000
        drawn = [values(shape, 100 + i, torch.bfloat16) for i, shape in enumerate(shapes)]
        self.ours = [Parameter(wrap(value.clone())) for _ in modes for value in drawn]
        self.theirs = [Parameter(local(param).float()) for param in self.ours]
        of_mode = [[param for param, own in zip(self.ours, self.modes, strict=True) if own == mode] for mode in modes]
        groups = [{"params": params, "master_weights": mode} for params, mode in zip(of_mode, modes, strict=True)]
        self.opt = ZeroRedundancyOptimizer(groups, kind, **{"bucket_cap_mb": SMALL, **(sharded or {})}, **defaults)
        self.plain = kind(self.theirs, **defaults)

    def set_gradients(self):
        for mine, copy in zip(self.ours, self.theirs, strict=True):
            self.seed += 1
            gradient = values(mine.shape, self.seed, torch.bfloat16)
            mine.grad, copy.grad = self.wrap(gradient), gradient.float()

    def step(self, count=1):
        for _ in range(count):
            self.set_gradients()
            self.opt.step()
            self.plain.step()

    def masters(self):
        return [self.opt.full_state(param)["master_weight"] for param in self.ours]

    def check(self, where=""):
        for position, (master, mine, copy) in enumerate(zip(self.masters(), self.ours, self.theirs, strict=True)):
            assert torch.equal(master, copy.detach()), f"{where}: master {position}"
            assert torch.equal(local(mine), rounded(master, torch.bfloat16)), f"{where}: parameter {position}"
        self.opt.check_replicas()

    def check_followed(self, before):
        """Somebody has changed parameters, whose masters were ``before``: what is read follows, element by element."""
        for mode, master, param, copy in zip(self.modes, before, self.ours, self.theirs, strict=True):
            copy.data.copy_(followed(mode, master, local(param)))
            assert torch.equal(self.opt.full_state(param)["master_weight"], copy.detach())


def followed(mode, master, param):
    """A changed element's master is the new value; with "remainder" it keeps its lower 16 bits."""
    same = rounded(master, torch.bfloat16).view(torch.int16) == param.view(torch.int16)
    new = param.float()
    if mode == "remainder":
        lower = master.view(torch.int32).to(torch.int16)
        joined = ((param.view(torch.int16).to(torch.int32) << 16) + lower).view(torch.float32)
        new = torch.where(joined.isnan(), new, joined)  # (zero and infinity have no neighbour on one side)
    return torch.where(same, master, new)


# --- optimizers -------------------------------------------------------------------------------------------------------


def _classes(rank, world):
    for name in ("ASGD", "Adamax", "NAdam", "RAdam", "Rprop", "Muon"):
        if hasattr(torch.optim, name):  # (Muon is new)
            twins = MasterTwins(getattr(torch.optim, name), shapes=[(7, 5), (4, 4), (3, 8), (37, 13)])
            twins.step(6)
            twins.check(name)
    twins = MasterTwins(AdamW, sharded={"shard": "tensor"}, fused=True)
    twins.step(6)
    twins.check("fused")


def test_masters_of_classes_that_the_harness_has_not_are_the_plain_optimizer_over_float32_copies():
    run_ranks(_classes, 3)


def _with_defaults(rank, world):
    """``torch.set_default_dtype`` around all of it, as programs do that make their model in bfloat16."""
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        twins = MasterTwins(torch.optim.Adagrad, shapes=[(7, 5), (), (1,)])
        twins.step(3)
        twins.check(f"{dtype} is the default")
        assert all(twins.opt.full_state(param)["sum"].dtype == torch.float32 for param in twins.ours)


def test_masters_are_float32_whatever_the_default_dtype_is():
    run_ranks(_with_defaults, 2)


def _schedule_free(rank, world):
    from schedulefree import AdamWScheduleFree

    twins = MasterTwins(AdamWScheduleFree, lr=0.01)
    with torch.inference_mode():  # masters that are made here can be trained
        twins.opt.eval()
        twins.opt.train()
    twins.plain.train()
    twins.step(3)
    twins.check("training")
    twins.opt.zero_grad()
    for param in (twins.ours[1], twins.ours[-2]):  # what is frozen and has state is switched, too
        param.requires_grad_(False)
    for switch in ("eval", "train"):
        getattr(twins.opt, switch)()
        getattr(twins.plain, switch)()
        twins.check(switch)


def test_masters_of_a_schedule_free_optimizer():
    run_ranks(_schedule_free, 3)


class FailsOnce(AdamW):
    """Raises when it has stepped, if told to."""

    fails = False

    def step(self, closure=None):
        super().step(closure)
        if FailsOnce.fails:
            FailsOnce.fails = False
            raise ValueError("failed as told")


def _failed(rank, world):
    twins = MasterTwins(FailsOnce, lr=0.01)
    twins.step(3)
    twins.set_gradients()
    for optimizer in (twins.opt, twins.plain):
        FailsOnce.fails = True
        # (With a closure all buckets are stepped at once, so that it fails at the same place on every rank.)
        assert "failed as told" in str(error_of(lambda optimizer=optimizer: optimizer.step(lambda: None)))
    twins.step(2)
    twins.check("after a step that failed")


def test_after_an_exception_in_the_middle_of_a_step_masters_are_as_far_as_the_state():
    run_ranks(_failed, 3)


# --- parameters -------------------------------------------------------------------------------------------------------


def _changed(rank, world, shapes, sharded):
    where = f"{shapes} {sharded}"
    twins = MasterTwins(shapes=shapes, sharded=sharded, lr=0.003)
    twins.step(3)
    trained = [param.detach().clone() for param in twins.ours]
    for param in twins.ours:  # an average of weights is swapped in, saved, and swapped out: masters stay
        param.data.mul_(1.5)
    twins.masters()
    for param, value in zip(twins.ours, trained, strict=True):
        param.data.copy_(value)
    twins.check(f"{where}, swapped back")
    before = twins.masters()
    for param in twins.ours:
        if param.numel() > 5:
            flat = param.detach().view(-1)
            flat[3::7] = 0.5
            flat[4], flat[5] = 0.0, -0.0
    twins.ours[1].data = twins.ours[1].data * 2  # other memory, too
    twins.check_followed(before)
    twins.step(2)
    twins.check(f"{where}, changed")


def _changed_in_every_way(rank, world):
    _changed(rank, world, SHAPES, {"shard": "element"})
    _changed(rank, world, SHAPES, {"shard": "tensor", "lazy_gather": True})
    _changed(rank, world, SHAPES, {"shard": "element", "parameters_as_bucket_view": True})
    _changed(rank, world, PADDED, {"shard": "tensor"})


def test_masters_follow_parameters_that_somebody_changed_element_by_element():
    run_ranks(_changed_in_every_way, 3)


def _turned(rank, world):
    """Large ones are worked on where they lie, in blocks; in the middle of training they are laid out anew."""
    for shard in ("element", "tensor"):
        twins = MasterTwins(shapes=LARGE, sharded={"shard": shard, "bucket_cap_mb": 1}, lr=0.01)
        twins.step(2)
        twins.check(shard)
        for turned in (True, False):
            for param in (param for param in twins.ours if param.dim() == 2):
                param.data = param.data.t().contiguous().t() if turned else param.data.contiguous()
            twins.check(f"{shard}, {turned=}, read")
            twins.step()
            twins.check(f"{shard}, {turned=}")


def test_masters_stay_with_their_elements_in_whatever_order_these_lie():
    run_ranks(_turned, 3)


def _replicated(rank, world):
    mesh = init_device_mesh("cpu", (world,))

    def wrap(value):
        return DTensor.from_local(value, mesh, [Replicate()], run_check=False)

    twins = MasterTwins(wrap=wrap, lr=0.01)
    twins.step(3)
    twins.check("trained")
    before = twins.masters()
    twins.ours[0].to_local().detach().mul_(2)
    twins.ours[-2].data = wrap(local(twins.ours[-2]) * 4)
    twins.check_followed(before)
    twins.step(2)
    twins.check("trained on")


def test_masters_of_replicated_dtensors():
    run_ranks(_replicated, 3)


# --- all modes beside each other --------------------------------------------------------------------------------------

MODES = [*KEPT, "stochastic", None]


def _small_updates(rank, world):
    """A tenth of the spacing for 200 elements of 301, nothing for the others."""
    params = [Parameter(torch.ones(301, dtype=torch.bfloat16)) for _ in MODES]
    groups = [{"params": [param], "master_weights": mode} for param, mode in zip(params, MODES, strict=True)]
    opt = ZeroRedundancyOptimizer(groups[:1], SGD, lr=1.0)
    for group in groups[1:]:
        opt.add_param_group(group)
    for _ in range(200):
        for param in params:
            param.grad = torch.full_like(param, -SPACING / 10)
            param.grad[200:] = 0
        opt.step()
    assert all(torch.equal(param[200:], torch.ones_like(param[200:])) for param in params)
    return [param.detach()[:200].double() for param in params]


@pytest.mark.parametrize("world", [1, 2])
def test_small_updates_arrive_with_masters_and_are_lost_without(world):
    total = 200 * torch.tensor(SPACING / 10, dtype=torch.bfloat16).item()
    expected = torch.tensor(1 + total).to(torch.bfloat16).item()
    kept, remainder, at_random, without = run_ranks(_small_updates, world)[0]
    assert kept.unique().tolist() == remainder.unique().tolist() == [expected]
    assert without.unique().tolist() == [1.0]
    # 200 walks of 200 steps, each up with probability 0.1: the mean has a deviation of sqrt(200 * 0.09 / 200) = 0.3
    # spacings.
    assert abs(at_random.mean().item() - expected) < 4.5 * 0.3 * SPACING


def _memory(rank, world, mode):
    params = [Parameter(values((64, 100), i, torch.bfloat16)) for i in range(12)]
    frozen = Parameter(torch.ones(40000, dtype=torch.bfloat16), requires_grad=False)
    opt = ZeroRedundancyOptimizer([*params, frozen], AdamW, lr=0.01, master_weights=mode, bucket_cap_mb=0.05)
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step()
    return opt.memory()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_masters_take_4_or_2_or_0_bytes_per_element_that_is_owned_and_trained(mode):
    each, owned = {torch.float32: 4, "remainder": 2}.get(mode, 0), 12 * 6400 / 3
    found = run_ranks(_memory, 3, mode)
    assert sum(memory.masters for memory in found) == pytest.approx(3 * owned * each, rel=0.02)
    assert sum(memory.state for memory in found) == pytest.approx(3 * owned * (4 if mode is None else 8), rel=0.02)
    for memory in found:
        assert memory.masters <= 1.02 * owned * each
        # One bucket of four at a time: gradients and masters in float32, a copy of the parameters, a block to work in
        # (these buckets are smaller than one), and 6 bytes per element of it for random numbers.
        scratch = {None: 0, "stochastic": 4 + 4 + 2 + 4 + 6}.get(mode, 4 + 4 + 2 + 4)
        assert memory.scratch <= owned / 2.8 * scratch
        assert (memory.scratch > 0) == (mode is not None)
