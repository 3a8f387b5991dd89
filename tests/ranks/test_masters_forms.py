"""float32 masters in every form of saved state: where one side has masters and the other has none, or rounds randomly.

``dcp`` is ``sharded_state_dict`` with torch's own ``dcp.save`` and ``dcp.load``, as users call them; ``torch`` is
``get_optimizer_state_dict``.
"""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.harness import run_ranks
from tests.ranks.test_masters import KEPT, SMALL
from tests.ranks.test_masters_state import build, check_against_plain, make_model, outcome, plain_outcome, train
from tests.state_forms import DIRECTORIES, FLATTENED, FORMS, load, save
from tests.twins import assert_same

pytestmark = pytest.mark.extended  # the other files about masters have a cheaper test of each claim

# torch's flattened forms want the keys of the optimizer: the last tests here say what that means.
PLIANT = [form for form in FORMS if form != "torch sharded flattened"]


def copies_of(model):
    return [param.detach().clone() for param in model.parameters()]


class Told(logging.Handler):
    """What the log says about masters in this context."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        if "master" in record.getMessage():
            self.messages.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("shardstep").addHandler(self)
        return self.messages

    def __exit__(self, *error):
        logging.getLogger("shardstep").removeHandler(self)


def saved_by(rank, world, mode, form, path, dtype=torch.bfloat16, cls=torch.optim.AdamW, skip=(), options=None):
    """Four steps, saved: what ``save`` returned, the parameters, the states."""
    model = make_model().to(dtype)
    opt = build(model, mode, cls=cls, **(options or {}))
    train(model, opt, range(4), skip=skip)
    return save(form, model, opt, path), *outcome(model, opt)


# --- without masters -> with masters ----------------------------------------------------------------------------------


def _begin(rank, world, mode, form, path, saved, weights, planner=None):
    model = make_model()
    opt = build(model, mode)
    train(model, opt, range(20, 22))  # masters of another run, which are to be forgotten
    for param, value in zip(model.parameters(), weights, strict=True):
        param.data.copy_(value)
    with Told() as told:
        load(form, model, opt, path, saved, planner)
    assert not told
    loaded = outcome(model, opt)
    copies = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    plain = torch.optim.AdamW(copies, lr=0.01)
    for twin, state in zip(copies, loaded[1], strict=True):
        plain.state[twin] = {key: value.clone() for key, value in state.items() if key != "master_weight"}
    train(model, opt, [4])
    for twin, param in zip(copies, model.parameters(), strict=True):
        twin.grad = param.grad.float()
    plain.step()
    masters = [opt.full_state(param)["master_weight"] for param in model.parameters()]
    assert_same(masters, [twin.detach() for twin in copies], "masters")
    return loaded


@pytest.mark.parametrize("mode", KEPT)
@pytest.mark.parametrize("form", PLIANT)
def test_masters_that_were_not_saved_begin_as_the_parameters(form, mode, tmp_path):
    saved, weights, states = run_ranks(saved_by, 3, None, form, tmp_path / "saved")[0]
    loaded, found = run_ranks(_begin, 2, mode, form, tmp_path / "saved", saved, weights)[0]
    assert_same(loaded, weights, "parameters")
    for state, before in zip(found, states, strict=True):
        assert "master_weight" not in state
        assert_same(state["exp_avg"], before["exp_avg"].float(), "state")


# --- with masters -> without ------------------------------------------------------------------------------------------


def _left_out(rank, world, mode, form, path, saved):
    model = make_model()
    opt = build(model, mode, rounding_seed=3 if mode else 0)
    with Told() as told:
        load(form, model, opt, path, saved)
    loaded = outcome(model, opt)
    train(model, opt, range(4, 6))
    opt.check_replicas()
    return told, loaded[1], opt.param_groups[0].get("rounding_seed")


@pytest.mark.parametrize("mode", [None, "stochastic"])
@pytest.mark.parametrize("form", PLIANT)
def test_masters_for_an_optimizer_without_are_told_once_and_nothing_else_is_lost(form, mode, tmp_path):
    if form in FLATTENED and mode == "stochastic":
        pytest.skip("torch insists on the options of the optimizer: the last tests here")
    saved, _, states = run_ranks(saved_by, 3, torch.float32, form, tmp_path / "saved")[0]
    results = run_ranks(_left_out, 2, mode, form, tmp_path / "saved", saved)
    told = [message for messages, _, _ in results for message in messages]
    assert len(told) == 1
    assert "keeps none for parameter 0 ('0.weight')" in told[0]
    for state, before in zip(results[0][1], states, strict=True):
        expected = {key: value for key, value in before.items() if key != "master_weight"}
        narrow = {key: value.bfloat16() if value.dim() else value for key, value in expected.items()}
        assert_same(state, expected if mode else narrow, "state")
    assert results[0][2] == (3 if mode else None)


# --- with masters <-> float32 parameters ------------------------------------------------------------------------------


def _float32_model(rank, world, form, path, saved, shard, **options):
    model = make_model(torch.float32)
    opt = ZeroRedundancyOptimizer(
        model.named_parameters(), torch.optim.AdamW, lr=0.01, shard=shard, bucket_cap_mb=SMALL, **options
    )
    with Told() as told:
        load(form, model, opt, path, saved)
    assert not told
    loaded = copies_of(model)
    train(model, opt, range(4, 7))
    opt.check_replicas()
    return loaded, copies_of(model), opt.full_state(model[0].weight)


@pytest.mark.parametrize("form", PLIANT)
def test_float32_parameters_become_the_masters(form, tmp_path):
    saved, _, states = run_ranks(saved_by, 3, "remainder", form, tmp_path / "saved")[0]
    for world, shard in ((2, "element"), (3, "tensor")):
        loaded, later, state = run_ranks(_float32_model, world, form, tmp_path / "saved", saved, shard)[0]
        assert_same(loaded, [before["master_weight"] for before in states], "parameters")
        assert_same(later, plain_outcome(7)[0], "parameters, later")
        assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"]


WAYS = [{"parameters_as_bucket_view": True}, {"lazy_gather": True}]


def test_float32_parameters_become_the_masters_with_bucket_views_and_lazy_gathers(tmp_path):
    saved, _, states = run_ranks(saved_by, 3, "remainder", "plain", tmp_path)[0]
    for options in WAYS:
        loaded, later, _ = run_ranks(_float32_model, 3, "plain", tmp_path, saved, "element", **options)[1]
        assert_same(loaded, [before["master_weight"] for before in states], f"{options}: parameters")
        assert_same(later, plain_outcome(7)[0], f"{options}: parameters, later")


def _from_float32(rank, world, mode, path, cls, options):
    model = make_model()
    opt = build(model, mode, cls=cls, **options)
    checkpoint.load(path, opt, model)
    loaded = outcome(model, opt)
    train(model, opt, range(4, 7))
    return loaded, outcome(model, opt)


@pytest.mark.parametrize("mode", KEPT)
@pytest.mark.parametrize("form", DIRECTORIES)
def test_a_float32_run_of_ours_gives_the_masters(form, mode, tmp_path):
    run_ranks(saved_by, 3, None, form, tmp_path / "saved", torch.float32)
    loaded, later = run_ranks(_from_float32, 2, mode, tmp_path / "saved", torch.optim.AdamW, {})[0]
    check_against_plain(loaded, 4)
    check_against_plain(later, 7)


@pytest.mark.parametrize("mode", KEPT)
def test_a_float32_run_gives_the_masters_of_parameters_without_state(mode, tmp_path):
    """SGD makes no state at all. With AdamW a parameter that was not stepped yet has none, and gets no entry here."""
    run_ranks(saved_by, 3, None, "checkpoint", tmp_path / "sgd", torch.float32, torch.optim.SGD)
    (_, states), (_, later) = run_ranks(_from_float32, 2, mode, tmp_path / "sgd", torch.optim.SGD, {})[0]
    assert_same([state["master_weight"] for state in states], plain_outcome(4, torch.optim.SGD)[0], "SGD")
    assert_same([state["master_weight"] for state in later], plain_outcome(7, torch.optim.SGD)[0], "SGD, later")

    path = tmp_path / "adamw"
    run_ranks(_shifted, 3, path)
    (_, states), (_, later) = run_ranks(_from_float32, 2, mode, path, torch.optim.AdamW, {})[0]
    assert [sorted(state) for state in states][:2] == [[], []]
    expected = _shifted(0, 1, None)
    assert_same([state["master_weight"] for state in later], expected, "AdamW, later")


def _shifted(rank, world, path):
    """Float32 parameters that are no bfloat16, two of which are not stepped before they are saved."""
    model = make_model(torch.float32)
    for param in model.parameters():
        param.data.add_(1e-5)
    if path is None:
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        opt = build(model, None)
    train(model, opt, range(4), skip=(0, 1))
    if path is not None:
        checkpoint.save(path, opt, model)
        return None
    train(model, opt, range(4, 7))
    return copies_of(model)


# --- random rounding --------------------------------------------------------------------------------------------------


def _resumed(rank, world, form, path, saved, weights, first):
    model = make_model()
    if saved is None and weights is None:  # the run that is not interrupted
        opt = build(model, "stochastic", rounding_seed=7)
        train(model, opt, range(8))
        return copies_of(model)
    opt = build(model, "stochastic")  # the seed is loaded
    for param, value in zip(model.parameters(), weights, strict=True):
        param.data.copy_(value)
    load(form, model, opt, path, saved)
    assert (opt.param_groups[0]["rounding_seed"], opt.param_groups[0]["rounding_step"]) == (7, 4)
    train(model, opt, range(4, 8))
    opt.check_replicas()
    return copies_of(model)


@pytest.mark.parametrize("form", FORMS)
def test_random_rounding_goes_on_with_the_same_bits_at_any_number_of_ranks(form, tmp_path):
    expected = run_ranks(_resumed, 1, form, None, None, None, 0)[0]
    path, options = tmp_path / "saved", {"rounding_seed": 7}
    saved, weights, _ = run_ranks(saved_by, 3, "stochastic", form, path, options=options)[0]
    for world in (2, 3):
        found = run_ranks(_resumed, world, form, path, saved, weights, 4)[0]
        assert_same(found, expected, f"{world} ranks")


def _from_random(rank, world, mode, form, path, saved, weights):
    model = make_model()
    opt = build(model, mode)
    for param, value in zip(model.parameters(), weights, strict=True):
        param.data.copy_(value)
    load(form, model, opt, path, saved)
    loaded = outcome(model, opt)
    train(model, opt, range(4, 6))
    return loaded


@pytest.mark.parametrize("mode", [None, *KEPT])
@pytest.mark.parametrize("form", PLIANT)
def test_state_of_random_rounding_loads_into_every_other_mode(form, mode, tmp_path):
    saved, weights, states = run_ranks(saved_by, 3, "stochastic", form, tmp_path / "saved")[0]
    found, loaded = run_ranks(_from_random, 2, mode, form, tmp_path / "saved", saved, weights)[0]
    assert_same(found, weights, "parameters")
    for state, before in zip(loaded, states, strict=True):
        narrow = {key: value.bfloat16() if value.dim() else value for key, value in before.items()}
        assert_same(state, before if mode else narrow, "state")


def _from_rank_0(rank, world, saved, weights):
    """torch's broadcast: only rank 0 has the dict."""
    model = make_model()
    opt = build(model, None)
    for param, value in zip(model.parameters(), weights, strict=True):
        param.data.copy_(value)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, opt, copy.deepcopy(saved) if rank == 0 else {}, options=options)
    return outcome(model, opt)[1]


