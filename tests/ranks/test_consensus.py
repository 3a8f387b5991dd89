"""Ranks that disagree: an error on every rank, in time, that names the parameter, the ranks and both values."""

from __future__ import annotations

import logging
import os
import pickle
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import assert_same, error_of, parameters, set_gradients, train, values_of

TIMEOUT = 4  # of the process group, where a test has to wait for it


def named(params: list) -> list[tuple[str, Parameter]]:
    return [(f"layer{i}", param) for i, param in enumerate(params)]


def disagreements(odd: bool) -> dict[str, tuple[Any, dict[str, Any]]]:
    """name -> (params, keyword arguments) of a constructor; ``odd`` on the one rank that differs."""
    common: dict[str, Any] = {"optimizer_class": Adam, "lr": 0.1}

    def changed(index: int, **how: Any) -> list[tuple[str, Parameter]]:
        params = named(parameters())
        if odd:
            name, param = params[index]
            data = param.detach()
            if "shape" in how:
                data = data.reshape(how["shape"])
            if "dtype" in how:
                data = data.to(how["dtype"])
            params[index] = (name, Parameter(data, requires_grad=how.get("requires_grad", True)))
        return params

    plain_params = named(parameters())
    swapped = [*plain_params[:1], plain_params[2], plain_params[1], *plain_params[3:]] if odd else plain_params
    nameless = parameters([(4,), (6,), (5,)] if odd else [(4,), (5,), (6,)])
    regrouped = [{"params": plain_params[: 2 if odd else 3]}, {"params": plain_params[2 if odd else 3 :]}]
    fewer = plain_params[: 4 if odd else 5]
    tensor_lr = torch.tensor(0.2 if odd else 0.1, dtype=torch.float64)
    group_option = [{"params": plain_params[:2]}, {"params": plain_params[2:], "weight_decay": 0.5 if odd else 0.25}]
    return {
        "order": (swapped, common),
        "order without names": (nameless, common),
        "shape": (changed(2, shape=(4, 3, 2)), common),
        "dtype": (changed(1, dtype=torch.float32), common),
        "requires_grad": (changed(4, requires_grad=False), common),
        "number of parameters": (fewer, common),
        "groups": (regrouped, common),
        "option": (named(parameters()), {**common, "lr": 0.2 if odd else 0.1}),
        "tensor option": (named(parameters()), {**common, "lr": tensor_lr}),
        "group option": (group_option, common),
        "optimizer class": (named(parameters()), {**common, "optimizer_class": AdamW if odd else Adam}),
        "bucket_cap_mb": (named(parameters()), {**common, "bucket_cap_mb": 3 if odd else 25}),
        "shard": (named(parameters()), {**common, "shard": "tensor" if odd else "auto"}),
        "views": (named(parameters()), {**common, "parameters_as_bucket_view": odd}),
    }


# name -> subject and field, the value of all but one rank, the value of the odd rank.
EXPECTED = {
    "order": ("this position is", "parameter 1 ('layer1') of group 0", "parameter 1 ('layer2') of group 0"),
    "order without names": ("parameter 1 of group 0: shape is", "[5]", "[6]"),
    "shape": ("parameter 2 ('layer2') of group 0: shape is", "[3, 4, 2]", "[4, 3, 2]"),
    "dtype": ("parameter 1 ('layer1') of group 0: dtype is", "float64", "float32"),
    "requires_grad": ("parameter 4 ('layer4') of group 0: requires_grad is", "True", "False"),
    "number of parameters": ("parameter group 0: parameters is", "5", "4"),
    "groups": ("parameter group 0: parameters is", "3", "2"),
    "option": ("parameter group 0: lr is", "0.1", "0.2"),
    "tensor option": ("parameter group 0: lr is", "tensor(0.1, dtype=float64)", "tensor(0.2, dtype=float64)"),
    "group option": ("parameter group 1: weight_decay is", "0.25", "0.5"),
    "optimizer class": ("optimizer_class is", "Adam", "AdamW"),
    "bucket_cap_mb": ("bucket_cap_mb is", "25.0", "3.0"),
    "shard": ("parameter 0 ('layer0') of group 0: granularity is", "element", "tensor"),
    "views": ("parameters_as_bucket_view is", "False", "True"),
}


