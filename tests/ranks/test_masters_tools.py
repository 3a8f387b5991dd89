"""The command line with checkpoints of every kind of master: mixed dtypes, parameters that were never stepped, ties."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from shardstep import ZeroRedundancyOptimizer, checkpoint
from shardstep.tools import cli
from tests.harness import run_ranks
from tests.ranks.test_masters import KEPT, SMALL
from tests.twins import assert_same, values

pytestmark = pytest.mark.extended  # the other files about masters have a cheaper test of each claim

MODES = [None, *KEPT, "stochastic"]
UNTOUCHED = ("late.weight", "late.bias")  # never stepped


class Mixed(nn.Module):
    """16-bit, float32, float64, tied, and buffers of three dtypes."""

    def __init__(self, half=torch.float16):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(31, 23).to(torch.bfloat16)
        self.norm = nn.BatchNorm1d(23)
        self.brief = nn.Linear(23, 5, bias=False).to(half)
        self.wide = nn.Parameter(values((7, 3), 5))
        self.late = nn.Linear(23, 4).to(torch.bfloat16)
        self.head = nn.Linear(23, 31, bias=False).to(torch.bfloat16)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([0.1, 0.3], dtype=torch.bfloat16))


def trained(mode, steps=4):
    model = Mixed(torch.bfloat16 if mode == "remainder" else torch.float16)
    opt = ZeroRedundancyOptimizer(
        model.named_parameters(), torch.optim.AdamW, lr=0.01, bucket_cap_mb=SMALL, master_weights=mode
    )
    for step in range(steps):
        for i, (name, param) in enumerate(model.named_parameters()):
            gradient = values(param.shape, 1000 * step + i, torch.bfloat16).to(param.dtype)
            param.grad = None if name in UNTOUCHED else gradient
        opt.step()
    return model, opt


def _saved(rank, world, mode, form, path):
    model, opt = trained(mode)
    if form == "ours":
        checkpoint.save(path, opt, model)
    elif form == "deeper":
        tree = {"model": model.state_dict(), "optim": opt.sharded_state_dict(model)}
        dcp.save({"app": tree}, checkpoint_id=path)
    else:
        flat = get_optimizer_state_dict(model, opt, options=StateDictOptions(flatten_optimizer_state_dict=True))
        dcp.save({"model": model.state_dict(), "optim": flat}, checkpoint_id=path)
    opt.consolidate_state_dict()
    masters = {name: opt.full_state(param).get("master_weight") for name, param in model.named_parameters()}
    return dict(model.state_dict()), masters, opt.state_dict()


def run(capsys, *arguments):
    status = cli.main([str(argument) for argument in arguments])
    return status, capsys.readouterr()


@pytest.mark.parametrize("mode", MODES)
def test_inspect_and_verify_know_every_mode(mode, tmp_path, capsys):
    _, masters, _ = run_ranks(_saved, 3, mode, "ours", tmp_path / "saved")[0]
    assert run(capsys, "verify", tmp_path / "saved")[0] == 0
    status, printed = run(capsys, "inspect", tmp_path / "saved", "--json")
    contents = json.loads(printed.out)
    found = {entry["key"]: entry for entry in contents["entries"]}
    kept = {name: master for name, master in masters.items() if master is not None}
    assert (status, contents["masters"], sorted(kept)) == (
        0,
        len(kept),
        ["brief.weight", "embedding.weight"] if mode in KEPT else [],
    )
    for name in masters:
        entry = found.get(f"optim.state.{name}.master_weight")
        assert (entry is not None) == (name in kept)
        if entry is not None:
            assert (entry["dtype"], entry["shape"]) == ("float32", list(kept[name].shape))
    assert not any(key.startswith(f"optim.state.{name}") for key in found for name in UNTOUCHED)
    rounding = {key: entry["value"] for key, entry in found.items() if "rounding" in key}
    expected = {"optim.param_groups.0.rounding_seed": 0, "optim.param_groups.0.rounding_step": 4}
    assert rounding == (expected if mode == "stochastic" else {})


def check_float32(written, weights, masters):
    """Masters where there are some, and what is 16 bits otherwise cast; all else as it was. Ties stay ties."""
    expected = {}
    for name, value in weights.items():
        narrow = value.dtype in (torch.bfloat16, torch.float16)
        master = masters.get("embedding.weight" if name == "head.weight" else name)
        expected[name] = master if master is not None else value.float() if narrow else value
    assert written.keys() == expected.keys()
    assert {name: written[name].dtype for name in written} == {name: value.dtype for name, value in expected.items()}
    assert [name for name in written if not torch.equal(written[name], expected[name])] == []


@pytest.mark.parametrize("form", ["ours", "deeper", "flattened"])
@pytest.mark.parametrize("mode", KEPT)
def test_convert_master_writes_masters_and_casts_the_rest(mode, form, tmp_path, capsys):
    weights, masters, _ = run_ranks(_saved, 3, mode, form, tmp_path / "saved")[0]
    assert json.loads(run(capsys, "inspect", tmp_path / "saved", "--json")[1].out)["masters"] == 2
    where = ["--key", "app.model"] if form == "deeper" else []
    status, printed = run(capsys, "convert", tmp_path / "saved", tmp_path / "model.pt", "--master", *where)
    assert status == 0, printed.err
    written = torch.load(tmp_path / "model.pt", weights_only=True)
    check_float32(written, weights, masters)
    model = Mixed().float()
    model.load_state_dict(written)
    assert torch.equal(model.head.weight.detach(), masters["embedding.weight"])


@pytest.mark.parametrize("mode", [None, "stochastic"])
def test_convert_master_says_that_there_are_none(mode, tmp_path, capsys):
    run_ranks(_saved, 3, mode, "ours", tmp_path / "saved")
    status, printed = run(capsys, "convert", tmp_path / "saved", tmp_path / "model.pt", "--master")
    assert status == 2
    assert "--master expects a checkpoint with float32 masters" in printed.err
    assert not (tmp_path / "model.pt").exists()


def _there_and_back(rank, world, mode, path):
    """From the directory that was made of the plain file, by position."""
    model, opt = trained(mode, steps=0)
    for param in model.parameters():
        if param.dtype in (torch.bfloat16, torch.float16):
            param.data.zero_()
    checkpoint.load(path, opt)
    return dict(model.state_dict()), {name: opt.full_state(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize("mode", MODES)
def test_convert_to_a_plain_file_and_back_keeps_masters_and_the_step_of_random_rounding(mode, tmp_path, capsys):
    weights, _, state = run_ranks(_saved, 3, mode, "ours", tmp_path / "saved")[0]
    assert run(capsys, "convert", tmp_path / "saved", tmp_path / "optim.pt")[0] == 0
    plain = torch.load(tmp_path / "optim.pt", weights_only=True)
    assert_same(plain["state"], state["state"], "state")
    group = {key: value for key, value in state["param_groups"][0].items() if key != "param_names"}
    assert plain["param_groups"][0] == group
    torch.optim.AdamW(Mixed().parameters()).load_state_dict(copy.deepcopy(plain))
    assert run(capsys, "convert", tmp_path / "optim.pt", tmp_path / "back")[0] == 0
    found, states = run_ranks(_there_and_back, 2, mode, tmp_path / "back")[0]
    for position, entry in enumerate(states.values()):
        assert_same(entry, state["state"].get(position, {}), f"state of parameter {position}")
    if mode in KEPT:
        for name in ("embedding.weight", "brief.weight"):
            assert torch.equal(found[name], weights[name]), "masters write the parameters"


def _barely_trained(rank, world, path):
    """Two norms whose weights are all ones in bfloat16: one was trained a little, the other is not the optimizer's."""
    model = nn.ModuleDict({name: nn.LayerNorm(40, bias=False).to(torch.bfloat16) for name in ("trained", "frozen")})
    param = model["trained"].weight
    opt = ZeroRedundancyOptimizer(
        [("trained.weight", param)], torch.optim.AdamW, lr=1e-4, weight_decay=0.0, master_weights=torch.float32
    )
    param.grad = values(param.shape, 1, torch.bfloat16)
    opt.step()
    assert torch.equal(param.detach(), model["frozen"].weight.detach())
    checkpoint.save(path, opt, model)
    return opt.full_state(param)["master_weight"]


def test_convert_master_takes_no_two_norms_for_tied_weights(tmp_path, capsys):
    master = run_ranks(_barely_trained, 2, tmp_path / "saved")[0]
    assert run(capsys, "convert", tmp_path / "saved", tmp_path / "model.pt", "--master")[0] == 0
    written = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(written["trained.weight"], master)
    assert not torch.equal(master, torch.ones(40))
    assert torch.equal(written["frozen.weight"], torch.ones(40))
