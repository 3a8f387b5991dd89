"""The contract of torch.optim.Optimizer as claims, for test_optimizer_contract.py.

A claim takes a function that builds the optimizer under test and raises if the optimizer does not keep it. Whether
the optimizer is sharded is none of the claim's business: it only sees what torch.optim promises.

Apart from the test file because every rank of every test imports it, and pytest is slow to import.
"""

from __future__ import annotations

import copy
import gc
import inspect
import io
import os
import pickle
import weakref
from collections import defaultdict

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

from tests.contract.subjects import (
    OPTIONS,
    SUBJECTS,
    adamw,
    assert_equal,
    clones,
    everybody,
    full_state_dict,
    new_params,
    owned_ranges,
    set_gradients,
    train,
    trained_oracle,
)

# --- what it shows -----------------------------------------------------------------------------------------------


def claim_it_is_a_torch_optimizer(make_optimizer, rank, world_size):
    assert isinstance(make_optimizer(new_params()), torch.optim.Optimizer)


def claim_repr_lists_the_options_of_every_group(make_optimizer, rank, world_size):
    first, second, *rest = new_params()
    groups = [{"params": [first, second]}, {"params": rest, "lr": 0.5}]
    shown, expected = (repr(make([dict(g) for g in groups])) for make in (make_optimizer, adamw))
    assert shown.split("\n")[1:] == expected.split("\n")[1:]
    assert shown.startswith(type(make_optimizer(new_params())).__name__)


def claim_defaults_are_the_full_defaults(make_optimizer, rank, world_size):
    assert make_optimizer(new_params()).defaults == adamw(new_params()).defaults


def claim_groups_show_every_option_and_the_users_own_parameters(make_optimizer, rank, world_size):
    params = new_params()
    groups = [{"params": params[:2], "note": "kept"}, {"params": params[2:], "betas": (0.5, 0.6), "lr": 0.5}]
    optimizer, expected = make_optimizer(copy.copy(groups)), adamw(copy.copy(groups))
    for _ in range(2):
        assert len(optimizer.param_groups) == 2
        for group, plain in zip(optimizer.param_groups, expected.param_groups, strict=True):
            assert {**group, "params": None} == {**plain, "params": None}
            assert all(one is other for one, other in zip(group["params"], plain["params"], strict=True))
        train(optimizer, params, range(1))


def claim_named_parameters_keep_their_names(make_optimizer, rank, world_size):
    params = new_params()
    names = [f"layer.{position}" for position in range(len(params))]
    optimizer = make_optimizer(zip(names, params, strict=True))
    assert optimizer.param_groups[0]["param_names"] == names
    train(optimizer, params, range(2))
    assert full_state_dict(optimizer, rank, world_size)["param_groups"][0]["param_names"] == names


def claim_keyword_names_are_those_of_the_base_class(make_optimizer, rank, world_size):
    """DCP, Lightning and others call by keyword: load_state_dict(state_dict=...)."""
    subject = type(make_optimizer(new_params()))
    methods = [
        name for name, _ in inspect.getmembers(torch.optim.Optimizer, inspect.isfunction) if not name.startswith("_")
    ]
    assert {"step", "load_state_dict", "add_param_group", "zero_grad", "register_step_pre_hook"} <= set(methods)
    for name in methods:
        base = list(inspect.signature(getattr(torch.optim.Optimizer, name)).parameters.values())
        own = list(inspect.signature(getattr(subject, name)).parameters.values())
        shared = [(p.name, p.kind, p.default) for p in own[: len(base)]]
        assert shared == [(p.name, p.kind, p.default) for p in base], name
        for added in own[len(base) :]:
            assert added.kind in (added.KEYWORD_ONLY, added.VAR_KEYWORD), f"{name} adds {added}"


# --- state -------------------------------------------------------------------------------------------------------


def claim_state_has_only_empty_entries_before_the_first_step(make_optimizer, rank, world_size):
    params = new_params()
    optimizer = make_optimizer(params)
    assert [entry for entry in optimizer.state.values() if entry] == []
    for param in params:
        assert dict(optimizer.state[param]) == {}
    assert all(any(key is param for param in params) for key in optimizer.state)