def constructions(rank: int, world: int, odd_rank: int) -> dict[str, str]:
    told = {}
    for name, (params, arguments) in disagreements(rank == odd_rank).items():
        flat = [p[1] if isinstance(p, tuple) else p for p in params if not isinstance(p, dict)]
        memory = [(param.data_ptr(), param.requires_grad) for param in flat]
        values = values_of(flat)
        error = error_of(lambda: ZeroRedundancyOptimizer(params, **arguments), name)  # noqa: B023
        assert isinstance(error, RuntimeError), f"{name}: {error!r}"
        assert memory == [(param.data_ptr(), param.requires_grad) for param in flat], f"{name}: parameters were touched"
        assert_same(values_of(flat), values, name)
        told[name] = str(error)
    # After all these failures the next one works.
    params, other = parameters(), parameters()
    optimizer, oracle = ZeroRedundancyOptimizer(params, Adam, lr=0.1), Adam(other, lr=0.1)
    train(optimizer, params, range(2))
    train(oracle, other, range(2))
    assert_same(values_of(params), values_of(other))
    return told


@pytest.mark.parametrize(("world", "odd_rank"), [(2, 0), (3, 1), (4, 3)])
def test_ranks_that_build_differently_are_all_told_the_parameter_the_ranks_and_both_values(world, odd_rank):
    others = [rank for rank in range(world) if rank != odd_rank]
    us = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
    for told in run_ranks(constructions, world, odd_rank):
        assert set(told) == set(EXPECTED)
        for name, (subject, common, odd) in EXPECTED.items():
            for part in (subject, f"{common} on {us}", f"{odd} on rank {odd_rank}"):
                assert part in told[name], f"{name}: {part!r} is not in {told[name]!r}"


def three_opinions(rank: int, world: int) -> str:
    return str(error_of(lambda: ZeroRedundancyOptimizer(parameters(), SGD, lr=0.1 * (rank + 1)), "three values"))


def test_three_opinions_are_told_with_their_ranks():
    for text in run_ranks(three_opinions, 3):
        assert "lr is 0.1 on rank 0 but 0.2 on rank 1 but 0.30000000000000004 on rank 2" in text


# --- failures on one rank only ----------------------------------------------------------------------------------------


class Fussy(SGD):
    """Fails to build where it is told to."""

    def __init__(self, params, lr=0.1, fail=False):
        super().__init__(params, lr=lr)
        if fail:
            raise ValueError("too fussy")


def failing_constructors(rank: int, world: int) -> None:
    here = rank == 1
    sparse = Parameter(torch.zeros(3).to_sparse())
    cases = {
        "params": lambda: ZeroRedundancyOptimizer([] if here else parameters(), SGD, lr=0.1),
        "kind": lambda: ZeroRedundancyOptimizer([sparse] if here else parameters(), SGD, lr=0.1),
        "shard": lambda: ZeroRedundancyOptimizer(parameters(), SGD, shard="row" if here else "auto", lr=0.1),
        "class": lambda: ZeroRedundancyOptimizer(parameters(), dict if here else SGD, lr=0.1),
        "option": lambda: ZeroRedundancyOptimizer(parameters(), SGD, lr=-1.0 if here else 0.1),
        "fussy": lambda: ZeroRedundancyOptimizer(parameters(), Fussy, fail=here),
        "bucket": lambda: ZeroRedundancyOptimizer(parameters(), SGD, lr=0.1, bucket_cap_mb=0 if here else 25),
    }
    for name, call in cases.items():
        start = time.monotonic()
        error = error_of(call, name)
        assert time.monotonic() - start < 20, f"{name}: the others are told at once, not after the timeout of 60 s"
        if here:
            assert isinstance(error, (ValueError, TypeError)), f"{name}: {error!r}"
        else:
            assert isinstance(error, RuntimeError), f"{name}: {error!r}"
            assert "failed on rank 1" in str(error), f"{name}: {error}"
    params, other = parameters(), parameters()
    optimizer, oracle = ZeroRedundancyOptimizer(params, SGD, lr=0.1), SGD(other, lr=0.1)
    train(optimizer, params, range(2))
    train(oracle, other, range(2))
    assert_same(values_of(params), values_of(other), "the next one works")


def test_a_constructor_that_fails_on_one_rank_fails_on_all_at_once():
    run_ranks(failing_constructors, 3)


