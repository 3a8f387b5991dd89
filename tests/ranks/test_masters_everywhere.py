"""What holds for float32 masters, wherever gradients come from: the default mode, sharded gradients, every hook.

Small updates survive, masters follow changed parameters, lost updates are counted, parameters are frozen and thawed,
groups are added, a scaler skips. (``test_masters_around.py`` has more of each, in the default mode.)
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from tests.harness import run_ranks
from tests.ranks.test_masters import KEPT, rounded
from tests.ranks.test_masters_modes import WAYS, Run, connect
from tests.twins import values

pytestmark = pytest.mark.extended  # the other files about masters have a cheaper test of each claim

SPACING = 2.0**-7  # of bfloat16, between 1 and 2
MODES = [*KEPT, "stochastic", None]


class Pushed(nn.Module):
    """A parameter for each mode; the gradient of every element is ``push`` of it."""

    def __init__(self, numel=301):
        super().__init__()
        self.params = nn.ParameterList(Parameter(torch.ones(numel, dtype=torch.bfloat16)) for _ in MODES)

    def forward(self, push):
        return torch.stack([(param * push).sum() for param in self.params]).sum()

    def groups(self):
        return [{"params": [param], "master_weights": mode} for param, mode in zip(self.params, MODES, strict=True)]


# --- small updates ----------------------------------------------------------------------------------------------------


def _small_updates(rank, world, way, shards):
    push = torch.full((301,), -SPACING / 10, dtype=torch.bfloat16)
    found = []
    for shard in shards:
        model = Pushed()
        net, opt = connect(way, model, model.groups(), torch.optim.SGD, lr=1.0, shard=shard)
        for _ in range(200):
            opt.zero_grad()
            net(push).backward()
            opt.step()
        opt.check_replicas()
        found.append([param.detach().double() for param in model.params])
    return found


@pytest.mark.parametrize(
    ("world", "shards"), [(1, ["element"]), (2, ["tensor"]), (3, ["element", "tensor"]), (4, ["element"])]
)
@pytest.mark.parametrize("way", WAYS)
def test_200_steps_of_a_tenth_of_the_spacing_arrive_wherever_gradients_come_from(way, world, shards):
    """(DDP divides in bfloat16 before it adds up: at 3 ranks a step is a tenth within 1 %, 0.2 spacings after 200.)"""
    expected = 1 + 200 * torch.tensor(SPACING / 10, dtype=torch.bfloat16).item()
    for kept, remainder, at_random, without in run_ranks(_small_updates, world, way, shards)[0]:
        assert (kept - expected).abs().max() <= SPACING
        assert torch.equal(kept, remainder)
        # 301 walks of 200 steps, each up with probability 0.1: the mean has a deviation of 0.25 spacings.
        assert abs(at_random.mean().item() - expected) < (4.5 * 0.25 + 0.2) * SPACING
        assert torch.equal(without, torch.ones_like(without))  # the negative control


# --- parameters that somebody changes ---------------------------------------------------------------------------------


def followed(mode, master, param):
    """What the master of a parameter is that somebody has changed."""
    same = rounded(master, torch.bfloat16).view(torch.int16) == param.detach().view(torch.int16)
    if mode != "remainder":
        return torch.where(same, master, param.detach().float())
    low = master.view(torch.int32).to(torch.int16)
    joined = ((param.detach().view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)
    return torch.where(same, master, joined)


def change(run, how, step):
    """On every rank alike."""
    if how == "elements":
        with torch.no_grad():
            run.params[2].view(-1)[3:500:7] = 0.5
            run.params[1][4] = -3.0
    elif how == "copied data":
        for i, param in enumerate(run.params[:3]):
            param.data.copy_(values(param.shape, 70 + i + step, torch.bfloat16))
    elif how == "loaded":
        state = {key: value.clone() for key, value in run.model.state_dict().items()}
        state["2.weight"][5:] *= 2
        state["4.bias"].zero_().add_(0.25)
        run.model.load_state_dict(state)
    elif how == "other memory":
        run.params[0].data = run.params[0].data * 2
        run.params[3].data = run.params[3].data.clone()
    else:
        raise ValueError(how)


CHANGES = ("elements", "copied data", "loaded", "other memory")


def _changed(rank, world, way, options):
    for mode in KEPT:
        for shard in ("element", "tensor"):
            run = Run(way, mode, shard, **options)
            for step, how in enumerate(CHANGES):
                where = f"{way} {mode} {shard} {options} {how}"
                run.iterate(rank, 2 * step)
                before = [run.opt.full_state(param)["master_weight"] for param in run.params]
                change(run, how, step)
                expected = [followed(mode, master, param) for master, param in zip(before, run.params, strict=True)]
                moved = sum((one != other).sum().item() for one, other in zip(expected, before, strict=True))
                assert moved > 0, "the case that this test is about"
                for copy, param, value in zip(run.copies, run.params, expected, strict=True):
                    if step % 2:  # whether somebody reads them first changes nothing
                        assert torch.equal(run.opt.full_state(param)["master_weight"], value), where
                    copy.data.copy_(value)
                run.iterate(rank, 2 * step + 1)
                run.check(where)


@pytest.mark.parametrize("world", [3, pytest.param(2, marks=pytest.mark.again)])
@pytest.mark.parametrize("way", WAYS)
def test_masters_follow_changed_parameters_wherever_gradients_come_from(way, world):
    """Changed in place, through ``data``, by ``load_state_dict`` and by other memory; both modes and granularities."""
    run_ranks(_changed, world, way, {})


@pytest.mark.parametrize("options", [{"parameters_as_bucket_view": True}, {"lazy_gather": True}], ids=str)
@pytest.mark.parametrize("way", ["ddp", "sharded", "under ddp"])
def test_masters_follow_changed_parameters_with_bucket_views_and_lazy_gathers(way, options):
    run_ranks(_changed, 3, way, options)


def _changed_in_hooks_with_views(rank, world):
    for way in ("hook", "interleaved", "scattering hook"):
        _changed(rank, world, way, {"parameters_as_bucket_view": True})


def test_masters_follow_changed_parameters_in_the_hooks_with_bucket_views():
    run_ranks(_changed_in_hooks_with_views, 3)


# --- updates that are lost --------------------------------------------------------------------------------------------


def _lost(rank, world, way, shard):
    """A tenth of a spacing for 200 elements of 301, nothing for the others; then ten spacings."""
    small = torch.full((301,), -SPACING / 10, dtype=torch.bfloat16)
    small[200:] = 0
    model = Pushed()
    net, opt = connect(way, model, model.groups(), torch.optim.SGD, lr=1.0, shard=shard)
    shares = []
    for push in (small, small * 100):
        with opt.count_lost_updates() as lost:
            for _ in range(2):
                opt.zero_grad()
                net(push).backward()
                opt.step()
        shares.append(lost.by_group)
    return shares


@pytest.mark.parametrize("shard", ["element", "tensor"])
@pytest.mark.parametrize("way", WAYS)
def test_lost_updates_are_counted_wherever_gradients_come_from(way, shard):
    for small, large in run_ranks(_lost, 3, way, shard):
        kept, remainder, at_random, without = small
        assert [kept, remainder, without] == [pytest.approx(200 / 301)] * 3
        # 400 updates, each lost with probability 0.9: a deviation of 0.015, of two thirds.
        assert at_random == pytest.approx(0.9 * 200 / 301, abs=4.5 * 0.015)
        assert large == [0.0] * 4


# --- freezing, groups, scaling ----------------------------------------------------------------------------------------


def _frozen(rank, world, way):
    """The middle layer is frozen for two steps: its masters stay, bit for bit, and go on afterwards."""
    for mode, shard in zip(KEPT, ("element", "tensor"), strict=True):
        run = Run(way, mode, shard, ddp={"find_unused_parameters": True})
        for step in range(6):
            frozen = step in (2, 3)
            for param in run.params[2:4]:
                param.requires_grad_(not frozen)
            kept = [run.opt.full_state(param) for param in run.params[2:4]] if step == 2 else []
            run.iterate(rank, step)
            run.check(f"{way} {mode} {shard} step {step}")
            for param, before in zip(run.params[2:4], kept, strict=False):
                assert torch.equal(run.opt.full_state(param)["master_weight"], before["master_weight"])


@pytest.mark.parametrize("way", WAYS)
def test_masters_of_frozen_parameters_stay_and_go_on_wherever_gradients_come_from(way):
    run_ranks(_frozen, 3, way)


class Branching(nn.Module):
    """Of three layers the middle one is used only if asked for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(17, 17) for _ in range(3)).to(torch.bfloat16)

    def forward(self, inputs, with_middle):
        out = torch.tanh(self.layers[0](inputs))
        out = torch.tanh(self.layers[1](out)) if with_middle else out
        return self.layers[2](out)


