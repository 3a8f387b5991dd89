"""float32 masters in saved state (docs/precision.md, "Saving and loading"): between modes, with plain classes, tools.

``dcp`` is ``sharded_state_dict`` with torch's own ``dcp.save`` and ``dcp.load``, as users call them; ``torch`` is
``get_optimizer_state_dict``. (Numbers of ranks, and loading into the same mode, are the differential harness's.)
"""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import SGD, AdamW

from shardstep import ZeroRedundancyOptimizer, checkpoint, cli
from tests.harness import run_ranks
from tests.oracle import assert_same, values
from tests.ranks.test_masters import KEPT, SMALL, rounded

WIDE = "a float32 model"  # in place of a mode


def make_model(mode):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(9, 23), nn.Linear(23, 31), nn.Linear(31, 5)).to(torch.bfloat16)
    return model.float() if mode == WIDE else model


def build(model, mode, kind=AdamW, **options):
    masters = None if mode == WIDE else mode
    given = {"lr": 0.01, "bucket_cap_mb": SMALL, "master_weights": masters, **options}
    return ZeroRedundancyOptimizer(model.named_parameters(), kind, **given)


def train(model, opt, steps, skip=()):
    for step in steps:
        for i, (name, param) in enumerate(model.named_parameters()):
            gradient = values(param.shape, 1000 * step + i, torch.bfloat16).to(param.dtype)
            param.grad = None if name in skip else gradient
        opt.step()


def weights_of(model):
    return [param.detach().clone() for param in model.parameters()]


def states_of(model, opt):
    return [opt.full_state(param) for param in model.parameters()]


def save(form, model, opt, path):
    """On every rank; a plain dict is returned."""
    if form == "checkpoint":
        checkpoint.save(path, opt, model)
    elif form == "plain":
        opt.consolidate_state_dict()
        box = [opt.state_dict()]
        dist.broadcast_object_list(box, 0)
        return box[0]
    else:
        state = opt.sharded_state_dict(model) if form == "dcp" else get_optimizer_state_dict(model, opt)
        dcp.save({"optim": state}, checkpoint_id=path)
    return None