def failing_added_groups(rank: int, world: int, shard: str, views: bool) -> None:
    params, other = parameters(), parameters()
    options = {"lr": 0.1, "shard": shard, "parameters_as_bucket_view": views}
    optimizer, oracle = ZeroRedundancyOptimizer(params[:3], Adam, **options), Adam(other[:3], lr=0.1)
    train(optimizer, params[:3], range(2))
    train(oracle, other[:3], range(2))

    def attempt(name: str, group: Any) -> str:
        groups = len(optimizer.param_groups), len(optimizer.optim.param_groups)
        error = error_of(lambda: optimizer.add_param_group(group), name)
        assert (len(optimizer.param_groups), len(optimizer.optim.param_groups)) == groups, f"{name}: group stayed"
        assert len(optimizer.state) == 3, name
        train(optimizer, params[:3], [attempts])
        train(oracle, other[:3], [attempts])
        assert_same(values_of(params), values_of(other), f"the old optimizer trains on after: {name}")
        return str(error)

    attempts = 2
    odd = rank == world - 1
    text = attempt("shape", {"params": [Parameter(torch.zeros(4 if odd else 5, dtype=torch.float64))]})
    assert "parameter 3" in text
    assert "shape is [5]" in text
    assert f"[4] on rank {world - 1}" in text
    attempts = 3
    text = attempt("option", {"params": params[3:], "lr": 0.7 if odd else 0.1})
    assert "parameter group 1" in text
    assert f"0.7 on rank {world - 1}" in text
    attempts = 4
    attempt("a parameter twice, everywhere", {"params": [params[4], params[0]]})
    attempts = 5
    text = attempt("a parameter twice, on one rank", {"params": [params[0] if odd else params[4]]})
    assert odd or f"failed on rank {world - 1}" in text
    attempts = 6
    attempt("no params", {"lr": 0.1})
    attempts = 7
    attempt("a non-leaf", {"params": [params[4] * 1]})
    attempts = 8
    attempt("no dict", 5)

    optimizer.add_param_group({"params": params[3:]})
    oracle.add_param_group({"params": other[3:]})
    train(optimizer, params, [10, 11])
    train(oracle, other, [10, 11])
    assert_same(values_of(params), values_of(other), "and a good group still can be added")
    optimizer.consolidate_state_dict()
    if rank == 0:
        assert_same(optimizer.state_dict(), oracle.state_dict())


@pytest.mark.parametrize(
    ("world", "shard", "views"), [(2, "auto", False), (3, "auto", False), (3, "auto", True), (3, "tensor", False)]
)
def test_after_an_added_group_was_refused_the_optimizer_trains_on_like_the_oracle(world, shard, views):
    run_ranks(failing_added_groups, world, shard, views)


# --- ranks that are elsewhere -----------------------------------------------------------------------------------------


def timed(call: Any, claim: str) -> tuple[str, float]:
    start = time.monotonic()
    error = error_of(call, claim)
    assert isinstance(error, RuntimeError), repr(error)
    return str(error), time.monotonic() - start


def in_time(outcomes: list[tuple[str, float]]) -> list[str]:
    for text, seconds in outcomes:
        # The time to be scheduled on a busy machine comes on top.
        assert seconds < TIMEOUT + 6, f"{seconds:.1f} s: {text}"
    return [text for text, _ in outcomes]


def named_absent(text: str, call: str, absent: str) -> bool:
    """Whether a rank that waited in ``call`` is told who did not come.

    Which of two comes first is a race: its own timeout, or a rank that failed in its step meanwhile and said so.
    """
    if "expects a call on every rank of the group" not in text or not text.startswith(call):
        return False
    return f"{absent} did not call it" in text or bool(re.search(r"but rank \d did not call it: .*step", text))


def added_on_one_rank(rank: int, world: int, shard: str) -> tuple[str, float]:
    params = parameters()
    optimizer = ZeroRedundancyOptimizer(params[:4], Adam, lr=0.1, shard=shard)
    train(optimizer, params, range(1))
    set_gradients(params, 1)
    if rank == 1:
        return timed(lambda: optimizer.add_param_group({"params": params[4:]}), "the others do not come")
    return timed(optimizer.step, "rank 1 does not step")


@pytest.mark.parametrize(("world", "shard"), [(2, "auto"), (3, "auto"), (3, "tensor")])
def test_a_group_added_on_one_rank_only_is_an_error_on_all_that_says_who_is_where(world, shard):
    told = in_time(run_ranks(added_on_one_rank, world, shard, pg_timeout=TIMEOUT, timeout=40))
    assert named_absent(told[1], "add_param_group", "rank 0" if world == 2 else "ranks 0, 2"), told[1]
    for rank in {0, world - 1} - {1}:
        assert "rank 1 waits in add_param_group" in told[rank], told[rank]