def claim_state_has_the_same_keys_on_every_rank(make_optimizer, rank, world_size):
    params = new_params()
    optimizer = make_optimizer(params)
    for steps in (range(2), range(2, 3)):
        train(optimizer, params, steps)
        positions = [position for position, param in enumerate(params) if param in optimizer.state]
        assert positions == list(range(len(params)))
        assert len(optimizer.state) == len(list(optimizer.state)) == len(params)
        assert everybody(positions, world_size) == [positions] * world_size
        optimizer.load_state_dict(full_state_dict(optimizer, rank, world_size))


def claim_state_holds_the_values_of_the_plain_optimizer(make_optimizer, rank, world_size):
    params = new_params()
    optimizer = make_optimizer(params)
    train(optimizer, params, range(3))
    oracle, oracle_params = trained_oracle(3)
    _assert_state_is(optimizer, params, oracle, oracle_params, world_size)


def claim_state_holds_the_loaded_values(make_optimizer, rank, world_size):
    oracle, oracle_params = trained_oracle(3)
    params = new_params()
    optimizer = make_optimizer(params)
    saved = copy.deepcopy(oracle.state_dict())
    optimizer.load_state_dict(copy.deepcopy(saved))
    _assert_state_is(optimizer, params, oracle, oracle_params, world_size)


def _assert_state_is(optimizer, params, oracle, oracle_params, world_size):
    """Every element of every state is on exactly one rank, with the oracle's value, and nothing else is there."""
    ranges = owned_ranges(optimizer, params)
    counts = []
    for position, (param, plain) in enumerate(zip(params, oracle_params, strict=True)):
        entry, expected = optimizer.state[param], oracle.state[plain]
        counts.append(0)
        if param not in ranges:
            assert dict(entry) == {}, f"parameter {position} is not here but has {entry}"
            continue
        assert entry.keys() == expected.keys()
        for key, value in expected.items():
            piece = value if value.dim() == 0 else value.view(-1)[ranges[param]]
            assert entry[key].dtype == value.dtype
            assert torch.equal(entry[key].reshape(-1), piece.reshape(-1)), f"{key} of parameter {position}"
        counts[-1] = entry["exp_avg"].numel()
    if hasattr(optimizer, "optim"):
        totals = [sum(column) for column in zip(*everybody(counts, world_size), strict=True)]
        assert totals == [param.numel() for param in params]


def claim_state_moved_in_place_is_the_state_that_is_used(make_optimizer, rank, world_size):
    """What Lightning does to move an optimizer: every entry is replaced while the items are walked over."""
    params = new_params()
    optimizer = make_optimizer(params)
    train(optimizer, params, range(2))
    moved = []
    for param, entry in optimizer.state.items():
        replacement = {key: value.clone() for key, value in entry.items()}
        moved += [(param, key, value) for key, value in replacement.items()]
        optimizer.state[param] = replacement
    assert sum(everybody(len(moved), world_size)) >= 3 * len(params)
    train(optimizer, params, range(2, 4))
    for param, key, value in moved:
        assert optimizer.state[param][key] is value
    assert_equal(params, trained_oracle(4)[1])


def claim_a_write_into_a_state_tensor_counts(make_optimizer, rank, world_size):
    params, oracle_params = new_params(), new_params()
    optimizer, oracle = make_optimizer(params), adamw(oracle_params)
    for each, its_params in ((optimizer, params), (oracle, oracle_params)):
        train(each, its_params, range(2))
        for entry in each.state.values():
            if entry:
                entry["exp_avg"].zero_()
        train(each, its_params, range(2, 4))
    assert_equal(params, oracle_params)


