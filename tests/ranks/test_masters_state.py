"""float32 masters in state dicts and checkpoints: between modes, numbers of ranks, and the plain class; exactly."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shardstep import ZeroRedundancyOptimizer, checkpoint
from shardstep.tools import cli
from tests.harness import run_ranks
from tests.ranks.test_masters import KEPT, SMALL, rounded
from tests.state_forms import FORMS, load, save
from tests.twins import assert_same, values


def make_model(dtype=torch.bfloat16):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(9, 23), nn.Linear(23, 31), nn.Linear(31, 5)).to(dtype)


def build(model, mode, shard="element", cls=torch.optim.AdamW, **options):
    options = {"lr": 0.01, **options}
    return ZeroRedundancyOptimizer(
        model.named_parameters(), cls, shard=shard, bucket_cap_mb=SMALL, master_weights=mode, **options
    )


def train(model, opt, steps, skip=()):
    for step in steps:
        for i, param in enumerate(model.parameters()):
            found = values(param.shape, 1000 * step + i, torch.bfloat16).to(param.dtype)
            param.grad = None if i in skip else found
        opt.step()


def outcome(model, opt):
    return [param.detach().clone() for param in model.parameters()], [
        opt.full_state(param) for param in model.parameters()
    ]


def plain_outcome(steps, cls=torch.optim.AdamW, **options):
    """The plain class over float32 copies."""
    model = make_model().to(torch.float32)
    opt = cls(model.parameters(), **{"lr": 0.01, **options})
    train(model, opt, range(steps))
    return [param.detach() for param in model.parameters()], opt


def check_against_plain(found, steps):
    masters, opt = plain_outcome(steps)
    weights, states = found
    for weight, state, master, entry in zip(weights, states, masters, opt.state.values(), strict=True):
        assert_same(state["master_weight"], master, "master")
        assert_same({key: state[key] for key in entry}, dict(entry), "state")
        assert torch.equal(weight, rounded(master, torch.bfloat16))


def _save(rank, world, mode, shard, form, path):
    model = make_model()
    opt = build(model, mode, shard)
    train(model, opt, range(4))
    return save(form, model, opt, path)


def _load(rank, world, mode, shard, form, path, saved):
    model = make_model()
    for param in model.parameters():
        param.data.zero_()  # the masters write the parameters
    opt = build(model, mode, shard)
    load(form, model, opt, path, saved)
    loaded = outcome(model, opt)
    train(model, opt, range(4, 7))
    opt.check_replicas()
    return loaded, outcome(model, opt)


@pytest.mark.extended
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("first", KEPT)
def test_masters_go_from_mode_to_mode_and_to_any_number_of_ranks(form, first, tmp_path):
    second = next(mode for mode in KEPT if mode != first)
    saved = run_ranks(_save, 3, first, "element", form, tmp_path / "saved")[0]
    for world, mode, shard in ((2, second, "element"), (3, first, "tensor")):
        loaded, later = run_ranks(_load, world, mode, shard, form, tmp_path / "saved", saved)[0]
        check_against_plain(loaded, 4)
        check_against_plain(later, 7)


def _to_plain(rank, world, mode):
    model = make_model()
    opt = build(model, mode)
    train(model, opt, range(4))
    opt.consolidate_state_dict()
    return opt.state_dict()


def _from_plain(rank, world, mode, state, masters):
    model = make_model()
    opt = build(model, mode)
    for entry, master in zip(state["state"].values(), masters, strict=True):
        entry["master_weight"] = master
    opt.load_state_dict(state)
    train(model, opt, range(4, 7))
    return outcome(model, opt)


@pytest.mark.parametrize("mode", KEPT)
def test_to_and_from_the_plain_class_over_float32_parameters(mode):
    state = run_ranks(_to_plain, 3, mode)[0]
    model = make_model(torch.float32)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    for i, param in enumerate(model.parameters()):
        param.data.copy_(state["state"][i].pop("master_weight"))
    opt.load_state_dict(state)
    train(model, opt, range(4, 7))
    expected, _ = plain_outcome(7)
    assert all(torch.equal(param, other) for param, other in zip(model.parameters(), expected, strict=True))

    masters, plain = plain_outcome(4)
    state = plain.state_dict()
    state["param_groups"][0]["param_names"] = [name for name, _ in model.named_parameters()]
    check_against_plain(run_ranks(_from_plain, 3, mode, state, masters)[0], 7)


def _checkpoint_into_plain(rank, world, path):
    model = make_model()
    opt = build(model, "remainder")
    train(model, opt, range(4))
    checkpoint.save(path, opt, model)


def test_a_plain_optimizer_over_float32_parameters_loads_a_checkpoint_with_masters(tmp_path):
    run_ranks(_checkpoint_into_plain, 3, tmp_path / "saved")
    model = make_model(torch.float32)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpoint.load(tmp_path / "saved", opt, model)
    train(model, opt, range(4, 7))
    expected, _ = plain_outcome(7)
    assert all(torch.equal(param, other) for param, other in zip(model.parameters(), expected, strict=True))


def _from_plain_checkpoint(rank, world, mode, shard, path):
    model = make_model()
    opt = build(model, mode, shard)
    checkpoint.load(path, opt, model)
    train(model, opt, range(4, 7))
    return outcome(model, opt)


@pytest.mark.parametrize("shard", ["element", "tensor"])
@pytest.mark.parametrize("mode", KEPT)
def test_a_checkpoint_of_the_plain_class_over_float32_parameters_gives_the_masters(mode, shard, tmp_path):
    model = make_model().to(torch.float32)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, opt, range(4))
    checkpoint.save(tmp_path / "saved", opt, model)
    check_against_plain(run_ranks(_from_plain_checkpoint, 3, mode, shard, tmp_path / "saved")[0], 7)


def _saved_for_tools(rank, world, mode, path):
    model = make_model()
    opt = build(model, mode)
    train(model, opt, range(4), skip=(1,))
    checkpoint.save(path, opt, model)
    return [(param.detach(), opt.full_state(param).get("master_weight")) for param in model.parameters()]


@pytest.mark.parametrize("mode", KEPT)
def test_the_command_line_shows_masters_and_writes_the_model_from_them(mode, tmp_path, capsys):
    saved = run_ranks(_saved_for_tools, 3, mode, tmp_path / "saved")[0]
    assert cli.main(["inspect", str(tmp_path / "saved")]) == 0
    printed = capsys.readouterr().out
    assert "optim.state.0.weight.master_weight" in printed
    assert "float32 masters of 5 parameters" in printed
    assert cli.main(["convert", str(tmp_path / "saved"), str(tmp_path / "model.pt"), "--master"]) == 0
    written = torch.load(tmp_path / "model.pt", weights_only=True)
    model = make_model(torch.float32)
    model.load_state_dict(written)
    for (param, master), value in zip(saved, model.parameters(), strict=True):
        assert torch.equal(value.detach(), param.float() if master is None else master)
    assert [master is None for _, master in saved] == [False, True, False, False, False, False]
    assert cli.main(["convert", str(tmp_path / "saved"), str(tmp_path / "narrow.pt"), "--part", "model"]) == 0
    assert torch.load(tmp_path / "narrow.pt", weights_only=True)["0.weight"].dtype == torch.bfloat16
    capsys.readouterr()
    assert cli.main(["convert", str(tmp_path / "saved"), "x.pt", "--master", "--part", "optim"]) == 2
    assert "--master expects a model" in capsys.readouterr().err


def test_without_masters_the_command_line_says_so(tmp_path, capsys):
    run_ranks(_saved_for_tools, 1, None, tmp_path / "saved")
    assert cli.main(["convert", str(tmp_path / "saved"), str(tmp_path / "model.pt"), "--master"]) == 2
    assert "expects a checkpoint with float32 masters" in capsys.readouterr().err
    assert not (tmp_path / "model.pt").exists()


def _partly_stepped(rank, world, mode, cls):
    model = make_model()
    opt = build(model, mode, cls=cls)
    train(model, opt, range(3), skip=(0, 3))
    states = [opt.full_state(param) for param in model.parameters()]
    opt.consolidate_state_dict()
    state = opt.state_dict()
    other = make_model()
    twin = build(other, mode, cls=cls)
    for param, value in zip(other.parameters(), model.parameters(), strict=True):
        param.data.copy_(value.detach())
    twin.load_state_dict(state if world == 1 else _shared(state, opt))
    for which, trained in ((model, opt), (other, twin)):
        train(which, trained, range(3, 5))
    same = [torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)]
    return [sorted(state) for state in states], same


def _shared(state, opt):
    import torch.distributed as dist

    box = [state]
    dist.broadcast_object_list(box, 0)
    return box[0]


@pytest.mark.parametrize("mode", KEPT)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_parameters_that_were_never_stepped_have_no_master(mode, cls):
    for world in (1, 3):
        for keys, same in run_ranks(_partly_stepped, world, mode, cls):
            assert all("master_weight" in found for i, found in enumerate(keys) if i not in (0, 3))
            assert not any("master_weight" in found for i, found in enumerate(keys) if i in (0, 3))
            assert all(same)


def _copied(rank, world, mode):
    model = make_model()
    opt = build(model, mode)
    train(model, opt, range(3))
    other, twin = copy.deepcopy((model, opt))
    for which, trained in ((model, opt), (other, twin)):
        train(which, trained, range(3, 6))
    for one, two in zip(outcome(model, opt), outcome(other, twin), strict=True):
        assert_same(one, two, "copy")
    check_against_plain(outcome(other, twin), 6)


@pytest.mark.parametrize("mode", KEPT)
def test_a_copy_of_the_optimizer_has_its_own_masters(mode):
    run_ranks(_copied, 3, mode)