def added_with_one_parameter(rank: int, world: int) -> tuple[str, float]:
    """One parameter, owned by rank 0: nobody waits for anything that rank 1 sends."""
    params = parameters([(7,)])
    optimizer = ZeroRedundancyOptimizer(params, Adam, lr=0.1, shard="tensor")
    train(optimizer, params, range(1))
    if rank == 1:
        return timed(lambda: optimizer.add_param_group({"params": parameters([(3,)])}), "the others do not come")
    return timed(lambda: train(optimizer, params, range(50)), "rank 1 does not step")


def test_ranks_that_need_nothing_from_the_absent_rank_are_told_too():
    told = in_time(run_ranks(added_with_one_parameter, 3, pg_timeout=TIMEOUT, timeout=40))
    assert named_absent(told[1], "add_param_group", "ranks 0, 2"), told[1]
    for rank in (0, 2):
        assert "rank 1 waits in add_param_group" in told[rank], told[rank]


def frozen_on_one_rank(rank: int, world: int, unfreeze: bool) -> tuple[str, float]:
    params = parameters()
    if unfreeze:
        params[2].requires_grad_(False)
    optimizer = ZeroRedundancyOptimizer(named(params), Adam, lr=0.1)
    for step in range(2):
        set_gradients(params, step)
        if unfreeze and step == 0:
            params[2].grad = None
        if step == 1 and rank == world - 1:
            params[2].requires_grad_(unfreeze)
            params[2].grad = None
        if step == 1 and rank != world - 1 and unfreeze:
            params[2].grad = None
        if step == 0:
            optimizer.step()
    return timed(optimizer.step, "requires_grad differs")


@pytest.mark.parametrize(("world", "unfreeze"), [(2, False), (3, False), (3, True)])
def test_requires_grad_that_changes_on_one_rank_only_is_an_error_on_all_that_names_the_parameter(world, unfreeze):
    told = in_time(run_ranks(frozen_on_one_rank, world, unfreeze, pg_timeout=TIMEOUT, timeout=40))
    absent = "rank 0" if world == 2 else "ranks 0, 1"
    assert named_absent(told[-1], "step, after a change of requires_grad", absent), told[-1]
    assert "parameter 2 ('layer2')" in told[-1], told[-1]
    for text in told[:-1]:
        assert f"rank {world - 1} waits in step" in text, text
        assert "parameter 2 ('layer2')" in text, text
        assert f"from {not unfreeze} to {unfreeze}" in text, text


def frozen_differently(rank: int, world: int) -> str:
    params = parameters()
    optimizer = ZeroRedundancyOptimizer(named(params), Adam, lr=0.1)
    train(optimizer, params, range(1))
    params[min(rank, 1)].requires_grad_(False)
    set_gradients(params, 1)
    for param in params:
        param.grad = param.grad if param.requires_grad else None
    return str(error_of(optimizer.step, "different parameters are frozen"))


def test_ranks_that_freeze_different_parameters_are_told_at_once():
    for text in run_ranks(frozen_differently, 3):
        assert "parameter 0 ('layer0')" in text
        assert "requires_grad is False on rank 0 but True on ranks 1, 2" in text


def absent_rank(rank: int, world: int) -> dict[str, tuple[str, float]] | None:
    """Every collective call that meets on the consensus, made by all but rank 0."""
    params = parameters()
    optimizer = ZeroRedundancyOptimizer(params, Adam, lr=0.1)
    train(optimizer, params, range(1))
    if rank == 0:
        time.sleep(TIMEOUT + 2)
        return None
    return {"consolidate_state_dict": timed(optimizer.consolidate_state_dict, "rank 0 does not come")}


def test_a_rank_that_does_not_consolidate_is_named():
    told = run_ranks(absent_rank, 3, pg_timeout=TIMEOUT, timeout=40)
    for outcome in told[1:]:
        (text,) = in_time([outcome["consolidate_state_dict"]])
        assert "consolidate_state_dict expects a call on every rank of the group, but rank 0 did not call it" in text


def different_calls(rank: int, world: int) -> str:
    params = parameters()
    optimizer = ZeroRedundancyOptimizer(params, Adam, lr=0.1)
    train(optimizer, params, range(1))
    call = optimizer.check_replicas if rank == 1 else optimizer.consolidate_state_dict
    return str(error_of(call, "different methods"))


def test_ranks_that_call_different_methods_are_told_at_once():
    for text in run_ranks(different_calls, 3):
        assert "consolidate_state_dict on ranks 0, 2" in text
        assert "check_replicas on rank 1" in text