def claim_state_may_be_filled_before_the_first_step(make_optimizer, rank, world_size):
    """A warm start: ``state = optimizer.state[p]; state["exp_avg"] = ...`` is the way torch's optimizers do it."""
    oracle, oracle_params = trained_oracle(2)
    params = [torch.nn.Parameter(param.detach().clone()) for param in oracle_params]
    optimizer = make_optimizer(params)
    ranges = owned_ranges(optimizer, params)
    for param, plain in zip(params, oracle_params, strict=True):
        if param in ranges:
            stepped_shape = plain.shape if ranges[param] == slice(0, plain.numel()) else (-1,)
            entry = optimizer.state[param]
            for key, value in oracle.state[plain].items():
                whole = value.dim() == 0
                entry[key] = value.clone() if whole else value.view(-1)[ranges[param]].clone().view(stepped_shape)
    train(optimizer, params, range(2, 4))
    train(oracle, oracle_params, range(2, 4))
    assert_equal(params, oracle_params)


def claim_clearing_the_state_starts_it_anew(make_optimizer, rank, world_size):
    _assert_resets(make_optimizer, lambda optimizer: optimizer.state.clear())


def claim_popping_the_state_of_a_parameter_starts_it_anew(make_optimizer, rank, world_size):
    def pop_all(optimizer):
        for param in list(optimizer.state):
            optimizer.state.pop(param)

    _assert_resets(make_optimizer, pop_all)


def claim_assigning_a_new_state_starts_it_anew(make_optimizer, rank, world_size):
    def assign(optimizer):
        optimizer.state = defaultdict(dict)

    _assert_resets(make_optimizer, assign)


def _assert_resets(make_optimizer, reset):
    params, oracle_params = new_params(), new_params()
    optimizer, oracle = make_optimizer(params), adamw(oracle_params)
    for each, its_params in ((optimizer, params), (oracle, oracle_params)):
        train(each, its_params, range(2))
        reset(each)
        assert [entry for entry in each.state.values() if entry] == []
        train(each, its_params, range(2, 4))
    assert_equal(params, oracle_params)
    assert {float(entry["step"]) for entry in optimizer.state.values() if entry} <= {2.0}


# --- step --------------------------------------------------------------------------------------------------------


def claim_it_trains_like_the_plain_optimizer(make_optimizer, rank, world_size):
    params = new_params()
    optimizer = make_optimizer(params)
    train(optimizer, params, range(4))
    assert_equal(params, trained_oracle(4)[1])


def claim_step_without_closure_returns_none(make_optimizer, rank, world_size):
    params = new_params()
    optimizer = make_optimizer(params)
    set_gradients(params, 0)
    assert optimizer.step() is None


def claim_step_without_gradients_changes_nothing(make_optimizer, rank, world_size):
    params = new_params()
    optimizer = make_optimizer(params)
    before = clones(params)
    optimizer.step()
    assert_equal(params, before)
    assert [entry for entry in optimizer.state.values() if entry] == []


def claim_a_parameter_without_gradient_is_left_alone(make_optimizer, rank, world_size):
    params, oracle_params = new_params(), new_params()
    optimizer, oracle = make_optimizer(params), adamw(oracle_params)
    for each, its_params in ((optimizer, params), (oracle, oracle_params)):
        for step in range(4):
            set_gradients(its_params, step)
            its_params[step].grad = None
            each.step()
    assert_equal(params, oracle_params)


def claim_a_closure_runs_once_per_step_and_its_loss_is_returned(make_optimizer, rank, world_size):
    params, oracle_params = new_params(), new_params()
    optimizer, oracle = make_optimizer(params), adamw(oracle_params)
    calls = []

    def closure_for(each, its_params, step):
        def closure():
            each.zero_grad()
            loss = sum(((param - step) ** 2).sum() for param in its_params)
            assert torch.is_grad_enabled()
            loss.backward()
            calls.append(each)
            return loss

        return closure

    for step in range(3):
        loss = optimizer.step(closure_for(optimizer, params, step))
        expected = oracle.step(closure=closure_for(oracle, oracle_params, step))
        assert torch.equal(loss, expected)
        assert calls == [optimizer, oracle], f"step {step}"
        calls.clear()
    assert_equal(params, oracle_params)


def claim_a_closure_runs_on_every_rank_even_with_fewer_parameters_than_ranks(make_optimizer, rank, world_size):
    (param,) = new_params([(3,)])
    optimizer = make_optimizer([param])
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    before = (param.detach() ** 2).sum()
    assert torch.equal(optimizer.step(closure), before)
    assert calls == [before.item()]


