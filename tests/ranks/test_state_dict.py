"""State dicts: given out, moved between numbers of ranks and granularities, taken in. Oracle: the plain optimizer."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
import torch.distributed as dist
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, RMSprop

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import assert_same, error_of, parameters, set_gradients, train, values_of

WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 4])
MARK = "shardstep_full_state_at_rank"


def two_groups(params: list) -> list[dict[str, Any]]:
    return [{"params": params[:2], "lr": 0.03}, {"params": params[2:], "weight_decay": 0.1}]


def build(params: list, optimizer_class: Any = Adam, shard: str = "auto", **options: Any) -> ZeroRedundancyOptimizer:
    options.setdefault("lr", 0.1)
    return ZeroRedundancyOptimizer(two_groups(params), optimizer_class, shard=shard, **options)


def plain(params: list, optimizer_class: Any = Adam, **options: Any) -> Optimizer:
    options.setdefault("lr", 0.1)
    return optimizer_class(two_groups(params), **options)


def trained_pair(steps: int = 2, shard: str = "auto", optimizer_class: Any = Adam, **options: Any):
    """(our parameters, our optimizer, oracle's parameters, oracle), both stepped."""
    ours, theirs = parameters(), parameters()
    optimizer = build(ours, optimizer_class, shard, **options)
    oracle = plain(theirs, optimizer_class, **options)
    train(optimizer, ours, range(steps))
    train(oracle, theirs, range(steps))
    return ours, optimizer, theirs, oracle


def has_cut_parameters(optimizer: ZeroRedundancyOptimizer) -> bool:
    """Whether this rank's local optimizer steps a tensor that is no parameter of the user's."""
    given = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return any(id(param) not in given for group in optimizer.optim.param_groups for param in group["params"])


# --- fresh, stale, recipient, mark ------------------------------------------------------------------------------------


def life_of_a_state_dict(rank: int, world: int) -> None:
    params, other = parameters(), parameters()
    optimizer, oracle = build(params), plain(other)
    fresh = optimizer.state_dict()
    assert_same(fresh, oracle.state_dict(), "fresh")

    train(optimizer, params, range(2))
    train(oracle, other, range(2))
    for to in range(world):
        error = error_of(optimizer.state_dict, "not consolidated")
        assert isinstance(error, RuntimeError)
        assert f"consolidate_state_dict(to={max(to - 1, 0)})" in str(error)  # 0 unless told: the last recipient
        optimizer.consolidate_state_dict(to=to)
        given, expected = optimizer.state_dict(), oracle.state_dict()
        if rank == to:
            assert_same(given, expected, f"consolidated to {to}")
            assert list(given["state"]) == sorted(given["state"])
        else:
            assert_same(given, {"state": {}, "param_groups": expected["param_groups"], MARK: to}, "not the recipient")
            error = error_of(partial(plain(parameters()).load_state_dict, {**given, "param_groups": []}), "torch")
        train(optimizer, params, [2 + to])
        train(oracle, other, [2 + to])

    optimizer.consolidate_state_dict()
    optimizer.load_state_dict(fresh)
    assert_same(optimizer.state_dict(), fresh, "an empty dict is loaded: fresh again")


@WORLDS
def test_a_state_dict_is_empty_when_fresh_full_at_the_recipient_marked_elsewhere_and_never_stale(world):
    run_ranks(life_of_a_state_dict, world)


def staleness(rank: int, world: int) -> None:
    params, optimizer, _, oracle = trained_pair()
    optimizer.consolidate_state_dict(to=world - 1)
    full = oracle.state_dict()
    optimizer.load_state_dict(full)
    assert isinstance(error_of(optimizer.state_dict, "after a load"), RuntimeError)
    optimizer.consolidate_state_dict(to=1)
    # Not collective: rank 1 asks alone, as often as it likes, and gets equal dicts.
    if rank == 1:
        assert_same(optimizer.state_dict(), optimizer.state_dict())
        assert_same(optimizer.state_dict(), full)
    set_gradients(params, 7)
    optimizer.step()
    assert isinstance(error_of(optimizer.state_dict, "after a step"), RuntimeError)


def test_a_load_makes_the_state_dict_stale_and_asking_for_it_is_not_collective():
    run_ranks(staleness, 3)


def stale_after_added_state(rank: int, world: int) -> None:
    """Adagrad makes state when a group is added, so a dict consolidated before it lacks some."""
    params, other = parameters(), parameters()
    optimizer = ZeroRedundancyOptimizer(params[:3], Adagrad, lr=0.1, initial_accumulator_value=0.5)
    oracle = Adagrad(other[:3], lr=0.1, initial_accumulator_value=0.5)
    train(optimizer, params[:3], range(2))
    train(oracle, other[:3], range(2))
    optimizer.consolidate_state_dict()
    optimizer.add_param_group({"params": params[3:]})
    oracle.add_param_group({"params": other[3:]})
    error = error_of(optimizer.state_dict, "stale after add_param_group made state")
    assert isinstance(error, RuntimeError)
    optimizer.consolidate_state_dict()
    if rank == 0:
        assert_same(optimizer.state_dict(), oracle.state_dict())


def test_a_group_that_comes_with_state_makes_the_state_dict_stale():
    run_ranks(stale_after_added_state, 3)


def marked_dict(rank: int, world: int) -> None:
    params, optimizer, other, oracle = trained_pair()
    optimizer.consolidate_state_dict(to=1)
    given = optimizer.state_dict()
    marked = {**given, "state": {}, MARK: 1}
    error = error_of(lambda: optimizer.load_state_dict(marked), "marked on every rank")
    assert isinstance(error, ValueError)
    assert "rank 1" in str(error)
    # What programs do by mistake: every rank loads what it was given itself.
    error = error_of(lambda: optimizer.load_state_dict(given), "every rank loads its own")
    assert isinstance(error, RuntimeError if rank == 1 else ValueError), repr(error)
    assert "rank 1" in str(error)
    train(optimizer, params, [5])
    train(oracle, other, [5])
    assert_same(values_of(params), values_of(other), "nothing was loaded")


def test_a_marked_dict_is_refused_on_every_rank_and_the_rank_with_the_full_one_is_named():
    run_ranks(marked_dict, 3)


def bad_arguments(rank: int, world: int) -> None:
    _, optimizer, _, oracle = trained_pair()
    for to in (-1, world, 99, "0", None, 1.0):
        error = error_of(partial(optimizer.consolidate_state_dict, to=to), f"to={to!r}")
        assert isinstance(error, (ValueError, TypeError)), repr(error)
        assert repr(to) in str(error)
        assert "to expects" in str(error)
    for chunk_mb in (0, -1, "16", None):
        error = error_of(partial(optimizer.consolidate_state_dict, chunk_mb=chunk_mb), f"chunk_mb={chunk_mb!r}")
        assert isinstance(error, (ValueError, TypeError)), repr(error)
        assert "chunk_mb" in str(error), str(error)
        assert repr(chunk_mb) in str(error), str(error)
    if world > 1:
        error = error_of(partial(optimizer.consolidate_state_dict, to=world if rank == 1 else 0), "on one rank only")
        assert isinstance(error, ValueError if rank == 1 else RuntimeError)
        assert "rank 1" in str(error) or rank == 1
        error = error_of(partial(optimizer.consolidate_state_dict, to=min(rank, 1)), "different recipients")
        assert isinstance(error, RuntimeError)
        assert "to is 0 on rank 0" in str(error)
    stranger = torch.nn.Parameter(torch.zeros(3))
    for param in (stranger, None, "weight"):
        error = error_of(partial(optimizer.full_state, param), f"full_state({type(param)})")
        assert isinstance(error, (ValueError, TypeError)), repr(error)
        assert "full_state expects a parameter" in str(error), str(error)
    optimizer.consolidate_state_dict()
    if rank == 0:
        assert_same(optimizer.state_dict(), oracle.state_dict(), "still works")


@pytest.mark.parametrize("world", [1, 3])
def test_a_wrong_recipient_chunk_or_parameter_is_an_error_on_every_rank_that_names_the_value(world):
    run_ranks(bad_arguments, world)


# --- saved at one number of ranks, loaded at another ----------------------------------------------------------------

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (Adam, {"lr": 0.1, "amsgrad": True}),
    "sgd": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd without state": (SGD, {"lr": 0.1}),
    "rmsprop": (RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "adagrad": (Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    "adafactor": (Adafactor, {"lr": 0.1}),
    "schedulefree": (schedulefree.AdamWScheduleFree, {"lr": 0.1, "warmup_steps": 3}),
    "fused adamw": (AdamW, {"lr": 0.1, "fused": True}),
}


def switch(optimizer: Any, mode: str) -> None:
    if callable(getattr(optimizer, mode, None)):  # schedule-free optimizers are saved in eval mode
        getattr(optimizer, mode)()


def stage(optimizer: Any, params: list, start: int) -> None:
    switch(optimizer, "train")
    train(optimizer, params, range(start, start + 2))
    switch(optimizer, "eval")


def uninterrupted(name: str, until: int) -> dict[str, Any]:
    """The plain optimizer's weights and state after ``until`` steps."""
    optimizer_class, options = CASES[name]
    params = parameters()
    optimizer = optimizer_class(two_groups(params), **options)
    for start in range(0, until, 2):
        stage(optimizer, params, start)
    return {"weights": values_of(params), "optimizer": optimizer.state_dict()}


def resume(name: str, checkpoint: dict, start: int, build: Any) -> tuple[list, Any]:
    optimizer_class, options = CASES[name]
    params = parameters()
    with torch.no_grad():
        for param, value in zip(params, checkpoint["weights"], strict=True):
            param.copy_(value)
    optimizer = build(two_groups(params), optimizer_class, **options)
    before = copy.deepcopy(checkpoint["optimizer"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert_same(checkpoint["optimizer"], before, f"{name}: the caller's dict after the load")
    stage(optimizer, params, start)
    if isinstance(optimizer, ZeroRedundancyOptimizer):  # torch's own optimizers step in the caller's tensors
        assert_same(checkpoint["optimizer"], before, f"{name}: the caller's dict after further steps")
    return params, optimizer


def file_of(folder: str, name: str, step: int) -> Path:
    return Path(folder) / f"{name}-{step}.pt"


def resumed_stage(rank: int, world: int, folder: str, start: int, shard: str) -> None:
    to = world - 1
    for name in CASES:
        checkpoint = torch.load(file_of(folder, name, start), weights_only=True)
        params, optimizer = resume(name, checkpoint, start, partial(ZeroRedundancyOptimizer, shard=shard))
        if world > 1 and name in ("adam", "sgd", "adagrad") and rank == 0:
            assert has_cut_parameters(optimizer) == (shard == "auto"), name
        expected = uninterrupted(name, start + 2)
        optimizer.consolidate_state_dict(to=to)
        found = {"weights": values_of(params), "optimizer": optimizer.state_dict()}
        if rank == to:
            check_stage(name, found, expected)
            torch.save(found, file_of(folder, name, start + 2))
        else:
            check_stage(name, found["weights"], expected["weights"])


def check_stage(name: str, found: Any, expected: Any) -> None:
    if name != "fused adamw":
        assert_same(found, expected, name)
        return
    # Fused kernels treat the tail of a tensor with scalar code, which rounds differently, and a cut moves the tail:
    # a few units in the last place per step, hence 1e-13 relative over 10 steps in float64.
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(
    "shards",
    [("auto", "tensor"), pytest.param(("tensor", "auto"), marks=pytest.mark.again)],
    ids=["element first", "tensor first"],
)
def test_training_continues_exactly_through_checkpoints_at_4_3_1_and_2_ranks_and_the_plain_optimizer(tmp_path, shards):
    """Plain -> 4 -> 3 -> 1 -> 2 -> plain, each granularity reading what the other wrote."""
    for name in CASES:
        torch.save(uninterrupted(name, 2), file_of(str(tmp_path), name, 2))
    for position, (world, start) in enumerate(zip((4, 3, 1, 2), (2, 4, 6, 8), strict=True)):
        run_ranks(resumed_stage, world, str(tmp_path), start, shards[position % 2])
    for name in CASES:
        checkpoint = torch.load(file_of(str(tmp_path), name, 10), weights_only=True)
        params, optimizer = resume(name, checkpoint, 10, lambda groups, cls, **options: cls(groups, **options))
        found = {"weights": values_of(params), "optimizer": optimizer.state_dict()}
        check_stage(name, found, uninterrupted(name, 12))


def fused_resume(rank: int, world: int, shard: str) -> None:
    """At the same number of ranks even a cut fused AdamW continues bit for bit."""
    straight, interrupted = parameters(), parameters()
    uninterrupted_optimizer = build(straight, AdamW, shard, fused=True)
    train(uninterrupted_optimizer, straight, range(5))
    first = build(interrupted, AdamW, shard, fused=True)
    train(first, interrupted, range(2))
    first.consolidate_state_dict()
    box = io.BytesIO()
    torch.save(first.state_dict(), box)
    payload = [box.getvalue()] if rank == 0 else [None]
    dist.broadcast_object_list(payload)
    full = torch.load(io.BytesIO(payload[0]), weights_only=True)
    second = build(interrupted, AdamW, shard, fused=True)
    second.load_state_dict(full)
    train(second, interrupted, range(2, 5))
    assert_same(values_of(interrupted), values_of(straight), shard)
    if shard == "tensor":
        oracle_params = parameters()
        train(plain(oracle_params, AdamW, fused=True), oracle_params, range(5))
        assert_same(values_of(interrupted), values_of(oracle_params), "whole tensors equal the plain optimizer")


@pytest.mark.parametrize("shard", ["auto", "tensor"])
def test_fused_adamw_resumes_bit_for_bit_at_the_same_number_of_ranks(shard):
    run_ranks(fused_resume, 3, shard)


# --- whose memory is it -----------------------------------------------------------------------------------------------


def no_aliasing(rank: int, world: int, shard: str) -> None:
    params, optimizer, other, oracle = trained_pair(shard=shard)
    optimizer.consolidate_state_dict(to=0)
    given = optimizer.state_dict()
    kept = copy.deepcopy(given)
    train(optimizer, params, [2, 3])
    assert_same(given, kept, "a dict that was given out does not change with further steps")
    train(oracle, other, [2, 3])

    full = copy.deepcopy(oracle.state_dict())
    optimizer.load_state_dict(full)
    optimizer.consolidate_state_dict(to=0)
    for state_dict in (full, optimizer.state_dict(), given):
        for state in state_dict["state"].values():
            for value in state.values():
                value.fill_(7)
        for group in state_dict["param_groups"]:
            group["lr"] = 1e9
            group["betas"] = (0, 0)
    train(optimizer, params, [4])
    train(oracle, other, [4])
    assert_same(values_of(params), values_of(other), "scribbling over dicts does not reach the optimizer")
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        assert_same(optimizer.state_dict(), oracle.state_dict())


@pytest.mark.parametrize("shard", ["auto", "tensor"])
@pytest.mark.parametrize("world", [1, 3])
def test_dicts_and_live_state_share_no_memory(world, shard):
    run_ranks(no_aliasing, world, shard)


# --- loads that fail --------------------------------------------------------------------------------------------------


def broken_dicts(full: dict[str, Any]) -> dict[str, Any]:
    """name -> a dict that cannot be loaded."""
    groups = full["param_groups"]
    other_size = [{**groups[0], "params": [0]}, {**groups[1], "params": [1, 2, 3, 4]}]
    other_shape = {i: {**state, "exp_avg": torch.zeros(5, 3)} for i, state in full["state"].items()}
    nameless = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return {
        "fewer groups": {**full, "param_groups": groups[:1]},
        "more groups": {**full, "param_groups": [*groups, {**groups[1], "params": []}]},
        "other sizes": {**full, "param_groups": other_size},
        "other shape of a cut parameter's state": {**full, "state": other_shape},
        "no state": {"param_groups": groups},
        "no groups": {"state": full["state"]},
        "groups without params": {**full, "param_groups": nameless},
        "a state that is no dict": {**full, "state": 3},
        "an entry that is no dict": {**full, "state": {**full["state"], 1: 5.0}},
        "groups that are no list": {**full, "param_groups": 3},
        "nothing": None,
        "a list": [1, 2],
        "a model's state dict": {"layer.weight": torch.zeros(3)},
        "a number": 5,
    }


def facts_of(params: list, optimizer: ZeroRedundancyOptimizer) -> Any:
    local = optimizer.optim
    states = [dict(local.state.get(param, {})) for group in local.param_groups for param in group["params"]]
    options = [
        {key: value for key, value in group.items() if key != "params"}
        for group in [*optimizer.param_groups, *local.param_groups]
    ]
    return copy.deepcopy((values_of(params), states, options))


def failing_loads(rank: int, world: int, shard: str) -> None:
    params, optimizer, other, oracle = trained_pair(shard=shard)
    good = copy.deepcopy(oracle.state_dict())
    for group in good["param_groups"]:
        group["lr"] = 123.0
    before = facts_of(params, optimizer)
    for everywhere in (True, False):
        for name, broken in broken_dicts(good).items():
            if name.startswith("other shape") and (shard == "tensor" or world == 1):
                continue  # a whole parameter's state may have any shape
            mine = broken if everywhere or rank == world - 1 else good
            error = error_of(lambda mine=mine: optimizer.load_state_dict(mine), f"{name} (everywhere: {everywhere})")
            if mine is good and world > 1:
                assert f"rank {world - 1}" in str(error), f"{name}: {error}"
            assert_same(facts_of(params, optimizer), before, f"{name} left something behind (everywhere: {everywhere})")
    train(optimizer, params, [2, 3])
    train(oracle, other, [2, 3])
    optimizer.consolidate_state_dict()
    assert_same(values_of(params), values_of(other))
    if rank == 0:
        assert_same(optimizer.state_dict(), oracle.state_dict())


@pytest.mark.parametrize(("world", "shard"), [(1, "auto"), (2, "auto"), (3, "auto"), (3, "tensor")])
def test_a_load_that_fails_on_any_rank_fails_on_all_and_changes_nothing(world, shard):
    run_ranks(failing_loads, world, shard)


def errors_of_a_broken_load(rank: int, world: int) -> dict[str, str]:
    _, optimizer, _, oracle = trained_pair()
    errors = {}
    for name, broken in broken_dicts(oracle.state_dict()).items():
        error = error_of(lambda broken=broken: optimizer.load_state_dict(broken), name)
        assert isinstance(error, (ValueError, TypeError)), f"{name}: {error!r}"
        errors[name] = str(error)
    return errors


def test_the_error_of_a_broken_dict_says_what_was_expected_and_what_came():
    for errors in run_ranks(errors_of_a_broken_load, 2):
        for name, text in errors.items():
            assert "expects" in text, f"{name}: {text}"
        assert "parameter 4" in errors["other shape of a cut parameter's state"]
        assert "(5, 3)" in errors["other shape of a cut parameter's state"]


def different_checkpoints(rank: int, world: int) -> list[str]:
    params, optimizer, other, oracle = trained_pair()
    early = copy.deepcopy(oracle.state_dict())
    train(oracle, other, [2])
    late = copy.deepcopy(oracle.state_dict())
    before = facts_of(params, optimizer)
    errors = [str(error_of(lambda: optimizer.load_state_dict(late if rank == 1 else early), "another step"))]
    changed = copy.deepcopy(early)
    changed["param_groups"][1]["weight_decay"] = 0.25
    errors.append(str(error_of(lambda: optimizer.load_state_dict(changed if rank == 2 else early), "another option")))
    partial_dict = copy.deepcopy(early)
    del partial_dict["state"][3]
    errors.append(str(error_of(lambda: optimizer.load_state_dict(partial_dict if rank == 0 else early), "less state")))
    assert_same(facts_of(params, optimizer), before, "nothing was loaded")
    return errors


def test_ranks_that_load_different_checkpoints_are_told_what_differs_and_load_nothing():
    for step, option, missing in run_ranks(different_checkpoints, 3):
        assert "parameter 0" in step
        assert "2.0 on ranks 0, 2 but 3.0 on rank 1" in step
        assert "parameter group 1: weight_decay is 0.1 on ranks 0, 1 but 0.25 on rank 2" in option
        assert "parameter 3" in missing
        assert "rank 0" in missing


# --- hooks ------------------------------------------------------------------------------------------------------------


def state_dict_hooks(rank: int, world: int) -> None:
    params, optimizer, other, oracle = trained_pair()
    optimizer.consolidate_state_dict(to=0)
    calls: list[str] = []

    def note(name, answer=None):
        def hook(*args):
            assert args[0] is optimizer
            calls.append(name)
            return answer(*args) if answer is not None else None

        return hook

    optimizer.register_state_dict_pre_hook(note("save pre 2"))
    optimizer.register_state_dict_pre_hook(note("save pre 1"), prepend=True)
    optimizer.register_state_dict_post_hook(note("save post 2", lambda _, form: {**form, "extra": len(form)}))
    optimizer.register_state_dict_post_hook(note("save post 1", lambda _, form: form.update(note="here")), prepend=True)
    given = optimizer.state_dict()
    assert calls == ["save pre 1", "save pre 2", "save post 1", "save post 2"]
    assert given["note"] == "here"
    assert given["extra"] == 4 if rank > 0 else 3
    assert len(given["state"]) == (5 if rank == 0 else 0), "post hooks see the final form"

    calls.clear()
    full = copy.deepcopy(oracle.state_dict())
    kept = copy.deepcopy(full)

    def other_lr(_, form):
        assert_same(form["state"], full["state"], "pre hooks see the full form")
        return {**form, "param_groups": [{**group, "lr": 0.5} for group in form["param_groups"]]}

    def loaded(_):
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5], "post hooks see what was loaded"

    optimizer.register_load_state_dict_pre_hook(note("load pre 2", other_lr))
    optimizer.register_load_state_dict_pre_hook(note("load pre 1", lambda _, form: form.pop("x", None)), prepend=True)
    optimizer.register_load_state_dict_post_hook(note("load post 2", loaded))
    optimizer.register_load_state_dict_post_hook(note("load post 1"), prepend=True)
    optimizer.load_state_dict(full)
    assert calls == ["load pre 1", "load pre 2", "load post 1", "load post 2"]
    assert_same(full, kept)
    train(optimizer, params, [2])
    for group in oracle.param_groups:
        group["lr"] = 0.5
    train(oracle, other, [2])
    assert_same(values_of(params), values_of(other))


@pytest.mark.parametrize("world", [1, 3])
def test_state_dict_and_load_hooks_fire_once_in_order_on_the_final_form(world):
    run_ranks(state_dict_hooks, world)


# --- copies -----------------------------------------------------------------------------------------------------------


def copies(rank: int, world: int, shard: str, views: bool) -> None:
    params, optimizer, other, oracle = trained_pair()
    params, other = parameters(), parameters()
    optimizer = build(params, Adam, shard, parameters_as_bucket_view=views)
    oracle = plain(other)
    train(optimizer, params, range(2))
    train(oracle, other, range(2))
    copied_params, copied = copy.deepcopy((params, optimizer))
    loaded_params, loaded = pickle.loads(pickle.dumps((params, optimizer)))
    lonely = copy.deepcopy(optimizer)  # with copies of the parameters of its own
    lonely_params = [param for group in lonely.param_groups for param in group["params"]]
    assert lonely_params[0] is not params[0]

    train(optimizer, params, [9])  # the original goes another way first
    train(oracle, other, [2, 3])
    for twin_params, twin in ((copied_params, copied), (loaded_params, loaded), (lonely_params, lonely)):
        assert [param for group in twin.param_groups for param in group["params"]] == twin_params
        train(twin, twin_params, [2, 3])
        assert_same(values_of(twin_params), values_of(other), "a copy trains on like the oracle")
        twin.check_replicas()
        twin.consolidate_state_dict(to=world - 1)
        if rank == world - 1:
            assert_same(twin.state_dict(), oracle.state_dict(), "the state of a copy")
    straight_params = parameters()
    straight = plain(straight_params)
    train(straight, straight_params, [0, 1, 9])
    assert_same(values_of(params), values_of(straight_params), "the original is not moved by its copies")


@pytest.mark.parametrize(
    ("world", "shard", "views"), [(1, "auto", False), (3, "auto", False), (3, "auto", True), (3, "tensor", False)]
)
def test_copies_made_by_deepcopy_and_pickle_train_on_like_the_oracle(world, shard, views):
    run_ranks(copies, world, shard, views)


def copy_of_a_snapshot(rank: int, world: int) -> None:
    params, optimizer, other, oracle = trained_pair()
    optimizer.consolidate_state_dict(to=1)
    if rank == 1:  # a copy may be made on one rank only
        assert_same(copy.deepcopy(optimizer).state_dict(), oracle.state_dict())
    train(optimizer, params, [2])
    train(oracle, other, [2])
    assert_same(values_of(params), values_of(other))


def test_one_rank_may_copy_alone():
    run_ranks(copy_of_a_snapshot, 3)


# --- one parameter ----------------------------------------------------------------------------------------------------


def full_states(rank: int, world: int, shard: str) -> None:
    params, other = parameters(), parameters()
    params[1].requires_grad_(False)
    other[1].requires_grad_(False)
    optimizer, oracle = build(params, shard=shard), plain(other)
    for param in params:
        assert optimizer.full_state(param) == {}, "before the first step"
    for step in range(2):
        for mine, theirs in ((params, optimizer), (other, oracle)):
            set_gradients(mine, step)
            mine[1].grad = None
            theirs.step()
    for param, twin in zip(params, other, strict=True):
        assert_same(optimizer.full_state(param), dict(oracle.state.get(twin, {})))
    optimizer.full_state(params[0])["exp_avg"].zero_()
    assert_same(optimizer.full_state(params[0]), dict(oracle.state[other[0]]), "the answer is a copy")


@pytest.mark.parametrize("shard", ["auto", "tensor"])
@WORLDS
def test_full_state_on_every_rank_is_the_oracles(world, shard):
    run_ranks(full_states, world, shard)


# --- what is sent -----------------------------------------------------------------------------------------------------


class Traffic:
    """Counts the bytes that torch.distributed moves for this rank, while it is open."""

    NAMES = ("send", "recv", "isend", "irecv", "broadcast", "all_gather", "all_gather_into_tensor", "all_reduce",
             "all_to_all_single", "gather", "scatter", "reduce")  # fmt: skip

    def __enter__(self) -> Traffic:
        self.sent, self.received, self.other = [], [], []
        self._real = {name: getattr(dist, name) for name in self.NAMES}
        for name, real in self._real.items():
            setattr(dist, name, partial(self._counted, name, real))
        return self

    def _counted(self, name: str, real: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sizes = {"send": self.sent, "isend": self.sent, "recv": self.received, "irecv": self.received}
        sizes.get(name, self.other).append(tensor.nbytes if isinstance(tensor, torch.Tensor) else -1)
        return real(tensor, *args, **kwargs)

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(dist, name, real)


def consolidation_traffic(rank: int, world: int, shard: str) -> None:
    shapes = [(61, 43), (40, 33), (17,), (9, 301)]
    params = parameters(shapes)
    other = parameters(shapes)
    optimizer = ZeroRedundancyOptimizer(params, Adam, lr=0.1, shard=shard)
    oracle = Adam(other, lr=0.1)
    train(optimizer, params, range(2))
    train(oracle, other, range(2))
    mine = sum(value.nbytes for state in optimizer.optim.state.values() for value in state.values())
    total = sum(value.nbytes for state in oracle.state.values() for value in state.values())
    # A cut parameter has one "step" (4 bytes) per piece on the way.
    steps = 4 * world * len(shapes)
    header = 4096  # JSON: shapes, dtypes and scalars of the states, no tensor data
    for to in range(world):
        for chunk_mb in (0.005, 16):
            with Traffic() as traffic:
                optimizer.consolidate_state_dict(to=to, chunk_mb=chunk_mb)
            case = f"to={to}, chunk_mb={chunk_mb}, rank {rank}: {traffic.sent} {traffic.received}"
            assert not traffic.other, case
            if rank == to:
                assert not traffic.sent, case
                assert total - mine <= sum(traffic.received) <= total - mine + steps + header * (world - 1), case
                assert_same(optimizer.state_dict(), oracle.state_dict(), case)
            else:
                assert not traffic.received, case
                assert mine <= sum(traffic.sent) <= mine + header, case
            if chunk_mb == 0.005:
                assert max(traffic.sent + traffic.received, default=0) <= 0.005 * 2**20, case
            else:
                # One size, one header and one chunk, which holds everything, from each sender.
                assert len(traffic.sent) <= 3 and len(traffic.received) <= 3 * (world - 1), case  # noqa: PT018


@pytest.mark.parametrize(("world", "shard"), [(2, "auto"), (3, "auto"), (3, "tensor"), (4, "auto")])
def test_consolidation_sends_to_the_recipient_only_and_never_more_than_a_chunk_at_once(world, shard):
    run_ranks(consolidation_traffic, world, shard)


def tiny_chunks(rank: int, world: int) -> None:
    for name in ("adam", "sgd without state", "adafactor"):
        optimizer_class, options = CASES[name]
        _, optimizer, _, oracle = trained_pair(2, "auto", optimizer_class, **options)
        for chunk_mb in (1e-5, 0.001):
            optimizer.consolidate_state_dict(to=1, chunk_mb=chunk_mb)
            if rank == 1:
                assert_same(optimizer.state_dict(), oracle.state_dict(), f"{name}, chunk_mb={chunk_mb}")


def test_chunks_of_any_size_give_the_same_dict():
    run_ranks(tiny_chunks, 3)


def partly_missing_state(rank: int, world: int) -> None:
    params = parameters([(31,)])
    optimizer = ZeroRedundancyOptimizer(params, Adam, lr=0.1, shard="element")
    if rank != 1:
        set_gradients(params, 0)
    optimizer.step()
    error = error_of(lambda: optimizer.consolidate_state_dict(to=0), "state of a piece is missing")
    assert isinstance(error, RuntimeError)
    assert "parameter 0" in str(error)


def test_a_gradient_that_was_missing_on_one_rank_is_reported_by_consolidation_on_every_rank():
    run_ranks(partly_missing_state, 3)


# --- names, nested states, odd states ---------------------------------------------------------------------------------


def named_groups(params: list) -> list[dict[str, Any]]:
    named = [(f"layer{i}.weight", param) for i, param in enumerate(params)]
    return [{"params": named[:2], "lr": 0.03}, {"params": []}, {"params": named[2:], "weight_decay": 0.1}]


def names(rank: int, world: int, shard: str) -> None:
    params, other = parameters(), parameters()
    optimizer = ZeroRedundancyOptimizer(named_groups(params), Adam, lr=0.1, shard=shard)
    groups = named_groups(other)
    groups[1]["param_names"] = []  # torch wants to be told
    oracle = Adam(groups, lr=0.1)
    assert_same(optimizer.state_dict(), oracle.state_dict(), "fresh")
    train(optimizer, params, range(2))
    train(oracle, other, range(2))
    optimizer.consolidate_state_dict()
    if rank == 0:
        assert_same(optimizer.state_dict(), oracle.state_dict(), "trained")
    again = ZeroRedundancyOptimizer(named_groups(params), Adam, lr=0.7, shard=shard)
    again.load_state_dict(oracle.state_dict())
    train(again, params, [2])
    train(oracle, other, [2])
    again.consolidate_state_dict()
    assert_same(values_of(params), values_of(other))
    if rank == 0:
        assert_same(again.state_dict(), oracle.state_dict(), "loaded")
    # An optimizer without names takes a dict with names, and keeps them, as torch's does.
    nameless_groups = [{**group, "params": [pair[1] for pair in group["params"]]} for group in named_groups(params)]
    nameless = ZeroRedundancyOptimizer(nameless_groups, Adam, lr=0.7, shard=shard)
    nameless.load_state_dict(oracle.state_dict())
    train(nameless, params, [3])
    train(oracle, other, [3])
    assert_same(values_of(params), values_of(other))


@pytest.mark.parametrize("shard", ["auto", "tensor"])
def test_names_and_empty_groups_are_kept_in_saved_and_loaded_dicts(shard):
    run_ranks(names, 3, shard)


class Nested(Optimizer):
    """Momentum that keeps its state in lists, tuples and dicts."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    mean = torch.zeros(3, dtype=torch.int16)
                    state["deep"] = [torch.zeros_like(param), ({"mean": mean, 4: None}, torch.tensor(1.5))]
                    state["plain"] = (True, 3, 0.5, "text", None, torch.bfloat16, [])
                    state["count"] = 0
                momentum, (inner, scale) = state["deep"]
                state["count"] += 1
                inner["mean"] += state["count"]
                momentum.mul_(0.9).add_(param.grad)
                param.data.add_(momentum * scale, alpha=-group["lr"] / state["count"])


def nested_state(rank: int, world: int) -> None:
    params, other = parameters(), parameters()
    optimizer, oracle = ZeroRedundancyOptimizer(params, Nested), Nested(other)
    train(optimizer, params, range(3))
    train(oracle, other, range(3))
    optimizer.consolidate_state_dict(to=world - 1, chunk_mb=0.0005)
    if rank == world - 1:
        assert_same(optimizer.state_dict(), oracle.state_dict())
    for param, twin in zip(params, other, strict=True):
        assert_same(optimizer.full_state(param), oracle.state[twin])
    second = ZeroRedundancyOptimizer(params, Nested)
    full = copy.deepcopy(oracle.state_dict())
    second.load_state_dict(full)
    train(second, params, [3, 4])
    assert_same(full, oracle.state_dict(), "nested tensors of the caller's dict are not the live ones")
    train(oracle, other, [3, 4])
    assert_same(values_of(params), values_of(other))


@WORLDS
def test_nested_state_is_consolidated_and_loaded(world):
    run_ranks(nested_state, world)


class Helper:
    pass


class WithObject(SGD):
    """Keeps an object that cannot be sent, for one shape only, which no probe has."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if tuple(param.shape) == (4, 3):
                    self.state[param]["helper"] = Helper()


def object_in_the_state(rank: int, world: int, matrices: int) -> None:
    shapes = [(4, 3)] * matrices + [(5,)] * (world - matrices)
    params, other = parameters(shapes), parameters(shapes)
    optimizer = ZeroRedundancyOptimizer(params, WithObject, lr=0.1, momentum=0.9, shard="tensor")
    oracle = SGD(other, lr=0.1, momentum=0.9)
    train(optimizer, params, [0])
    train(oracle, other, [0])
    for call in (optimizer.consolidate_state_dict, partial(optimizer.full_state, params[0])):
        error = error_of(call, "an object in the state")
        owns = any("helper" in state for state in optimizer.optim.state.values())
        # Where the object is, TypeError; a rank that learns it from another says so and quotes that.
        if owns and call == optimizer.consolidate_state_dict:
            assert isinstance(error, TypeError), repr(error)
        assert isinstance(error, TypeError) or "TypeError" in str(error), repr(error)
        assert "Helper" in str(error)
        assert "parameter 0" in str(error) or matrices > 1
    train(optimizer, params, [1])
    train(oracle, other, [1])
    assert_same(values_of(params), values_of(other), "training goes on")


@pytest.mark.parametrize("matrices", [1, 3])
def test_a_state_that_cannot_be_sent_is_an_error_on_every_rank_that_names_the_parameter(matrices):
    run_ranks(object_in_the_state, 3, matrices)


def mixed_dtypes(rank: int, world: int) -> None:
    """torch's loader casts floating state to the parameter's dtype; ours must do just the same, piece by piece."""
    dtypes = (torch.bfloat16, torch.float32, torch.float64)

    def make() -> list:
        return [parameters([(23,)], dtype)[0] for dtype in dtypes]

    params, other = make(), make()
    oracle = AdamW(other, lr=0.1)
    train(oracle, other, range(2))
    full = copy.deepcopy(oracle.state_dict())
    for state in full["state"].values():
        state["exp_avg"] = state["exp_avg"].double()
    optimizer, fresh = ZeroRedundancyOptimizer(params, AdamW, lr=0.1), AdamW(other, lr=0.1)
    with torch.no_grad():
        for param, twin in zip(params, other, strict=True):
            param.copy_(twin)
    optimizer.load_state_dict(full)
    fresh.load_state_dict(full)
    train(optimizer, params, [2, 3])
    train(fresh, other, [2, 3])
    optimizer.consolidate_state_dict()
    assert_same(values_of(params), values_of(other))
    if rank == 0:
        assert_same(optimizer.state_dict(), fresh.state_dict())


def test_loaded_state_takes_the_dtype_that_the_plain_optimizer_would_give_it():
    run_ranks(mixed_dtypes, 3)


# --- odd parameters ---------------------------------------------------------------------------------------------------


def odd_parameters() -> list:
    """0-dim, without elements, flat, two that are not contiguous, complex."""
    scalar, empty, row, image, matrix = parameters([(), (0, 3), (5,), (2, 3, 2, 2), (3, 7)])
    image.data = image.data.to(memory_format=torch.channels_last)
    matrix.data = matrix.data.t()
    phase = torch.nn.Parameter(torch.complex(row.detach(), row.detach().flip(0)))
    return [scalar, empty, row, image, matrix, phase]


def odd_parameters_saved_and_loaded(rank: int, world: int, shard: str) -> None:
    for views in (False, True) if world == 3 else (False,):
        params, other = odd_parameters(), odd_parameters()
        tied, other_tied = [*params, params[2]], [*other, other[2]]  # a weight that is listed twice
        options = {"lr": 0.1, "shard": shard, "parameters_as_bucket_view": views}
        optimizer, oracle = ZeroRedundancyOptimizer(tied, Adam, **options), Adam(other_tied, lr=0.1)
        train(optimizer, params, range(2))
        train(oracle, other, range(2))
        assert_same(values_of(params), values_of(other), f"trained, views={views}")
        for param, twin in zip(params, other, strict=True):
            assert_same(optimizer.full_state(param), oracle.state[twin])
        optimizer.consolidate_state_dict(to=world - 1)
        if rank == world - 1:
            # torch numbers a weight that is listed twice by its last place, we by its first: both load both.
            reader = Adam(other_tied, lr=0.5)
            reader.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            assert_same(reader.state_dict(), oracle.state_dict(), f"read by the plain optimizer, views={views}")
        again = ZeroRedundancyOptimizer(tied, Adam, **options)
        again.load_state_dict(copy.deepcopy(oracle.state_dict()))
        train(again, params, [2, 3])
        train(oracle, other, [2, 3])
        assert_same(values_of(params), values_of(other), f"trained on, views={views}")


@pytest.mark.parametrize(("world", "shard"), [(1, "auto"), (3, "auto"), (4, "tensor")])
def test_scalars_empty_strided_complex_and_tied_parameters_are_saved_and_loaded(world, shard):
    run_ranks(odd_parameters_saved_and_loaded, world, shard)


def eager_state_on_few_ranks(rank: int, world: int) -> None:
    """Adagrad makes state when it is built; with fewer tensors than ranks some ranks have none."""
    shapes = [(5,), (4, 3)]
    for shard in ("tensor", "auto"):
        params, other = parameters(shapes), parameters(shapes)
        optimizer = ZeroRedundancyOptimizer(params, Adagrad, lr=0.1, initial_accumulator_value=0.5, shard=shard)
        oracle = Adagrad(other, lr=0.1, initial_accumulator_value=0.5)
        optimizer.consolidate_state_dict()
        if rank == 0:
            assert_same(optimizer.state_dict(), oracle.state_dict(), "state that was made with the optimizer")
        train(optimizer, params, range(2))
        train(oracle, other, range(2))
        # A dict that holds state for one parameter only: the other starts as new.
        full = copy.deepcopy(oracle.state_dict())
        del full["state"][1]
        optimizer.load_state_dict(full)
        fresh = Adagrad(other, lr=0.1, initial_accumulator_value=0.5)
        fresh.state[other[0]] = oracle.state[other[0]]
        train(optimizer, params, [2])
        train(fresh, other, [2])
        assert_same(values_of(params), values_of(other), shard)
        optimizer.consolidate_state_dict(to=world - 1)
        if rank == world - 1:
            assert_same(optimizer.state_dict(), fresh.state_dict(), shard)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_state_that_is_made_with_the_optimizer_is_consolidated_and_completed(world):
    run_ranks(eager_state_on_few_ranks, world)


def frozen_and_added(rank: int, world: int) -> None:
    """Saved after a freeze and an added group; what never trained has no state, what is frozen keeps its own."""
    params, other = parameters(), parameters()
    optimizer, oracle = ZeroRedundancyOptimizer(params[:4], Adam, lr=0.1), Adam(other[:4], lr=0.1)
    params[3].requires_grad_(False)
    other[3].requires_grad_(False)

    def steps(which: range) -> None:
        for step in which:
            for mine, stepper in ((params, optimizer), (other, oracle)):
                set_gradients(mine, step)
                for param in mine:
                    param.grad = param.grad if param.requires_grad else None
                stepper.step()

    steps(range(2))
    for mine, stepper in ((params, optimizer), (other, oracle)):
        mine[0].requires_grad_(False)
        stepper.add_param_group({"params": mine[4:], "lr": 0.3})
    steps(range(2, 4))
    optimizer.consolidate_state_dict()
    if rank == 0:
        assert_same(optimizer.state_dict(), oracle.state_dict())
        assert 3 not in optimizer.state_dict()["state"]
    again = ZeroRedundancyOptimizer([{"params": params[:4]}, {"params": params[4:]}], Adam, lr=0.1, shard="tensor")
    again.load_state_dict(copy.deepcopy(oracle.state_dict()))
    optimizer = again
    for mine in (params, other):
        mine[0].requires_grad_(True)
    steps(range(4, 6))
    assert_same(values_of(params), values_of(other))


@WORLDS
def test_frozen_parameters_keep_their_state_in_the_dict_and_untrained_ones_have_none(world):
    run_ranks(frozen_and_added, world)