def _accumulated(rank, world, way):
    """Two backwards for a step, the first without reducing; clipped; in the first two steps a layer is unused."""
    for mode, shard in zip(KEPT, ("element", "tensor"), strict=True):
        model = Branching()
        params = list(model.parameters())
        copies = [Parameter(param.detach().float()) for param in params]
        plain = torch.optim.AdamW(copies, lr=0.01, weight_decay=0.1)
        net, opt = connect(
            way,
            model,
            model.named_parameters(),
            shard=shard,
            master_weights=mode,
            weight_decay=0.1,
            ddp={"find_unused_parameters": True},
        )
        no_sync = opt.no_sync if way.startswith("sharded") else net.no_sync
        for step in range(5):
            opt.zero_grad()
            for part, context in enumerate((no_sync, contextlib.nullcontext)):
                with context():
                    batch = values((4, 17), 1000 * step + 10 * part + rank, torch.bfloat16)
                    net(batch, with_middle=step >= 2).float().pow(2).mean().backward()
            opt.clip_grad_norm_(0.3)
            for param, copy in zip(params, copies, strict=True):
                gradient = opt.full_grad(param)
                copy.grad = None if gradient is None else gradient.to(torch.float32, copy=True)
            assert (copies[2].grad is None) == (step < 2)
            opt.step()
            plain.step()
        for position, (param, copy) in enumerate(zip(params, copies, strict=True)):
            master = opt.full_state(param)["master_weight"]
            assert torch.equal(master, copy.detach()), f"{way} {mode} {shard}: {position}"
            assert torch.equal(param.detach(), rounded(master, torch.bfloat16)), f"{way} {mode} {shard}: {position}"
        opt.check_replicas()