def claim_options_edited_between_steps_count(make_optimizer, rank, world_size):
    params, oracle_params = new_params(), new_params()
    groups = [slice(0, 2), slice(2, None)]
    optimizer = make_optimizer([{"params": params[part]} for part in groups])
    oracle = adamw([{"params": oracle_params[part]} for part in groups])
    for each, its_params in ((optimizer, params), (oracle, oracle_params)):
        train(each, its_params, range(2))
        each.param_groups[0]["lr"] = 0.3
        each.param_groups[1].update(betas=(0.1, 0.2), weight_decay=0.0, maximize=True)
        train(each, its_params, range(2, 4))
    assert_equal(params, oracle_params)
    assert optimizer.param_groups[1]["maximize"] is True


def claim_a_tensor_learning_rate_may_be_changed_in_place(make_optimizer, rank, world_size):
    params, oracle_params = new_params(), new_params()
    lr, oracle_lr = (torch.tensor(1e-2, dtype=torch.float64) for _ in range(2))
    optimizer, oracle = make_optimizer(params, lr=lr), adamw(oracle_params, lr=oracle_lr)
    assert optimizer.param_groups[0]["lr"] is lr
    for each, its_params, its_lr in ((optimizer, params, lr), (oracle, oracle_params, oracle_lr)):
        train(each, its_params, range(2))
        its_lr.mul_(3)
        train(each, its_params, range(2, 4))
        each.param_groups[0]["lr"] = torch.tensor(0.5)
        train(each, its_params, range(4, 5))
    assert_equal(params, oracle_params)


def claim_clipping_before_the_step_counts(make_optimizer, rank, world_size):
    params, oracle_params = new_params(), new_params()
    optimizer, oracle = make_optimizer(params), adamw(oracle_params)
    for step in range(3):
        for each, its_params in ((optimizer, params), (oracle, oracle_params)):
            set_gradients(its_params, step)
            norm = torch.nn.utils.clip_grad_norm_(its_params, 0.5)
            torch.nn.utils.clip_grad_value_(its_params, 0.05)
            assert norm > 0.5
            each.step()
    assert_equal(params, oracle_params)


def claim_zero_grad_covers_all_parameters(make_optimizer, rank, world_size):
    params = new_params()
    optimizer = make_optimizer([{"params": params[:3]}, {"params": params[3:]}])
    for step in range(2):
        train(optimizer, params, [step])
        optimizer.zero_grad(set_to_none=False)
        assert_equal([param.grad for param in params], [torch.zeros_like(param) for param in params], "gradients")
        train(optimizer, params, [step])
        optimizer.zero_grad()
        assert [param.grad for param in params] == [None] * len(params)


def claim_zero_grad_frees_the_memory_of_the_gradients(make_optimizer, rank, world_size):
    params = new_params()
    optimizer = make_optimizer(params)
    buffers = []
    for param in params:
        array = np.ones(param.shape)
        buffers.append(weakref.ref(array))
        param.grad = torch.from_numpy(array)
        del array
    optimizer.step()
    assert all(buffer() is not None for buffer in buffers)
    optimizer.zero_grad()
    gc.collect()
    assert [buffer() for buffer in buffers] == [None] * len(params)


def claim_a_step_is_profiled_once_under_the_name_of_the_class(make_optimizer, rank, world_size):
    params = new_params()
    optimizer = make_optimizer(params)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train(optimizer, params, range(2))
    counts = {event.key: event.count for event in profiler.key_averages() if event.key.startswith("Optimizer.step#")}
    assert counts == {f"Optimizer.step#{type(optimizer).__name__}.step": 2}


