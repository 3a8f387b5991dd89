"""What is around float32 masters: small updates, changed parameters, clipping, scalers, freezing, groups, reports."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import error_of
from tests.ranks.test_masters import KEPT, SMALL, MasterTwins, rounded
from tests.twins import values

MODES = [*KEPT, "stochastic"]
SPACING = 2.0**-7  # of bfloat16, between 1 and 2


# --- small updates ----------------------------------------------------------------------------------------------------


def _small_updates(rank, world, shard):
    modes = [*MODES, None]
    params = [Parameter(torch.ones(301, dtype=torch.bfloat16)) for _ in modes]
    groups = [{"params": [param], "master_weights": mode} for param, mode in zip(params, modes, strict=True)]
    opt = ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=1.0, shard=shard)
    for _ in range(200):
        for param in params:
            param.grad = torch.full_like(param, -SPACING / 10)
        opt.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("shard", ["element", "tensor"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_200_steps_of_a_tenth_of_the_spacing_arrive_with_masters_and_are_lost_without(world, shard):
    gradient = torch.tensor(SPACING / 10, dtype=torch.bfloat16).item()
    expected = torch.tensor(1 + 200 * gradient).to(torch.bfloat16)
    kept, remainder, at_random, without = run_ranks(_small_updates, world, shard)[0]
    assert torch.equal(kept, expected.expand(301))
    assert torch.equal(remainder, expected.expand(301))
    # 301 walks of 200 steps, each up with probability 0.1: the mean has a deviation of sqrt(200 * 0.09 / 301) = 0.25
    # spacings (twice that beyond 1 + 1: there the spacing is two).
    assert abs(at_random.to(torch.float64).mean().item() - expected.item()) < 4.5 * 0.5 * SPACING
    assert torch.equal(without, torch.ones(301, dtype=torch.bfloat16))


# --- parameters that somebody changes ---------------------------------------------------------------------------------


def _changed(rank, world, mode, shard, views):
    twins = MasterTwins(torch.optim.AdamW, mode, sharded={"shard": shard, "parameters_as_bucket_view": views}, lr=0.003)
    twins.step(5)
    before = [twins.opt.full_state(param)["master_weight"] for param in twins.ours]
    changed = twins.ours[3].detach().view(-1)
    changed[3:500:7] = 0.5
    changed[4] = 0.0
    changed[5] = -0.0
    twins.ours[1].data = twins.ours[1].data * 2  # other memory, too
    expected = []
    for param, master in zip(twins.ours, before, strict=True):
        same = rounded(master, torch.bfloat16).view(torch.int16) == param.detach().view(torch.int16)
        if mode == "remainder":
            low = master.view(torch.int32).to(torch.int16)
            joined = ((param.detach().view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)
            joined = torch.where(joined.isnan(), param.detach().float(), joined)
            expected.append(torch.where(same, master, joined))
        else:
            expected.append(torch.where(same, master, param.detach().float()))
    saved = [twins.opt.full_state(param)["master_weight"] for param in twins.ours]
    assert all(torch.equal(one, other) for one, other in zip(saved, expected, strict=True)), "what is saved follows"
    for copy, value in zip(twins.theirs, expected, strict=True):
        copy.data.copy_(value)
    twins.step(3)
    twins.check(f"{mode} {shard}")
    twins.opt.check_replicas()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("shard", ["element", "tensor"])
@pytest.mark.parametrize("mode", KEPT)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_masters_follow_parameters_that_somebody_changed(world, mode, shard, views):
    run_ranks(_changed, world, mode, shard, views)


# --- clipping, accumulation, scaling ----------------------------------------------------------------------------------


def make_model(dtype):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(9, 23), nn.Tanh(), nn.Linear(23, 5)).to(dtype)


def _clipped(rank, world, mode):
    """Sharded gradients in float32: the norm, the scaling and the sum of three backwards are float32."""
    model = make_model(torch.bfloat16)
    params = list(model.parameters())
    copies = [Parameter(param.detach().float()) for param in params]
    plain = torch.optim.AdamW(copies, lr=0.01)
    opt = ZeroRedundancyOptimizer(
        params,
        torch.optim.AdamW,
        lr=0.01,
        master_weights=mode,
        shard_gradients=True,
        reduce_dtype=torch.float32,
        bucket_cap_mb=SMALL,
    )
    for step in range(4):
        opt.zero_grad()
        for part in range(3):
            with opt.no_sync() if part < 2 else torch.enable_grad():
                model(values((4, 9), 100 * step + 10 * part + rank, torch.bfloat16)).float().pow(2).sum().backward()
        gradients = [opt.full_grad(param).clone() for param in params]
        assert all(gradient.dtype == torch.float32 for gradient in gradients)
        low = torch.cat([gradient.view(-1).view(torch.int32) & 0xFFFF for gradient in gradients])
        assert low.count_nonzero() > low.numel() / 2, "nothing was rounded to bfloat16 on the way"
        norm = opt.clip_grad_norm_(0.5)
        expected = torch.linalg.vector_norm(torch.cat([gradient.view(-1) for gradient in gradients]).double())
        torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
        for copy, param in zip(copies, params, strict=True):
            copy.grad = opt.full_grad(param)
        opt.step()
        plain.step()
    for param, copy in zip(params, copies, strict=True):
        assert torch.equal(opt.full_state(param)["master_weight"], copy.detach())


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("mode", KEPT)
def test_accumulation_norms_and_clipping_are_float32_with_reduce_dtype(world, mode):
    run_ranks(_clipped, world, mode)


def _clipped_in_16_bits(rank, world):
    """Gradients that stay bfloat16 are multiplied in float32 and rounded once."""
    param = Parameter(values((301,), 1, torch.bfloat16))
    opt = ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=1.0, master_weights=torch.float32)
    param.grad = values((301,), 2, torch.bfloat16)
    wide = param.grad.float()
    norm = opt.clip_grad_norm_(1.0)
    factor = 1.0 / (norm + 1e-6)
    torch.testing.assert_close(norm, torch.linalg.vector_norm(wide), rtol=1e-6, atol=0)
    assert torch.equal(param.grad, (wide * factor).to(torch.bfloat16))
    before = param.detach().float()
    opt.step()
    assert torch.equal(opt.full_state(param)["master_weight"], before - param.grad.float())


def test_clipping_gradients_in_16_bits_rounds_once():
    run_ranks(_clipped_in_16_bits, 2)


SCALE = 2.0**8


def _scaled(rank, world, sharded, mode, shard):
    """float16 with a scaler: an inf on the last rank skips steps 1 and 2 on all. Oracle: float32 copies, unscaled."""
    model = make_model(torch.float16)
    params = list(model.parameters())
    norm_scale = Parameter(torch.ones(3))  # a float32 parameter among them
    net = model if sharded else DistributedDataParallel(model)
    groups = [{"params": params}, {"params": [norm_scale]}]
    options = {"shard_gradients": True, "reduce_dtype": torch.float32} if sharded else {}
    opt = ZeroRedundancyOptimizer(
        groups, torch.optim.AdamW, lr=0.01, master_weights=mode, shard=shard, bucket_cap_mb=SMALL, **options
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=100)
    copies = [Parameter(param.detach().float()) for param in [*params, norm_scale]]
    plain = torch.optim.AdamW(copies, lr=0.01)
    skipped = []
    for step in range(6):
        opt.zero_grad()
        inputs = values((4, 9), 100 * step + rank, torch.float16)
        if step in (1, 2) and rank == world - 1:
            inputs[0, 0] = float("inf")
        loss = net(inputs).float().pow(2).mean() + (norm_scale * torch.arange(3)).sum()
        scaler.scale(loss).backward()
        if sharded or world == 1:
            found = [opt.full_grad(param) for param in [*params, norm_scale]]
        else:
            found = [param.grad for param in params] + [norm_scale.grad]
        finite = all(gradient.isfinite().all() for gradient in found)
        for copy, gradient in zip(copies, found, strict=True):
            copy.grad = gradient.detach().clone().float() / scaler.get_scale()
        opt.clip_grad_norm_(1e6 * scaler.get_scale())  # in units of the scaled gradients: here nothing to do
        before = [param.detach().clone() for param in [*params, norm_scale]]
        scaler.step(opt)
        scaler.update()
        if finite:
            plain.step()
        else:
            after = [param.detach() for param in [*params, norm_scale]]
            assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
            skipped.append(step)
    assert skipped == [1, 2]
    assert scaler.get_scale() == SCALE / 4
    for param, copy in zip(params, copies, strict=False):
        master = opt.full_state(param)["master_weight"]
        assert torch.equal(master, copy.detach())
        assert torch.equal(param.detach(), rounded(master, torch.float16))
    assert torch.equal(norm_scale.detach(), copies[-1].detach())
    opt.check_replicas()


@pytest.mark.parametrize("shard", ["element", "tensor"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("world", [1, 3])
def test_a_scaler_steps_float16_masters_and_an_inf_on_one_rank_skips_on_all(world, sharded, shard):
    run_ranks(_scaled, world, sharded, torch.float32, shard)


# --- groups, freezing, dtypes -----------------------------------------------------------------------------------------


def _mixed(rank, world, shard):
    dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.bfloat16, torch.bfloat16]
    shapes = [(7, 5), (11,), (6, 6), (5, 3), (67, 3), (9,)]
    ours = [Parameter(values(shape, 7 + i, dtype)) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]
    modes = ["remainder", torch.float32, "stochastic"]
    wide = [torch.float32 if param.dtype in (torch.bfloat16, torch.float16) else param.dtype for param in ours]
    theirs = [Parameter(param.detach().to(dtype)) for param, dtype in zip(ours, wide, strict=True)]
    split = [ours[:2], ours[2:5], ours[5:]]
    groups = [{"params": part, "master_weights": mode} for part, mode in zip(split, modes, strict=True)]
    opt = ZeroRedundancyOptimizer(groups[:2], torch.optim.AdamW, lr=0.01, shard=shard, bucket_cap_mb=SMALL)
    plain = torch.optim.AdamW(theirs[:5], lr=0.01)
    for step in range(9):
        if step == 2:
            opt.add_param_group(groups[2])
            opt.add_param_group({"params": [late := Parameter(values((13, 3), 55, torch.bfloat16))]})
            opt.add_param_group(
                {"params": [last := Parameter(values((13, 3), 56, torch.bfloat16))], "master_weights": torch.float32}
            )
            ours.append(last)
            theirs.append(Parameter(last.detach().float()))
            plain.add_param_group({"params": [theirs[6]]})
        ours[0].requires_grad_(not 3 <= step < 5)
        ours[4].requires_grad_(step < 6)
        for i, (mine, copy) in enumerate(zip(ours, theirs, strict=True)):
            mine.grad = copy.grad = None
            if mine.requires_grad:
                mine.grad = values(mine.shape, 100 * step + i, mine.dtype)
                copy.grad = mine.grad.to(copy.dtype)
        if step >= 2:
            late.grad = values(late.shape, step, late.dtype)
        opt.step()
        plain.step()
    for i, (mine, copy) in enumerate(zip(ours, theirs, strict=True)):
        state = opt.full_state(mine)
        if i in (1, 3):
            assert torch.equal(mine.detach(), copy.detach())
            assert "master_weight" not in state
        elif i != 5:
            assert torch.equal(state["master_weight"], copy.detach()), i
            assert torch.equal(mine.detach(), rounded(copy.detach(), mine.dtype))
    assert opt.full_state(late)["exp_avg"].dtype == torch.bfloat16  # a group without masters
    assert opt.full_state(ours[5])["exp_avg"].dtype == torch.float32  # rounded at random, stepped in float32
    opt.check_replicas()


@pytest.mark.parametrize("shard", ["element", "tensor"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_groups_of_all_modes_several_dtypes_freezing_and_groups_added_later(world, shard):
    run_ranks(_mixed, world, shard)


def _schedule_free(rank, world, mode):
    from schedulefree import AdamWScheduleFree

    twins = MasterTwins(AdamWScheduleFree, mode, lr=0.01, warmup_steps=2)
    for _ in range(3):
        for optimizer in (twins.opt, twins.plain):
            optimizer.train()
        twins.step(3)
        twins.check("training")
        for optimizer in (twins.opt, twins.plain):
            optimizer.eval()
        twins.check("evaluating")
    return twins.opt.memory()


@pytest.mark.parametrize("mode", KEPT)
@pytest.mark.parametrize("world", [1, 3])
def test_schedule_free_masters_train_and_evaluate(world, mode):
    for memory in run_ranks(_schedule_free, world, mode):
        owned = memory.masters / (4 if mode == torch.float32 else 2)
        assert memory.scratch >= owned * 4, "its step cannot be split: all at once"


def _moving_first(rank, world, mode):
    from schedulefree import AdamWScheduleFreeClosure

    twins = MasterTwins(AdamWScheduleFreeClosure, mode, lr=0.01)
    for step in range(4):

        def closure(params, step=step):
            for i, param in enumerate(params):
                gradient = twins.ours[i].detach().float() * values(param.shape, 100 * step + i, torch.float32)
                param.grad = gradient.to(torch.bfloat16).to(param.dtype)

        seen = []
        twins.opt.step(lambda seen=seen: (closure(twins.ours), seen.extend(p.grad for p in twins.ours)))

        def follow(seen=seen):
            for copy, gradient in zip(twins.theirs, seen, strict=True):
                copy.grad = gradient.float()

        twins.plain.step(follow)
        twins.check(f"step {step}")


@pytest.mark.parametrize("mode", KEPT)
def test_an_optimizer_that_moves_before_its_closure_moves_masters(mode):
    run_ranks(_moving_first, 3, mode)


def _eight_bit(rank, world):
    from bitsandbytes.optim import AdamW8bit

    shapes = [(128, 64), (64,), (5000,)]
    for sharded in ({"shard": "tensor", "parameters_as_bucket_view": True}, {}):  # (the second: as the probe decides)
        twins = MasterTwins(AdamW8bit, KEPT, shapes=shapes, sharded=sharded, lr=0.01)
        twins.step(10)
        twins.check(f"8 bit {sharded}")


def test_blocks_of_8_bit_state_see_float32():
    pytest.importorskip("bitsandbytes")
    run_ranks(_eight_bit, 3)


def _channels_last(rank, world, mode):
    ours = [
        Parameter(values((8, 3, 4, 4), 1, torch.bfloat16).to(memory_format=torch.channels_last)),
        Parameter(values((40,), 2, torch.bfloat16)),
    ]
    theirs = [Parameter(param.detach().float()) for param in ours]
    opt = ZeroRedundancyOptimizer(ours, torch.optim.AdamW, lr=0.01, master_weights=mode)
    plain = torch.optim.AdamW(theirs, lr=0.01)
    for step in range(5):
        for i, (mine, copy) in enumerate(zip(ours, theirs, strict=True)):
            mine.grad = values(mine.shape, 10 * step + i, mine.dtype)
            copy.grad = mine.grad.float()
        opt.step()
        plain.step()
    for mine, copy in zip(ours, theirs, strict=True):
        assert torch.equal(opt.full_state(mine)["master_weight"], copy.detach())
        assert torch.equal(mine.detach(), rounded(copy.detach(), torch.bfloat16))


@pytest.mark.parametrize("mode", KEPT)
@pytest.mark.parametrize("world", [1, 3])
def test_a_parameter_in_another_order_of_memory(world, mode):
    run_ranks(_channels_last, world, mode)


# --- reports ----------------------------------------------------------------------------------------------------------


def _memory(rank, world, mode):
    params = [Parameter(values((64, 100), i, torch.bfloat16)) for i in range(12)]
    opt = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.01, master_weights=mode, bucket_cap_mb=0.05)
    assert opt.memory().masters == 0
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step()
    return opt.memory(), opt.layout.owned_elements(rank)


@pytest.mark.parametrize("mode", [None, *MODES])
def test_memory_counts_masters_apart(mode):
    each = {torch.float32: 4, "remainder": 2}.get(mode, 0)
    for memory, owned in run_ranks(_memory, 3, mode):
        assert memory.masters == pytest.approx(owned * each, rel=0.02)
        assert memory.parameters == 12 * 6400 * 2
        assert memory.state == pytest.approx(owned * (8 if mode is not None else 4), rel=0.02)
        # One bucket of four at a time: gradients and masters in float32, a copy of the parameters, a block to work in
        # (these buckets are smaller than one), and 6 bytes per element of it for random numbers.
        scratch = {None: 0, "stochastic": 4 + 4 + 2 + 4 + 6}.get(mode, 4 + 4 + 2 + 4)
        assert memory.scratch <= owned / 2.8 * scratch
        assert (memory.scratch > 0) == (mode is not None)


def _lost(rank, world, mode, shard):
    """Of two groups: one moves by a tenth of a spacing, the other by ten; a third of the first has no gradient."""
    small, large = Parameter(torch.ones(300, dtype=torch.bfloat16)), Parameter(torch.ones(70, dtype=torch.bfloat16))
    groups = [{"params": [small]}, {"params": [large]}]
    opt = ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=1.0, master_weights=mode, shard=shard)
    with opt.count_lost_updates() as lost:
        for _ in range(3):
            small.grad = torch.full_like(small, -SPACING / 10)
            small.grad[200:] = 0
            large.grad = torch.full_like(large, -10 * SPACING)
            opt.step()
    first = lost.by_group
    with opt.count_lost_updates() as none:
        pass
    for _ in range(2):
        opt.step()
    return first, none.by_group


@pytest.mark.parametrize("shard", ["element", "tensor"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_lost_updates_are_counted_by_group(world, shard):
    for mode in [None, *KEPT]:
        for first, none in run_ranks(_lost, world, mode, shard):
            assert first == [pytest.approx(2 / 3), 0.0], mode
            assert none == [0.0, 0.0]
    for first, _ in run_ranks(_lost, world, "stochastic", shard):
        # 600 updates, of which each is lost with a probability of 0.9: a deviation of 0.012, of two thirds.
        assert first[0] == pytest.approx(2 / 3 * 0.9, abs=4.5 * 0.012)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_an_error_that_names_group_dtype_and_remedy():
    def bf16():
        return Parameter(torch.ones(3, dtype=torch.bfloat16))

    def half():
        return Parameter(torch.ones(3, dtype=torch.float16))

    def build(params, **options):
        return lambda: ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=1.0, **options)

    cases = [
        (build([bf16()], master_weights="float32"), ["expects None, torch.float32", "'float32'", "Use torch.float32"]),
        (build([bf16()], master_weights=torch.bfloat16), ["torch.bfloat16"]),
        (build([{"params": [bf16()]}, {"params": [bf16()], "master_weights": 3}]), ["parameter group 1", "3"]),
        (build([bf16(), half()], master_weights="remainder"), ["parameter group 0", "float16", "Use torch.float32"]),
        (build([Parameter(torch.ones(3))], master_weights=torch.float32), ["float32 only", "Drop it"]),
        (
            build([{"params": [bf16()]}, {"params": [Parameter(torch.ones(3))], "master_weights": "remainder"}]),
            ["parameter group 1", "float32 only", "Drop master_weights"],
        ),
        (
            build([{"params": [bf16()]}, {"params": [], "master_weights": torch.float32}]),
            ["parameter group 1", "the group has no parameters.", "Drop master_weights"],
        ),
        (build([bf16()], master_weights=True), ["got True"]),
        (build([bf16()], master_weights="stochastic", rounding_seed="x"), ["rounding_seed", "'x'"]),
        (build([bf16()], master_weights="stochastic", rounding_seed=True), ["rounding_seed", "True"]),
    ]
    for call, parts in cases:
        error = error_of(call)
        assert isinstance(error, ValueError), error
        assert all(part in str(error) for part in parts), error
    opt = build([bf16()], master_weights="remainder")()
    error = error_of(lambda: opt.add_param_group({"params": [half()]}))
    assert "parameter group 1" in str(error)
    opt.add_param_group({"params": [Parameter(torch.ones(3))]})  # stays as it is


def _unlike(rank, world, what):
    param = Parameter(torch.ones(30, dtype=torch.bfloat16))
    options = {
        "mode": {"master_weights": torch.float32 if rank else "remainder"},
        "seed": {"master_weights": "stochastic", "rounding_seed": rank},
    }[what]
    error = error_of(lambda: ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=1.0, **options))
    return str(error)


@pytest.mark.parametrize(("what", "word"), [("mode", "master_weights"), ("seed", "rounding_seed")])
def test_ranks_that_disagree_about_masters_are_told(what, word):
    for text in run_ranks(_unlike, 3, what, fresh=True):
        assert word in text, text


def _odd_shapes(rank, world, mode, cls):
    import pickle

    shapes = [(0,), (), (5,), (3, 0), (1, 1), (33,)]
    twins = MasterTwins(cls, mode, shapes=shapes, sharded={"shard": "element"}, lr=0.01)
    frozen = Parameter(torch.ones(4000, dtype=torch.bfloat16), requires_grad=False)
    twins.opt.add_param_group({"params": [frozen], "master_weights": mode})
    twins.step(3)
    for position, (mine, theirs) in enumerate(zip(twins.ours, twins.theirs, strict=True)):
        state = twins.opt.full_state(mine)
        if mine.numel():
            assert torch.equal(state["master_weight"], theirs.detach()), position
            assert torch.equal(mine.detach(), rounded(theirs.detach(), torch.bfloat16)), position
    assert twins.opt.memory().masters < 4000, "what is frozen costs nothing"
    ours, opt = pickle.loads(pickle.dumps((twins.ours, twins.opt)))
    for params, optimizer in ((twins.ours, twins.opt), (ours, opt)):
        for i, param in enumerate(params):
            param.grad = values(param.shape, i, torch.bfloat16)
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(ours, twins.ours, strict=True))


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adagrad])  # Adagrad makes its state when it is built
@pytest.mark.parametrize("world", [1, 3])
def test_empty_and_0_dim_parameters_frozen_ones_and_pickling(world, cls):
    for mode in KEPT:
        run_ranks(_odd_shapes, world, mode, cls)