def failing_step(rank: int, world: int) -> tuple[str, float]:
    params = parameters()
    optimizer = ZeroRedundancyOptimizer(params, Adam, lr=0.1)
    train(optimizer, params, range(1))
    set_gradients(params, 1)

    def closure() -> float:
        if rank == 1:
            raise RuntimeError("out of luck")
        return 1.0

    return timed(lambda: optimizer.step(closure), "rank 1 fails in its closure")


def test_a_step_that_fails_on_one_rank_is_explained_on_the_others():
    told = in_time(run_ranks(failing_step, 3, pg_timeout=TIMEOUT, timeout=40))
    assert told[1] == "out of luck"
    for rank in (0, 2):
        assert "rank 1 failed in step" in told[rank], told[rank]
        assert "out of luck" in told[rank]


# --- logging, pickle --------------------------------------------------------------------------------------------------


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def logged_layout(rank: int, world: int, level: str) -> list[str]:
    records = Records()
    logger = logging.getLogger("shardstep")
    logger.addHandler(records)
    logger.setLevel(logging.INFO)
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = level
    dist.set_debug_level_from_env()
    group = dist.new_group()  # at DETAIL torch wraps its process groups
    params, other = parameters(), parameters()
    optimizer = ZeroRedundancyOptimizer(params, Adam, group, lr=0.1, bucket_cap_mb=0.0005)
    oracle = Adam(other, lr=0.1)
    train(optimizer, params, range(2))
    train(oracle, other, range(2))
    assert_same(values_of(params), values_of(other))
    optimizer.consolidate_state_dict(to=1)
    if rank == 1:
        assert_same(optimizer.state_dict(), oracle.state_dict())
    return records.texts


def test_with_torch_distributed_debug_construction_logs_elements_buckets_and_bytes_per_rank():
    for level in ("INFO", "DETAIL"):
        for rank, texts in enumerate(run_ranks(logged_layout, 3, level)):
            (text,) = texts
            assert f"rank {rank} of 3" in text
            assert "161 elements" in text
            assert "buckets" in text
            # 161 elements of 8 bytes: 54, 54 and 53 of them.
            shares = [line for line in text.splitlines() if line.strip().startswith("rank ") and "bytes" in line]
            assert sorted(int(line.split(" bytes")[0].split()[-1]) for line in shares) == [424, 432, 432]
    assert run_ranks(logged_layout, 3, "OFF") == [[], [], []]


def unpickling(rank: int, world: int) -> None:
    used: list[str] = []

    def forbid(module: Any, name: str) -> None:
        real = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            used.append(name)
            return real(*args, **kwargs)

        setattr(module, name, counted)

    for name in ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list",
                 "send_object_list", "recv_object_list"):  # fmt: skip
        forbid(dist, name)
        forbid(dist.distributed_c10d, name)
    for name in ("loads", "load"):
        forbid(pickle, name)
    for name in ("_tensor_to_object", "_object_to_tensor"):
        forbid(dist.distributed_c10d, name)
    forbid(torch, "load")
    params = parameters()
    optimizer = ZeroRedundancyOptimizer(params[:4], Adam, lr=0.1)
    train(optimizer, params, range(1))
    optimizer.add_param_group({"params": params[4:]})
    train(optimizer, params, range(2))
    optimizer.consolidate_state_dict(to=world - 1)
    optimizer.full_state(params[0])
    optimizer.check_replicas()
    oracle = Adam(parameters(), lr=0.1)
    train(oracle, oracle.param_groups[0]["params"], range(1))
    again = ZeroRedundancyOptimizer(params, Adam, lr=0.1)
    again.load_state_dict(oracle.state_dict())
    error_of(lambda: ZeroRedundancyOptimizer(params, Adam, lr=0.1 + rank), "an error is told")
    assert not used


def test_nothing_from_another_rank_is_unpickled():
    run_ranks(unpickling, 3)


def does_not_step(rank: int, world: int, shard_gradients: bool) -> str | None:
    model = torch.nn.Linear(4, 4)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.1, shard_gradients=shard_gradients)
    if rank == 1:
        time.sleep(TIMEOUT + 4)
        return None
    error = error_of(lambda: (model(torch.ones(2, 4)).sum().backward(), optimizer.step()), "rank 1 does not come")
    return str(error)


@pytest.mark.parametrize("shard_gradients", [pytest.param(False, marks=pytest.mark.again), True])
def test_a_rank_that_does_not_step_is_named_by_the_others(shard_gradients):
    told = run_ranks(does_not_step, 3, shard_gradients, pg_timeout=TIMEOUT, timeout=40)
    for text in (told[0], told[2]):
        assert "It expects all ranks, but rank 1 did not come to it." in text, text