def claim_the_memory_profiler_can_look_into_it(make_optimizer, rank, world_size):
    """With stacks and memory on, torch's profiler reads ``param_groups`` and ``state`` from C++ after each step."""
    params = new_params()
    optimizer = make_optimizer(params)
    with profile(activities=[ProfilerActivity.CPU], with_stack=True, profile_memory=True, record_shapes=True) as prof:
        train(optimizer, params, range(2))
    found = {}
    pending = list(prof.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        info = getattr(event.extra_fields, "optimizer", None)
        if info is not None:
            for param, _, state in info.parameters:
                found.setdefault(param.storage_data_ptr, set()).update(name for name, _ in state)
    owned = owned_ranges(optimizer, params)
    for param in params:
        expected = {"exp_avg", "exp_avg_sq", "step"} if param in owned else set()
        assert found[param.untyped_storage().data_ptr()] >= expected
    assert_equal(params, trained_oracle(2)[1])


# --- hooks -------------------------------------------------------------------------------------------------------


def claim_step_hooks_fire_once_per_step(make_optimizer, rank, world_size):
    params = new_params()
    optimizer = make_optimizer(params)
    seen = []
    before = clones(params)
    pre = optimizer.register_step_pre_hook(lambda *told: seen.append(("pre", told, clones(params))))
    post = optimizer.register_step_post_hook(lambda *told: seen.append(("post", told, clones(params))))
    train(optimizer, params, range(1))
    assert [(when, told) for when, told, _ in seen] == [
        ("pre", (optimizer, (optimizer,), {})),
        ("post", (optimizer, (optimizer,), {})),
    ]
    assert_equal(seen[0][2], before)
    assert_equal(seen[1][2], trained_oracle(1)[1], "weights that the post hook sees")
    pre.remove()
    post.remove()
    train(optimizer, params, range(1, 2))
    assert len(seen) == 2


def claim_global_step_hooks_fire_once_per_step(make_optimizer, rank, world_size):
    params = new_params()
    optimizer = make_optimizer(params)
    seen = []
    register_optimizer_step_pre_hook(lambda each, args, kwargs: seen.append(("pre", each)))
    register_optimizer_step_post_hook(lambda each, args, kwargs: seen.append(("post", each)))
    train(optimizer, params, range(2))
    optimizer.step(lambda: 1.5)
    assert seen == [("pre", optimizer), ("post", optimizer)] * 3


def claim_a_step_pre_hook_may_change_the_arguments(make_optimizer, rank, world_size):
    params = new_params()
    optimizer = make_optimizer(params)
    calls = []

    def closure():
        calls.append(1)
        set_gradients(params, 0)
        return 2.5

    optimizer.register_step_pre_hook(lambda each, args, kwargs: (args, {**kwargs, "closure": closure}))
    assert optimizer.step() == 2.5
    assert calls == [1]
    assert_equal(params, trained_oracle(1)[1])


def claim_state_dict_hooks_fire_once_on_the_final_form(make_optimizer, rank, world_size):
    params = new_params()
    optimizer = make_optimizer(params)
    train(optimizer, params, range(2))
    expected = trained_oracle(2)[0].state_dict()
    order = []

    def post(name):
        def hook(each, state_dict):
            order.append(name)
            assert each is optimizer
            assert state_dict["state"].keys() == expected["state"].keys()
            for index, entry in expected["state"].items():
                assert_equal(state_dict["state"][index].values(), entry.values(), name)
            assert [group["params"] for group in state_dict["param_groups"]] == [list(range(len(params)))]

        return hook

    if hasattr(optimizer, "consolidate_state_dict"):
        optimizer.consolidate_state_dict(to=0)
    optimizer.register_state_dict_pre_hook(lambda each: order.append("pre 1"))
    optimizer.register_state_dict_pre_hook(lambda each: order.append("pre 0"), prepend=True)
    if rank == 0:
        optimizer.register_state_dict_post_hook(post("post 1"))
        removed = optimizer.register_state_dict_post_hook(post("removed"))
        optimizer.register_state_dict_post_hook(post("post 0"), prepend=True)
        removed.remove()
        optimizer.state_dict()
        assert order == ["pre 0", "pre 1", "post 0", "post 1"]


def claim_a_state_dict_post_hook_may_replace_the_dict(make_optimizer, rank, world_size):
    params = new_params()
    optimizer = make_optimizer(params)
    train(optimizer, params, range(2))
    if hasattr(optimizer, "consolidate_state_dict"):
        optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        optimizer.register_state_dict_post_hook(lambda each, state_dict: {"wrapped": state_dict})
        optimizer.register_state_dict_post_hook(lambda each, state_dict: state_dict.update(note="last"))
        result = optimizer.state_dict()
        assert sorted(result) == ["note", "wrapped"]
        assert len(result["wrapped"]["state"]) == len(params)


def claim_load_hooks_fire_once_around_the_load(make_optimizer, rank, world_size):
    saved = trained_oracle(2)[0].state_dict()
    params = new_params()
    optimizer = make_optimizer(params)
    order = []

    def pre(name):
        def hook(each, state_dict):
            order.append(name)
            assert each is optimizer
            assert state_dict["state"].keys() == saved["state"].keys()
            for index, entry in saved["state"].items():
                assert_equal(state_dict["state"][index].values(), entry.values(), name)
            assert [entry for entry in optimizer.state.values() if entry] == []

        return hook

    def post(name):
        def hook(each):
            order.append(name)
            assert each is optimizer
            assert each.param_groups[0]["lr"] == 0.25
            local = getattr(each, "optim", each)
            assert {float(entry["step"]) for entry in local.state.values() if entry} == (
                {2.0} if local.param_groups[0]["params"] else set()
            )

        return hook

    optimizer.register_load_state_dict_pre_hook(pre("pre 1"))
    optimizer.register_load_state_dict_pre_hook(pre("pre 0"), prepend=True)
    removed = optimizer.register_load_state_dict_pre_hook(pre("removed"))
    optimizer.register_load_state_dict_post_hook(post("post 1"))
    optimizer.register_load_state_dict_post_hook(post("post 0"), prepend=True)
    removed.remove()
    saved["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert order == ["pre 0", "pre 1", "post 0", "post 1"]


def claim_a_load_pre_hook_may_replace_the_dict(make_optimizer, rank, world_size):
    oracle, oracle_params = trained_oracle(2)
    params = [torch.nn.Parameter(param.detach().clone()) for param in oracle_params]
    optimizer = make_optimizer(params)
    optimizer.register_load_state_dict_pre_hook(lambda each, wrapped: wrapped["inner"])
    given = {"inner": copy.deepcopy(oracle.state_dict())}
    optimizer.load_state_dict(given)
    assert list(given) == ["inner"]
    train(optimizer, params, range(2, 4))
    assert_equal(params, trained_oracle(4)[1])


def claim_a_load_post_hook_may_set_options(make_optimizer, rank, world_size):
    oracle, oracle_params = trained_oracle(2)
    params = [torch.nn.Parameter(param.detach().clone()) for param in oracle_params]
    optimizer = make_optimizer(params)

    def set_lr(each):
        each.param_groups[0]["lr"] = 0.125

    optimizer.register_load_state_dict_post_hook(set_lr)
    optimizer.load_state_dict(copy.deepcopy(oracle.state_dict()))
    oracle.param_groups[0]["lr"] = 0.125
    train(optimizer, params, range(2, 4))
    train(oracle, oracle_params, range(2, 4))
    assert_equal(params, oracle_params)


# --- groups, saving, copies --------------------------------------------------------------------------------------


def claim_an_added_group_is_trained_and_complete_at_once(make_optimizer, rank, world_size):
    params, oracle_params = new_params(), new_params()
    optimizer, oracle = make_optimizer(params[:3]), adamw(oracle_params[:3])
    for each, its_params in ((optimizer, params), (oracle, oracle_params)):
        train(each, its_params[:3], range(2))
        each.add_param_group(param_group={"params": its_params[3:], "lr": 0.2})
    found, expected = ({**each.param_groups[1], "params": None} for each in (optimizer, oracle))
    assert found == expected
    assert optimizer.param_groups[1]["params"][0] is params[3]
    for each, its_params in ((optimizer, params), (oracle, oracle_params)):
        train(each, its_params, range(2, 4))
    assert_equal(params, oracle_params)


def claim_the_state_dict_of_a_new_optimizer_is_empty_and_loads_back(make_optimizer, rank, world_size):
    params = new_params()
    optimizer = make_optimizer(params)
    saved = optimizer.state_dict()
    assert saved == adamw(new_params()).state_dict()
    optimizer.load_state_dict(state_dict=saved)
    assert optimizer.state_dict() == saved
    assert [entry for entry in optimizer.state.values() if entry] == []
    train(optimizer, params, range(2))
    assert_equal(params, trained_oracle(2)[1])


def claim_loading_leaves_the_callers_dict_as_it_was(make_optimizer, rank, world_size):
    given = copy.deepcopy(trained_oracle(2)[0].state_dict())
    kept = copy.deepcopy(given)
    make_optimizer(new_params()).load_state_dict(given)
    assert given["param_groups"] == kept["param_groups"]
    assert given["state"].keys() == kept["state"].keys()
    for index, entry in kept["state"].items():
        assert given["state"][index].keys() == entry.keys()
        assert_equal(given["state"][index].values(), entry.values(), f"state of {index}")


def claim_a_deep_copy_steps_its_own_parameters(make_optimizer, rank, world_size):
    params = new_params()
    optimizer = make_optimizer(params)
    train(optimizer, params, range(2))
    twin = copy.deepcopy(optimizer)
    twin_params = [param for group in twin.param_groups for param in group["params"]]
    _assert_independent(optimizer, params, twin, twin_params)


def claim_a_deep_copy_of_model_and_optimizer_stays_tied(make_optimizer, rank, world_size):
    model = torch.nn.ParameterList(new_params())
    optimizer = make_optimizer(model.parameters())
    train(optimizer, list(model), range(2))
    twin_model, twin = copy.deepcopy((model, optimizer))
    twin_params = [param for group in twin.param_groups for param in group["params"]]
    assert all(one is other for one, other in zip(twin_model, twin_params, strict=True))
    _assert_independent(optimizer, list(model), twin, list(twin_model))


def claim_a_copy_before_the_first_step_is_whole(make_optimizer, rank, world_size):
    optimizer = make_optimizer(new_params())
    twin = copy.deepcopy(optimizer)
    twin_params = [param for group in twin.param_groups for param in group["params"]]
    train(twin, twin_params, range(3))
    assert_equal(twin_params, trained_oracle(3)[1])


def claim_pickle_keeps_it_whole(make_optimizer, rank, world_size):
    params = new_params()
    optimizer = make_optimizer(params)
    train(optimizer, params, range(2))
    twin_params, twin = pickle.loads(pickle.dumps((params, optimizer)))
    _assert_independent(optimizer, params, twin, twin_params)


def claim_torch_save_keeps_it_whole(make_optimizer, rank, world_size):
    params = new_params()
    optimizer = make_optimizer(params)
    train(optimizer, params, range(2))
    buffer = io.BytesIO()
    torch.save((params, optimizer), buffer)
    buffer.seek(0)
    twin_params, twin = torch.load(buffer, weights_only=False)
    _assert_independent(optimizer, params, twin, twin_params)


def _assert_independent(optimizer, params, twin, twin_params):
    """Both were trained for 2 steps. Each goes on by itself and both end as the oracle does."""
    expected_2, expected_4 = trained_oracle(2)[1], trained_oracle(4)[1]
    assert type(twin) is type(optimizer)
    assert not {param.data_ptr() for param in params} & {param.data_ptr() for param in twin_params}
    train(twin, twin_params, range(2, 4))
    assert_equal(twin_params, expected_4, "weights of the copy")
    assert_equal(params, expected_2, "weights of the original while the copy steps")
    train(optimizer, params, range(2, 4))
    assert_equal(params, expected_4, "weights of the original")
    assert_equal(twin_params, expected_4, "weights of the copy while the original steps")
    assert twin.defaults == optimizer.defaults
    twin.param_groups[0]["lr"] = 0.0
    assert optimizer.param_groups[0]["lr"] == OPTIONS["lr"]
    twin.zero_grad()
    assert all(param.grad is None for param in twin_params)
    assert all(param.grad is not None for param in params)


def claim_hooks_and_schedulers_work_on_a_copy(make_optimizer, rank, world_size):
    optimizer = make_optimizer(new_params())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # patches step on the instance; a copy must not keep that
    twin = copy.deepcopy(optimizer)
    twin_params = [param for group in twin.param_groups for param in group["params"]]
    seen = []
    twin.register_step_post_hook(lambda each, args, kwargs: seen.append(each))
    scheduler = torch.optim.lr_scheduler.StepLR(twin, 1, gamma=0.5)
    for step in range(2):
        train(twin, twin_params, [step])
        scheduler.step()
    assert seen == [twin, twin]
    assert twin.param_groups[0]["lr"] == OPTIONS["lr"] / 4
    assert optimizer.param_groups[0]["lr"] == OPTIONS["lr"]


# --- frameworks --------------------------------------------------------------------------------------------------


def claim_dcp_gets_the_state_without_a_phantom_step(make_optimizer, rank, world_size):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = torch.nn.ParameterList(new_params())
    params = list(model)
    optimizer = make_optimizer(model.parameters())
    train(optimizer, params, range(2))
    optimizer.zero_grad()  # gradients would keep DCP from its phantom step
    if hasattr(optimizer, "consolidate_state_dict"):
        optimizer.consolidate_state_dict(to=0)
    before = clones(params)
    found = get_optimizer_state_dict(model, optimizer)
    assert_equal(params, before)
    oracle, _ = trained_oracle(2)
    local = getattr(optimizer, "optim", optimizer)
    assert {float(entry["step"]) for entry in local.state.values()} <= {2.0}
    names = [name for name, _ in model.named_parameters()]
    assert found["param_groups"][0]["params"] == names
    if rank == 0:
        assert sorted(found["state"]) == sorted(names)
        for index, name in enumerate(names):
            assert_equal(found["state"][name].values(), oracle.state_dict()["state"][index].values(), name)
    train(optimizer, params, range(2, 4))
    assert_equal(params, trained_oracle(4)[1])


def claim_dcp_sets_the_state_of_a_new_optimizer(make_optimizer, rank, world_size):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    oracle, oracle_params = trained_oracle(2)
    saved = get_optimizer_state_dict(torch.nn.ParameterList(oracle_params), oracle)
    model = torch.nn.ParameterList([torch.nn.Parameter(param.detach().clone()) for param in oracle_params])
    params = list(model)
    optimizer = make_optimizer(model.parameters())
    before = clones(params)
    set_optimizer_state_dict(model, optimizer, optim_state_dict=saved)
    assert_equal(params, before)
    _assert_state_is(optimizer, params, oracle, oracle_params, world_size)
    train(optimizer, params, range(2, 4))
    assert_equal(params, trained_oracle(4)[1])


def claim_accelerate_prepares_and_trains_it(make_optimizer, rank, world_size):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # asked for, not used: the group exists already
    from accelerate import Accelerator

    def new_model():
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(7, 31), torch.nn.Tanh(), torch.nn.Linear(31, 3)).double()

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == world_size
    raw, oracle = new_model(), new_model()
    model, optimizer, scheduler = accelerator.prepare(
        raw, raw_optimizer := make_optimizer(raw.parameters()), torch.optim.lr_scheduler.StepLR(raw_optimizer, 100)
    )
    oracle_optimizer = adamw(oracle.parameters())
    oracle_model = oracle if world_size == 1 else torch.nn.parallel.DistributedDataParallel(oracle)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        batch = torch.randn(2, 7, generator=generator, dtype=torch.float64)
        accelerator.backward(model(batch).square().mean())
        oracle_model(batch).square().mean().backward()
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.5)
        for each in (optimizer, oracle_optimizer):
            each.step()
            each.zero_grad()
        scheduler.step()
    assert optimizer.optimizer is raw_optimizer
    assert_equal(raw.parameters(), oracle.parameters())


# --- running one ---------------------------------------------------------------------------------------------------


def keep(rank, world_size, claim, subject):
    """The worker: raise unless the subject keeps the claim."""
    dist.barrier()  # a rank that never communicates must not be gone before the others have connected
    globals()[f"claim_{claim}"](SUBJECTS[subject], rank, world_size)
