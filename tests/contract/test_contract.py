"""What torch.optim.Optimizer promises beside its steps: what it shows, state, hooks, copies. Oracle: plain AdamW."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import assert_same, parameters, set_gradients, train, values_of

OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)}
STATE = {"step", "exp_avg", "exp_avg_sq"}


def groups(params: list) -> list[dict[str, Any]]:
    return [{"params": params[:2], "note": "kept"}, {"params": params[2:], "lr": 0.5}]


def sharded(params: Any, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, **{**OPTIONS, **options})


def plain(params: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, **{**OPTIONS, **options})


def pair(steps: int = 0) -> tuple[list, ZeroRedundancyOptimizer, list, torch.optim.AdamW]:
    """Ours and the plain one, both trained."""
    ours, theirs = parameters(), parameters()
    optimizer, oracle = sharded(ours), plain(theirs)
    train(optimizer, ours, range(steps))
    train(oracle, theirs, range(steps))
    return ours, optimizer, theirs, oracle


# --- what it shows --------------------------------------------------------------------------------------------------


def shows(rank: int, world_size: int) -> None:
    params = parameters()
    optimizer, oracle = sharded(groups(params)), plain(groups(params))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults == oracle.defaults
    assert repr(optimizer).split("\n")[1:] == repr(oracle).split("\n")[1:]
    for group, expected in zip(optimizer.param_groups, oracle.param_groups, strict=True):
        assert {**group, "params": None} == {**expected, "params": None}
        assert all(one is other for one, other in zip(group["params"], expected["params"], strict=True))
    set_gradients(params, 0)
    assert optimizer.step() is None
    assert [group.keys() for group in optimizer.param_groups] == [group.keys() for group in oracle.param_groups]


def test_it_shows_the_users_own_parameters_and_every_option():
    run_ranks(shows, 3)


def test_methods_are_called_with_the_keywords_of_the_base_class():
    """DCP, Lightning and others call by keyword: load_state_dict(state_dict=...)."""
    base_class = torch.optim.Optimizer
    for name in (name for name, _ in inspect.getmembers(base_class, inspect.isfunction) if not name.startswith("_")):
        base = list(inspect.signature(getattr(base_class, name)).parameters.values())
        own = list(inspect.signature(getattr(ZeroRedundancyOptimizer, name)).parameters.values())
        told = [[(p.name, p.kind, p.default) for p in found[: len(base)]] for found in (base, own)]
        assert told[0] == told[1], name
        assert all(added.kind in (added.KEYWORD_ONLY, added.VAR_KEYWORD) for added in own[len(base) :]), name


def edits(rank: int, world_size: int) -> None:
    sides = []
    for make in (sharded, plain):
        params, rate = parameters(), torch.tensor(0.01, dtype=torch.float64)
        optimizer = make(groups(params), lr=rate, foreach=False)
        train(optimizer, params, range(2))
        rate.mul_(3)  # in place
        optimizer.param_groups[1].update(betas=(0.1, 0.2), weight_decay=0.0, maximize=True)
        train(optimizer, params, range(2, 4))
        assert optimizer.param_groups[0]["lr"] is rate
        sides.append(values_of(params))
    assert_same(*sides)


def test_options_that_are_edited_between_steps_count_also_in_place():
    run_ranks(edits, 3)


# --- state ----------------------------------------------------------------------------------------------------------


def state_of_all(rank: int, world_size: int) -> None:
    params, optimizer, theirs, oracle = pair()
    assert list(optimizer.state) == params
    assert [dict(optimizer.state[param]) for param in params] == [{}] * len(params)
    assert torch.nn.Parameter(torch.zeros(3)) not in optimizer.state
    train(optimizer, params, range(2))
    train(oracle, theirs, range(2))
    assert list(optimizer.state) == params  # the same on every rank
    held = torch.zeros(len(params))
    for position, (param, twin) in enumerate(zip(params, theirs, strict=True)):
        entry = dict(optimizer.state[param])
        assert entry.keys() in (STATE, set())
        held[position] = entry["exp_avg"].numel() if entry else 0
        if held[position] == param.numel():
            assert_same({key: value.view_as(oracle.state[twin][key]) for key, value in entry.items()},
                        dict(oracle.state[twin]))  # fmt: skip
    dist.all_reduce(held)
    assert held.tolist() == [param.numel() for param in params], "every element is on one rank"


def test_state_has_an_entry_for_every_parameter_on_every_rank_and_each_element_once():
    run_ranks(state_of_all, 3)


def scale(optimizer: Any) -> None:
    for entry in (entry for entry in optimizer.state.values() if entry):
        entry["exp_avg"].mul_(0.5)


def replace(optimizer: Any) -> None:
    """As Lightning moves an optimizer: every entry is replaced while the items are walked over."""
    for param, entry in optimizer.state.items():
        optimizer.state[param] = {key: value.clone() * 0.5 for key, value in entry.items()}


def pop(optimizer: Any) -> None:
    for param in list(optimizer.state):
        optimizer.state.pop(param)


def assign(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


CHANGES = {"scale": scale, "replace": replace, "clear": lambda optimizer: optimizer.state.clear(), "pop": pop,
           "assign": assign}  # fmt: skip


def writes_state(rank: int, world_size: int) -> None:
    for name, change in CHANGES.items():
        params, optimizer, theirs, oracle = pair(2)
        for each, its_params in ((optimizer, params), (oracle, theirs)):
            change(each)
            train(each, its_params, range(2, 4))
        assert_same(values_of(params), values_of(theirs), name)
    params, optimizer, theirs, oracle = pair(2)
    warm = sharded(params)
    for param, entry in optimizer.state.items():
        warm.state[param].update(entry)
    train(warm, params, range(2, 4))
    train(oracle, theirs, range(2, 4))
    assert_same(values_of(params), values_of(theirs), "state that is there before the first step")


def test_what_is_written_into_state_counts_in_the_next_step():
    run_ranks(writes_state, 3)


# --- hooks ----------------------------------------------------------------------------------------------------------


def step_hooks(rank: int, world_size: int) -> None:
    params, optimizer, theirs, oracle = pair()
    seen: list[Any] = []
    before = values_of(params)
    optimizer.register_step_pre_hook(lambda *told: seen.append(("pre", told, values_of(params))))
    optimizer.register_step_post_hook(lambda *told: seen.append(("post", told, values_of(params))))
    handles = [
        register_optimizer_step_pre_hook(lambda each, *_: seen.append(("global pre", each))),
        register_optimizer_step_post_hook(lambda each, *_: seen.append(("global post", each))),
    ]
    train(optimizer, params, range(1))
    for handle in handles:
        handle.remove()
    assert [entry[0] for entry in seen] == ["global pre", "pre", "post", "global post"]
    assert seen[0][1] is seen[3][1] is optimizer
    assert [entry[1] for entry in seen[1:3]] == [(optimizer, (optimizer,), {})] * 2
    train(oracle, theirs, range(1))
    assert_same([seen[1][2], seen[2][2]], [before, values_of(theirs)], "weights that hooks see")

    def closure() -> float:
        set_gradients(params, 1)
        return 2.5

    optimizer.register_step_pre_hook(lambda each, args, kwargs: (args, {**kwargs, "closure": closure}))
    assert optimizer.step() == 2.5
    train(oracle, theirs, range(1, 2))
    assert_same(values_of(params), values_of(theirs), "a pre hook may change the arguments")


def test_step_hooks_fire_once_and_see_the_weights_of_all_ranks():
    run_ranks(step_hooks, 3)


def dict_hooks(rank: int, world_size: int) -> None:
    params, optimizer, theirs, oracle = pair(2)
    optimizer.consolidate_state_dict(to=0)
    calls: list[str] = []

    def note(name: str, answer: Any = lambda *_: None) -> Any:
        return lambda each, *form: (calls.append(name), answer(*form))[1]

    optimizer.register_state_dict_pre_hook(note("pre 2"))
    optimizer.register_state_dict_pre_hook(note("pre 1"), prepend=True)
    optimizer.register_state_dict_post_hook(note("post 2", lambda form: {"wrapped": form}))

    def count(form: Any) -> None:
        form["entries"] = sum(map(bool, form["state"].values()))

    optimizer.register_state_dict_post_hook(note("post 1", count), True)
    given = optimizer.state_dict()
    assert calls == ["pre 1", "pre 2", "post 1", "post 2"]
    assert given["wrapped"]["entries"] == (len(params) if rank == 0 else 0), "hooks see the final form"
    calls.clear()
    slower = {"wrapped": copy.deepcopy(oracle.state_dict())}
    optimizer.register_load_state_dict_pre_hook(note("pre", lambda form: form["wrapped"]))
    optimizer.register_load_state_dict_post_hook(note("post", lambda: optimizer.param_groups[0].update(lr=0.125)))
    optimizer.load_state_dict(slower)
    assert calls == ["pre", "post"]
    oracle.param_groups[0]["lr"] = 0.125
    train(optimizer, params, [2])
    train(oracle, theirs, [2])
    assert_same(values_of(params), values_of(theirs))


def test_hooks_of_state_dicts_fire_once_in_order_and_may_replace_the_dict():
    run_ranks(dict_hooks, 3)


# --- copies ---------------------------------------------------------------------------------------------------------


def copies(rank: int, world_size: int) -> None:
    _, optimizer, _, _ = pair(2)
    for take in (copy.copy, copy.deepcopy, pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
        with pytest.raises(TypeError, match=r"load_state_dict\(optimizer.state_dict\(\)\)"):
            take(optimizer)


def test_a_copy_is_refused_and_the_error_names_the_state_dict():
    run_ranks(copies, 2)