def load(form, model, opt, path, saved):
    """The model is loaded from a checkpoint of ours only."""
    if form == "checkpoint":
        checkpoint.load(path, opt, model)
    elif form == "plain":
        opt.load_state_dict(copy.deepcopy(saved))
    elif form == "dcp":
        state = {"optim": opt.sharded_state_dict(model)}
        dcp.load(state, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
        opt.load_sharded_state_dict(state["optim"], model)
    else:
        state = {"optim": get_optimizer_state_dict(model, opt)}
        dcp.load(state, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
        set_optimizer_state_dict(model, opt, state["optim"])


class Told(logging.Handler):
    """What the log says about masters in this context."""

    def __enter__(self):
        self.messages = []
        logging.getLogger("shardstep").addHandler(self)
        return self.messages

    def emit(self, record):
        if "master" in record.getMessage():
            self.messages.append(record.getMessage())

    def __exit__(self, *error):
        logging.getLogger("shardstep").removeHandler(self)


# --- from mode to mode ------------------------------------------------------------------------------------------------


def cast(state, dtype):
    """A copy as another mode has it: the class's own state, in its dtype."""
    own = {key: value for key, value in state.items() if key != "master_weight"}
    return {key: value.to(dtype, copy=True) if value.dim() else value.clone() for key, value in own.items()}


def _into(mode, form, path, saved, weights, states):
    """Load into an optimizer of ``mode`` that has trained before, and train on. Returns what the log said here."""
    model = make_model(mode)
    opt = build(model, mode, rounding_seed=3 if mode == "stochastic" else 0)
    train(model, opt, range(20, 22))  # masters of another run, which are to be forgotten
    for param, value in zip(model.parameters(), weights, strict=True):
        param.data.copy_(value)
    with Told() as told:
        load(form, model, opt, path, saved)
    # State without masters: they begin as the parameters.
    starts = [state.get("master_weight", weight.float()) for state, weight in zip(states, weights, strict=True)]
    dtype = torch.bfloat16 if mode is None else torch.float32
    for param, before, start in zip(model.parameters(), states, starts, strict=True):
        state = opt.full_state(param)
        master = before.get("master_weight") if mode in KEPT else None
        assert_same(state.pop("master_weight", None), master, f"into {mode}: master")
        assert_same(state, cast(before, dtype), f"into {mode}: state")
        expected = start if mode == WIDE else rounded(start, torch.bfloat16)
        assert_same(param.detach(), expected, f"into {mode}: parameter")
    copies = [nn.Parameter(start.clone()) for start in starts]
    plain = AdamW(copies, lr=0.01)
    plain.state.update({copy: cast(state, torch.float32) for copy, state in zip(copies, states, strict=True)})
    wide = nn.ParameterList(copies)
    train(model, opt, range(4, 6))
    train(wide, plain, range(4, 6))
    opt.check_replicas()
    if mode in (*KEPT, WIDE):
        found = [opt.full_state(param).get("master_weight", param.detach()) for param in model.parameters()]
        assert_same(found, weights_of(wide), f"into {mode}: trained on")
    return told, opt.param_groups[0].get("rounding_seed")


def _between(rank, world, form, folder):
    """By source and mode: what the log said, and the seed of random rounding afterwards."""
    found = {}
    for source in (None, "remainder", "stochastic", WIDE):
        model = make_model(source)
        opt = build(model, source, rounding_seed=7 if source == "stochastic" else 0)
        train(model, opt, range(4))
        path = folder / str(source)
        saved = save(form, model, opt, path)
        weights, states = weights_of(model), states_of(model, opt)
        if source == WIDE:  # its model is the masters
            states = [{**state, "master_weight": weight} for state, weight in zip(states, weights, strict=True)]
        for mode in (*KEPT, WIDE, "stochastic", None):
            if form in ("dcp", "torch") and source == "remainder" and mode not in KEPT:
                continue  # dcp.load reads the keys of this optimizer, and so no masters: see precision.md
            if source != WIDE or (form == "checkpoint" and mode in KEPT):
                found[source, mode] = _into(mode, form, path, saved, weights, states)
    return found


@pytest.mark.parametrize("form", ["plain", "checkpoint", "dcp", pytest.param("torch", marks=pytest.mark.long)])
def test_state_goes_from_every_mode_into_every_other(form, tmp_path):
    """Masters for an optimizer that keeps none are told once; nothing else is lost."""
    ranks = run_ranks(_between, 2, form, tmp_path)
    for (source, mode), (_, seed) in ranks[0].items():
        told = [message for found in ranks for message in found[source, mode][0]]
        assert len(told) == (source == "remainder" and mode in ("stochastic", None)), (source, mode, told)
        assert all("keeps none for parameter 0 ('0.weight')" in message for message in told)
        assert mode != "stochastic" or seed == (7 if source == "stochastic" else 3)


# --- plain optimizers over float32 models -----------------------------------------------------------------------------


def plain_run(kind, steps):
    model = make_model(WIDE)
    opt = kind(model.parameters(), lr=0.01)
    train(model, opt, range(steps))
    return model, opt


def _from_plain(rank, world, kind, folder):
    expected = weights_of(plain_run(kind, 6)[0])
    for mode in KEPT:
        model = make_model(mode)
        opt = build(model, mode, kind)
        checkpoint.load(folder / "plain", opt, model)
        train(model, opt, range(4, 6))
        assert_same([state["master_weight"] for state in states_of(model, opt)], expected, f"{mode}")
        checkpoint.save(folder / str(mode), opt, model)


@pytest.mark.parametrize("kind", [AdamW, SGD])  # (SGD has no state but the masters)
def test_a_float32_run_of_a_plain_optimizer_goes_on_with_masters_and_back(kind, tmp_path):
    model, opt = plain_run(kind, 4)
    checkpoint.save(tmp_path / "plain", opt, model)
    run_ranks(_from_plain, 3, kind, tmp_path)
    for mode in KEPT:
        model, opt = plain_run(kind, 0)
        checkpoint.load(tmp_path / str(mode), opt, model)
        train(model, opt, range(6, 8))
        assert_same(weights_of(model), weights_of(plain_run(kind, 8)[0]), f"{mode}")


# --- the command line -------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """16-bit, float32, float64, tied, and buffers of three dtypes; a layer that is never stepped."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(31, 23).to(torch.bfloat16)
        self.norm = nn.BatchNorm1d(23)
        self.wide = nn.Parameter(values((7, 3), 5))
        self.late = nn.Linear(23, 4).to(torch.bfloat16)
        self.head = nn.Linear(23, 31, bias=False).to(torch.bfloat16)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([0.1, 0.3], dtype=torch.bfloat16))
        # All ones in bfloat16: one is trained a little, the other is not the optimizer's. They are not tied.
        self.barely, self.frozen = (nn.Parameter(torch.ones(40, dtype=torch.bfloat16)) for _ in range(2))


def _saved(rank, world, mode, path):
    model = Mixed()
    names = [(name, param) for name, param in model.named_parameters() if name != "frozen"]
    opt = ZeroRedundancyOptimizer(names, AdamW, lr=1e-4, weight_decay=0.0, master_weights=mode)
    train(model, opt, range(3), skip=("late.weight", "late.bias"))
    assert mode == "stochastic" or torch.equal(model.barely, model.frozen), "the case that this test is about"
    checkpoint.save(path, opt, model)
    return dict(model.state_dict()), {name: opt.full_state(param).get("master_weight") for name, param in names}


@pytest.mark.parametrize("mode", [*KEPT, "stochastic"], ids=str)
def test_the_command_line_shows_masters_and_writes_the_model_from_them(mode, tmp_path, capsys):
    def call(*arguments):
        status = cli.main([str(argument) for argument in arguments])
        return status, capsys.readouterr()

    saved, model = tmp_path / "saved", tmp_path / "model.pt"
    weights, masters = run_ranks(_saved, 2, mode, saved)[0]
    contents = json.loads(call("inspect", saved, "--json")[1].out)
    keys = [name for name, master in masters.items() if master is not None]
    assert keys == ([] if mode == "stochastic" else ["barely", "embedding.weight"])
    found = [entry["key"] for entry in contents["entries"] if "master_weight" in entry["key"]]
    assert sorted(found) == [f"optim.state.{name}.master_weight" for name in keys]
    assert contents["masters"] == len(keys)
    status, printed = call("convert", saved, model, "--master")
    if mode == "stochastic":
        assert (status, model.exists()) == (2, False)
        assert "has no float32 masters of the model" in printed.err
        return
    assert status == 0, printed.err
    masters["head.weight"] = masters["embedding.weight"]
    expected = {name: value.float() if value.dtype == torch.bfloat16 else value for name, value in weights.items()}
    expected |= {name: master for name, master in masters.items() if master is not None}
    assert_same(torch.load(model, weights_only=True), expected, "in float32")
    assert call("convert", saved, tmp_path / "model.safetensors", "--master")[0] == 0
    checkpoint.export_model(saved, tmp_path / "exported.safetensors", master=True)
    for name in ("model", "exported"):
        assert_same(load_file(tmp_path / f"{name}.safetensors"), expected, "in float32")