@pytest.mark.parametrize("way", ["ddp", "sharded", "sharded in float32", "under ddp"])
def test_accumulation_clipping_and_unused_parameters_wherever_gradients_come_from(way):
    run_ranks(_accumulated, 3, way)


def _closures(rank, world, way):
    for mode, shard in zip(KEPT, ("element", "tensor"), strict=True):
        run = Run(way, mode, shard)
        for step in range(3):

            def closure(run=run, step=step):
                run.opt.zero_grad()
                run.backward(rank, step)
                for copy, gradient in zip(run.copies, run.gradients(), strict=True):
                    copy.grad = gradient.detach().to(torch.float32, copy=True)
                return torch.tensor(float(step))

            assert run.opt.step(closure) == step
            run.plain.step()
            run.check(f"{way} {mode} {shard}, a closure")
        run.iterate(rank, 9)
        run.check(f"{way} {mode} {shard}, after closures")


@pytest.mark.parametrize("way", ["sharded", "sharded in float32", "under ddp"])
def test_closures_step_masters_with_sharded_gradients(way):
    run_ranks(_closures, 3, way)


class Growing(nn.Module):
    """Layers of one size, of which the first are used."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in MODES).to(dtype)
        self.used = 1

    def forward(self, inputs):
        for layer in self.layers[: self.used]:
            inputs = torch.tanh(layer(inputs))
        return inputs


def _growing(rank, world, way, shard):
    """A group for each mode, one after the other, each with a layer; the plain optimizer over copies beside it."""
    model = Growing()
    wide = [torch.float32] * 6 + [torch.bfloat16] * 2  # the last group has no masters
    copies = [Parameter(param.detach().to(kind)) for param, kind in zip(model.parameters(), wide, strict=True)]
    plain = torch.optim.AdamW(copies[:2], lr=0.01)
    first = {"params": list(model.layers[0].parameters()), "master_weights": MODES[0]}
    net, opt = connect(way, model, [first], shard=shard, ddp={"find_unused_parameters": True})
    for step in range(8):
        if step and step % 2 == 0:
            place = model.used
            opt.add_param_group({"params": list(model.layers[place].parameters()), "master_weights": MODES[place]})
            plain.add_param_group({"params": copies[2 * place : 2 * place + 2]})
            model.used += 1
        opt.zero_grad()
        net(values((4, 13), 100 * step + rank, torch.bfloat16)).float().pow(2).mean().backward()
        for param, copy in zip(model.parameters(), copies[: 2 * model.used], strict=False):
            copy.grad = opt.full_grad(param).to(copy.dtype, copy=True)
        opt.step()
        plain.step()
    for position, (param, copy) in enumerate(zip(model.parameters(), copies, strict=True)):
        mode, state = MODES[position // 2], opt.full_state(param)
        if mode in KEPT:
            assert torch.equal(state["master_weight"], copy.detach()), position
            assert torch.equal(param.detach(), rounded(copy.detach(), torch.bfloat16)), position
        elif mode is None:
            assert torch.equal(param.detach(), copy.detach()), position
            assert state["exp_avg"].dtype == torch.bfloat16
        else:
            # Four roundings at random: each within a spacing of what AdamW makes of it.
            assert (param.detach().double() - copy.detach().double()).abs().max() < 4 * SPACING, position
            assert torch.equal(state["exp_avg"], plain.state[copy]["exp_avg"]), position
    opt.check_replicas()


@pytest.mark.parametrize("shard", ["element", "tensor"])
@pytest.mark.parametrize("way", ["ddp", "sharded", "sharded in float32"])
def test_groups_that_are_added_choose_their_masters(way, shard):
    run_ranks(_growing, 3, way, shard)


SCALE = 2.0**8


def _scaled(rank, world, way, dtype):
    """16 bits with a scaler. An inf on the last rank skips step 1 on all, and masters stay."""
    for shard in ("element", "tensor"):
        run = Run(way, torch.float32, shard, dtype=dtype)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=100)
        for step in range(4):
            run.opt.zero_grad()
            inputs = values((4, 9), 100 * step + rank, dtype)
            if step == 1 and rank == world - 1:
                inputs[0, 0] = float("inf")
            scaler.scale(run.net(inputs).float().pow(2).mean()).backward()
            for copy, gradient in zip(run.copies, run.gradients(), strict=True):
                copy.grad = gradient.detach().clone().float() / scaler.get_scale()
            before = scaler.get_scale()
            if dtype == torch.bfloat16 and step == 2:  # of float16 torch refuses it
                scaler.unscale_(run.opt)
            scaler.step(run.opt)
            scaler.update()
            assert (scaler.get_scale() < before) == (step == 1)
            if step != 1:
                run.plain.step()
            run.check(f"{way} {shard} step {step}") if step else None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", ["ddp", "sharded", "sharded in float32", "under ddp"])
def test_a_scaler_and_masters_wherever_gradients_come_from(way, dtype):
    run_ranks(_scaled, 3, way, dtype)


# --- classes that step differently ------------------------------------------------------------------------------------


def _not_split(rank, world, way):
    """Schedule-free optimizers step everything at once, after the last bucket."""
    from schedulefree import AdamWScheduleFree

    for mode, shard in zip(KEPT, ("element", "tensor"), strict=True):
        run = Run(way, mode, shard, AdamWScheduleFree)
        for optimizer in (run.opt, run.plain):
            optimizer.train()
        for step in range(4):
            run.iterate(rank, step)
        run.check(f"{way} {mode} {shard}")
        for optimizer in (run.opt, run.plain):
            optimizer.eval()
        run.check(f"{way} {mode} {shard} evaluating")


@pytest.mark.parametrize("way", WAYS)
def test_masters_of_optimizers_that_cannot_be_split_wherever_gradients_come_from(way):
    run_ranks(_not_split, 3, way)
