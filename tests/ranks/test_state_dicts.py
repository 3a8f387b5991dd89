"""State dicts: what is in them, whose memory it is; torch's functions for them. Oracle: the plain optimizer.

Saving and loading at other numbers of ranks and in other modes: tests/differential. Wrong use: its refusals.
"""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD, Adam, AdamW, Optimizer

from shardstep import StateShard, ZeroRedundancyOptimizer, checkpoint
from tests.harness import run_ranks
from tests.oracle import assert_same, error_of, parameters, set_gradients, train, values_of


def trained_pair(kind: Any = Adam, steps: int = 2, **options: Any) -> tuple[list, ZeroRedundancyOptimizer, list, Any]:
    """Our parameters and optimizer, the oracle's parameters and optimizer, all stepped."""
    ours, theirs = parameters(), parameters()
    optimizer, oracle = ZeroRedundancyOptimizer(ours, kind, lr=0.1, **options), kind(theirs, lr=0.1)
    for each, params in ((optimizer, ours), (oracle, theirs)):
        train(each, params, range(steps))
    return ours, optimizer, theirs, oracle


# --- what is in them ------------------------------------------------------------------------------------------------


def life_of_a_state_dict(rank: int, world: int) -> None:
    params, optimizer, other, oracle = trained_pair(steps=0)
    fresh = copy.deepcopy(optimizer.state_dict())
    assert_same(through_a_file(fresh), oracle.state_dict(), "fresh")
    train(optimizer, params, range(2))
    train(oracle, other, range(2))
    optimizer.consolidate_state_dict(to=1)
    given, expected = optimizer.state_dict(), oracle.state_dict()
    if rank == 1:  # not collective: one rank may ask alone, as often as it likes
        assert_same([given, optimizer.state_dict()], [expected, expected], "consolidated")
        assert list(given["state"]) == sorted(given["state"])
    else:
        empty = {index: {} for index in range(len(params))}
        assert_same(dict(given), {"state": empty, "param_groups": expected["param_groups"]}, "not the recipient")
        assert "rank 1" in str(error_of(lambda: through_a_file(given), "a file without state"))
    optimizer.load_state_dict(fresh)
    assert_same(through_a_file(optimizer.state_dict()), through_a_file(fresh), "an empty dict is loaded: fresh again")


def through_a_file(state_dict: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    return dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))


def test_a_state_dict_is_empty_when_fresh_full_at_the_recipient_and_without_state_elsewhere():
    run_ranks(life_of_a_state_dict, 3)


def mixed_dtypes(rank: int, world: int) -> None:
    params, other = ([parameters([(23,)], dtype)[0] for dtype in (torch.bfloat16, torch.float32, torch.float64)]
                     for _ in range(2))  # fmt: skip
    first = AdamW(other, lr=0.1)
    train(first, other, range(2))
    full = copy.deepcopy(first.state_dict())
    for state in full["state"].values():
        state["exp_avg"] = state["exp_avg"].double()
    optimizer, oracle = ZeroRedundancyOptimizer(params, AdamW, lr=0.1), AdamW(other, lr=0.1)
    with torch.no_grad():
        for param, twin in zip(params, other, strict=True):
            param.copy_(twin)
    for each, its_params in ((optimizer, params), (oracle, other)):
        each.load_state_dict(full)
        train(each, its_params, [2, 3])
    assert_same(values_of(params), values_of(other))
    for param, twin in zip(params, other, strict=True):
        assert_same(optimizer.full_state(param), dict(oracle.state[twin]))


def test_loaded_state_takes_the_dtype_that_the_plain_optimizer_would_give_it():
    run_ranks(mixed_dtypes, 3)


# --- whose memory is it ---------------------------------------------------------------------------------------------


class SharedCounter(SGD):
    """Keeps a tensor under a key that is no parameter, as MADGRAD does."""

    def step(self, closure: Any = None) -> Any:
        self.state["k"] = self.state.get("k", torch.zeros(())).add_(1)
        return super().step(closure)