def test_state_of_random_rounding_loads_from_rank_0(tmp_path):
    saved, weights, states = run_ranks(saved_by, 3, "stochastic", "torch", tmp_path)[0]
    found = run_ranks(_from_rank_0, 2, saved, weights)[1]
    assert_same([state["exp_avg"] for state in found], [state["exp_avg"].bfloat16() for state in states], "state")


class Newer(torch.optim.AdamW):
    """As in a later torch: with an option that older checkpoints lack."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.defaults["novel"] = False
        for group in self.param_groups:
            group.setdefault("novel", False)


def _newer(rank, world, path):
    model = make_model()
    opt = build(model, torch.float32, cls=Newer)
    checkpoint.load(path, opt, model)
    train(model, opt, range(4, 6))


def test_the_options_of_random_rounding_do_not_make_it_another_class(tmp_path):
    run_ranks(saved_by, 3, "stochastic", "checkpoint", tmp_path / "saved")
    run_ranks(_newer, 2, tmp_path / "saved")


@pytest.mark.parametrize("form", [form for form in FORMS if form not in FLATTENED])
def test_state_without_masters_loads_into_random_rounding(form, tmp_path):
    saved, _, states = run_ranks(saved_by, 3, None, form, tmp_path / "saved")[0]
    told, loaded, seed = run_ranks(_left_out, 2, "stochastic", form, tmp_path / "saved", saved)[0]
    assert (told, seed) == ([], 3)
    assert_same([state["exp_avg"] for state in loaded], [state["exp_avg"].float() for state in states], "state")


# --- what torch makes plain dicts of: flattened, and copied to the CPU ------------------------------------------------


def _partial(rank, world, mode, form, path, weights):
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    return _begin(rank, world, mode, form, path, None, weights, planner)


def _refused(rank, world, mode, form, path):
    model = make_model()
    with pytest.raises(dcp.api.CheckpointException) as caught:
        load(form, model, build(model, mode), path)
    return str(caught.value)


@pytest.mark.parametrize("form", ["torch sharded flattened", "torch sharded offloaded"])
@pytest.mark.parametrize("mode", KEPT)
def test_a_dict_of_torch_without_masters_needs_a_partial_load(mode, form, tmp_path):
    """docs/precision.md says which call to make."""
    path = tmp_path / "saved"
    _, weights, states = run_ranks(saved_by, 3, None, form, path)[0]
    told = run_ranks(_refused, 2, mode, form, path)[0]
    assert "Missing key in checkpoint state_dict: optim.state.0.weight.master_weight" in told
    loaded, found = run_ranks(_partial, 2, mode, form, path, weights)[0]
    assert_same(loaded, weights, "parameters")
    assert_same([state["exp_avg"] for state in found], [state["exp_avg"].float() for state in states], "state")


def _no_seed(rank, world, form, path, saved):
    model = make_model()
    with pytest.raises((KeyError, dcp.api.CheckpointException)) as caught:
        load(form, model, build(model, "stochastic"), path, saved)
    return str(caught.value)


@pytest.mark.parametrize("form", FLATTENED)
def test_a_flattened_dict_of_another_mode_is_refused_by_torch_for_random_rounding(form, tmp_path):
    saved, _, _ = run_ranks(saved_by, 2, None, form, tmp_path / "saved")[0]
    assert "param_groups.0.weight.rounding_seed" in run_ranks(_no_seed, 2, form, tmp_path / "saved", saved)[0]