def no_aliasing(rank: int, world: int, kind: Any) -> None:
    params, optimizer, other, oracle = trained_pair(kind)
    optimizer.consolidate_state_dict(to=0)
    given = optimizer.state_dict()
    loaded = copy.deepcopy(oracle.state_dict())
    optimizer.load_state_dict(loaded)
    kept = copy.deepcopy((given, loaded))
    train(optimizer, params, [2, 3])
    train(oracle, other, [2, 3])
    assert_same((given, loaded), kept, "neither dict changes with further steps")
    optimizer.consolidate_state_dict(to=0)
    for state_dict in (loaded, given, optimizer.state_dict()):
        for state in state_dict["state"].values():
            for value in state.values() if isinstance(state, dict) else [state]:
                if isinstance(value, torch.Tensor):
                    value.fill_(7)
        state_dict["param_groups"][0]["lr"] = 1e9
    train(optimizer, params, [4])
    train(oracle, other, [4])
    assert_same(values_of(params), values_of(other), "scribbling over dicts does not reach the optimizer")


@pytest.mark.parametrize("kind", [Adam, SharedCounter])
def test_dicts_and_live_state_share_no_memory(kind):
    run_ranks(no_aliasing, 3, kind)


# --- odd state ------------------------------------------------------------------------------------------------------


class Hoarder(Optimizer):
    """Momentum in lists, tuples and dicts, and matrices that lie the other way round in memory, as eigenvectors do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    mean = torch.zeros(3, dtype=torch.int16)
                    state["deep"] = [torch.zeros_like(param), ({"mean": mean, 4: None}, torch.tensor(1.5))]
                    state["plain"] = (True, 3, 0.5, None, torch.bfloat16, [])
                    state["basis"] = torch.arange(6.0).view(2, 3).t()
                momentum, (inner, scale) = state["deep"]
                inner["mean"] += 1
                state["basis"].add_(1)
                param.sub_(momentum.mul_(0.9).add_(param.grad) * scale, alpha=group["lr"])


def as_lists(value: Any) -> Any:
    """Tuples are saved as lists (README, "Limits")."""
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    return [as_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def odd_state(rank: int, world: int, folder: Path) -> None:
    params, optimizer, other, oracle = trained_pair(Hoarder)
    checkpoint.save(folder / "now", optimizer)
    checkpoint.save(folder / "later", optimizer, asynchronous=True).wait()
    optimizer.consolidate_state_dict(chunk_mb=0.0005)
    box = [optimizer.state_dict()]
    dist.broadcast_object_list(box)
    start = values_of(params)
    oracle.load_state_dict(oracle.state_dict())  # (torch's own loading casts integers in lists)
    train(oracle, other, [2, 3])
    for source in ("now", "later", "dict", "dict"):
        again = [nn.Parameter(value.clone()) for value in start]
        fresh = ZeroRedundancyOptimizer(again, Hoarder, lr=0.1)
        if source == "dict":
            fresh.load_state_dict(box[0])
        else:
            checkpoint.load(folder / source, fresh)
        train(fresh, again, [2, 3])
        assert_same(values_of(again), values_of(other), source)
        for param, twin in zip(again, other, strict=True):
            found = fresh.full_state(param)
            assert_same(as_lists(found), as_lists(dict(oracle.state[twin])), source)
            assert found["basis"].stride() == (1, 3), "matrix products would round otherwise"


def test_nested_and_transposed_state_comes_back_as_it_was(tmp_path):
    run_ranks(odd_state, 3, tmp_path)


class WithObject(SGD):
    """Keeps an object that cannot be sent, for one shape only, which no probe has."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for param in (param for group in self.param_groups for param in group["params"]):
            if tuple(param.shape) == (4, 3):
                self.state[param]["helper"] = object()


def object_in_the_state(rank: int, world: int) -> None:
    shapes = [(4, 3), (5,), (5,)]
    params, other = parameters(shapes), parameters(shapes)
    optimizer = ZeroRedundancyOptimizer(params, WithObject, lr=0.1, momentum=0.9, shard="tensor")
    oracle = SGD(other, lr=0.1, momentum=0.9)
    train(optimizer, params, [0])
    for call in (optimizer.consolidate_state_dict, partial(optimizer.full_state, params[0])):
        told = repr(error_of(call, "an object in the state"))
        assert all(words in told for words in ("TypeError", "object", "parameter 0")), told
    train(optimizer, params, [1])
    train(oracle, other, [0, 1])
    assert_same(values_of(params), values_of(other), "training goes on")


def test_a_state_that_cannot_be_sent_is_an_error_on_every_rank_that_names_the_parameter():
    run_ranks(object_in_the_state, 3)


# --- torch's get_optimizer_state_dict and set_optimizer_state_dict --------------------------------------------------

SHARDED = StateDictOptions()
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FULL = StateDictOptions(full_state_dict=True)
STEPS, END = 2, 4


class Mixed(nn.Module):
    """Cut, small, scalar, channels_last, bf16 and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bias, self.scale, self.conv = parameters([(61, 37), (13,), (), (6, 4, 3, 2)])
        self.conv.data = self.conv.data.to(memory_format=torch.channels_last)
        self.brief = parameters([(57, 31)], torch.bfloat16)[0]
        self.frozen = parameters([(5, 3)])[0].requires_grad_(False)


def mixed(shard: str | None, steps: int = 0, weights: dict[str, Any] | None = None) -> tuple[Mixed, Any]:
    """A model and its optimizer (None: the plain one), trained for some steps."""
    model = Mixed()
    if weights is not None:
        model.load_state_dict(weights)
    groups = [{"params": [model.embed, model.conv]}, {"params": [model.bias, model.scale, model.brief, model.frozen]}]
    groups[1]["weight_decay"] = 0.1
    optimizer = AdamW(groups) if shard is None else ZeroRedundancyOptimizer(groups, AdamW, shard=shard)
    go_on(model, optimizer, range(steps))
    return model, optimizer


def go_on(model: Mixed, optimizer: Any, steps: range) -> None:
    for step in steps:
        set_gradients([param for param in model.parameters() if param.requires_grad], step)
        optimizer.step()
    optimizer.zero_grad()


def check_end(model: Mixed, optimizer: Any, claim: str) -> None:
    """Train to the end: weights and state are those of the plain optimizer that nobody interrupted."""
    oracle_model, oracle = mixed(None, END)
    go_on(model, optimizer, range(STEPS, END))
    assert_same(dict(model.state_dict()), dict(oracle_model.state_dict()), claim)
    for param, twin in zip(model.parameters(), oracle_model.parameters(), strict=True):
        state = (
            optimizer.full_state(param) if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer.state[param]
        )
        assert_same(dict(state), dict(oracle.state.get(twin, {})), claim)


def takes_and_saves(rank: int, world: int, root: Path) -> None:
    for shard in ("auto", "tensor"):
        model, optimizer = mixed(shard, STEPS)
        fired: list[int] = []
        optimizer.register_step_pre_hook(lambda *_, fired=fired: fired.append(1))
        for name, options in (("sharded", SHARDED), ("flat", FLAT)):
            form = get_optimizer_state_dict(model, optimizer, options=options)
            dcp.save({"optim": form}, checkpoint_id=root / f"{shard}-{name}")
        dcp.save({"optim": optimizer}, checkpoint_id=root / f"{shard}-stateful")
        assert fired == [], "torch steps an optimizer that has no state"
        assert all(param.grad is None for param in model.parameters())
        full = get_optimizer_state_dict(model, optimizer, options=FULL)
        moment = full["state"]["brief"].get("exp_avg")
        if moment is not None:
            assert "shardstep.checkpoint" in str(error_of(partial(torch.save, full, io.BytesIO()), "looks whole"))
            assert "full_state" in str(error_of(partial(torch.add, moment, 1), "looks whole"))
        # Consolidated, all ranks switch together: no chunk of one overlaps another's whole tensor.
        optimizer.consolidate_state_dict(to=world - 1)
        form = get_optimizer_state_dict(model, optimizer)
        dcp.save({"optim": form}, checkpoint_id=root / f"{shard}-consolidated")
        whole = [optimizer.state_dict() if rank == world - 1 else None]
        dist.broadcast_object_list(whole, world - 1)
        other = "tensor" if shard == "auto" else "auto"
        fresh_model, fresh = mixed(other, 0, model.state_dict())
        given = named(whole[0], fresh_model, fresh)
        set_optimizer_state_dict(fresh_model, fresh, given, options=StateDictOptions(strict=False))
        check_end(fresh_model, fresh, f"{shard} to {other}, whole, without options")
        fresh_model, fresh = mixed(other, 0, model.state_dict())
        flat = {f"state.{name}.{key}": value for name, entry in given["state"].items() for key, value in entry.items()}
        for group in given["param_groups"]:
            options = {key: value for key, value in group.items() if key != "params"}
            flat.update((f"param_groups.{name}.{key}", options[key]) for name in group["params"] for key in options)
        error = error_of(partial(set_optimizer_state_dict, fresh_model, fresh, flat, options=FLAT), "never fresh")
        assert "its entry is empty" in str(error), error
        for steps in (0, 1):  # without state and with it
            for options in (FULL, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)):
                fresh_model, fresh = mixed(other, steps, model.state_dict())
                before = [fresh.full_state(param) for param in fresh_model.parameters()]
                error_of(
                    partial(set_optimizer_state_dict, fresh_model, fresh, given, options=options), "never part of it"
                )
                after = [fresh.full_state(param) for param in fresh_model.parameters()]
                assert_same(after, before, "nothing was changed")


def named(whole: dict[str, Any], model: nn.Module, optimizer: Any) -> dict[str, Any]:
    names = {param: name for name, param in model.named_parameters()}
    order = [names[param] for group in optimizer.param_groups for param in group["params"]]
    state = {order[index]: entry for index, entry in whole["state"].items()}
    groups = [{**group, "params": [order[index] for index in group["params"]]} for group in whole["param_groups"]]
    return {"state": state, "param_groups": groups}


def loads(rank: int, world: int, root: Path) -> None:
    """Into the other granularity; at one rank into the plain optimizer."""
    for saved, other in (("auto", "tensor"), ("tensor", "auto"), ("plain", "auto")):
        for name in ("sharded", "consolidated", "stateful"):
            model, optimizer = mixed(other if world > 1 else None, 0, mixed(None, STEPS)[0].state_dict())
            # What has no state yet has a mark in what shards saved; nothing in what a whole dict saved, as in torch.
            planner = dcp.DefaultLoadPlanner(allow_partial_load=saved == "plain" or name == "consolidated")
            if name == "stateful" and (saved == "plain" or world == 1):
                continue
            form = {"optim": optimizer if name == "stateful" else get_optimizer_state_dict(model, optimizer)}
            dcp.load(form, checkpoint_id=root / f"{saved}-{name}", planner=planner)
            if name != "stateful":
                set_optimizer_state_dict(model, optimizer, form["optim"])
            check_end(model, optimizer, f"{saved}-{name} loaded into {other} at {world}")


def test_torchs_functions_save_and_load_shards_and_take_whole_dicts(tmp_path):
    run_ranks(takes_and_saves, 3, tmp_path)
    model, optimizer = mixed(None, STEPS)
    for name in ("sharded", "consolidated"):
        form = get_optimizer_state_dict(model, optimizer)
        dcp.save({"optim": form}, checkpoint_id=tmp_path / f"plain-{name}")
    run_ranks(loads, 2, tmp_path)
    run_ranks(loads, 1, tmp_path)


def nothing_yet(rank: int, world: int) -> None:
    for options in (SHARDED,):
        model, optimizer = mixed("auto")
        empty = get_optimizer_state_dict(model, optimizer, options=options)
        assert not any(entry for entry in optimizer.state.values())
        model, optimizer = mixed("auto", STEPS)
        set_optimizer_state_dict(model, optimizer, empty, options=options)
        model.load_state_dict(mixed(None)[0].state_dict())
        go_on(model, optimizer, range(STEPS))
        check_end(model, optimizer, str(options))


def test_the_dict_of_a_new_optimizer_loads_as_nothing():
    run_ranks(nothing_yet, 3)


def pickled_shards(rank: int, world: int) -> None:
    model, optimizer = mixed("element", 1)
    shard = next(value for value in optimizer.sharded_state_dict(model)["state"]["embed"].values()
                 if isinstance(value, StateShard))  # fmt: skip
    for write in (pickle.dumps, copy.copy, lambda value: torch.save(value, io.BytesIO())):
        assert "shardstep.checkpoint" in str(error_of(partial(write, shard), "a file that would look like the whole"))
    twin = ForkingPickler.loads(ForkingPickler.dumps(shard))  # as dcp.async_save sends it to another process
    assert (twin.shape, twin.dtype) == (shard.shape, shard.dtype)
    assert torch.equal(twin.local, shard.local)


def test_a_piece_of_a_state_crosses_to_another_process_and_nowhere_else():
    run_ranks(pickled_shards, 2)
