"""Building an optimizer: every form of ``params`` that torch.optim takes, and what stays the caller's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import parameters, values
from tests.twins import Twins

SHAPES = [(7, 5), (5,), (3, 2, 2), (11, 3), (1,)]


def named(params: list[Parameter]) -> list[tuple[str, Parameter]]:
    return [(f"w{position}", one) for position, one in enumerate(params)]


FORMS: dict[str, Any] = {
    "a generator": lambda p: (one for one in p),
    "the values of a dict": lambda p: {str(i): one for i, one in enumerate(p)}.values(),
    "a generator of dicts": lambda p: ({"params": [one]} for one in p),
    "generators inside dicts": lambda p: [{"params": iter(p[:2])}, {"params": iter(p[2:]), "lr": 0.3}],
    "a tuple inside a dict": lambda p: [{"params": tuple(p)}],
    "one tensor in a dict": lambda p: [{"params": p[0]}, {"params": p[1:], "weight_decay": 0.2}],
    "names from a generator": lambda p: iter(named(p)),
    "names inside dicts": lambda p: [{"params": [("a", p[0])]}, {"params": iter(named(p[1:])), "lr": 0.2}],
    "empty groups": lambda p: [{"params": []}, {"params": p[:2]}, {"params": [], "lr": 7.0}, {"params": p[2:]}],
    "an empty group beside names": lambda p: [{"params": named(p)}, {"params": [], "weight_decay": 0.0}],
    "fewer tensors than ranks": lambda p: p[3:],
    "a function that builds": list,
}


def builds_sgd(params: Any, lr: float) -> SGD:
    return SGD(params, lr=lr, momentum=0.9)


def forms(rank: int, world: int) -> None:
    for form, groups in FORMS.items():
        for shard in ("auto", "tensor"):
            kind = builds_sgd if form == "a function that builds" else AdamW
            ours, theirs = parameters(SHAPES), parameters(SHAPES)
            opt = ZeroRedundancyOptimizer(groups(ours), kind, lr=0.1, shard=shard)
            given = list(groups(theirs))
            if form == "an empty group beside names":
                given[1]["param_names"] = []  # torch refuses it without
            plain = kind(given, lr=0.1)
            for mine, other in zip(opt.param_groups, plain.param_groups, strict=True):
                assert len(mine["params"]) == len(other["params"]), form
                assert mine.get("param_names") == other.get("param_names"), form
            twins = Twins.__new__(Twins)
            vars(twins).update(name=f"{form} {shard}", close=None, ours=ours, theirs=theirs, opt=opt, plain=plain)
            twins.seed = 5
            twins.step(3)
            twins.check(to=world - 1)
            for group in opt.optim.param_groups:
                assert len(group.get("param_names", group["params"])) == len(group["params"]), form


@pytest.mark.parametrize("world", [1, 3])
def test_every_form_of_params_that_torch_takes_trains_exactly(world):
    run_ranks(forms, world)


def odd_kinds() -> list[Parameter]:
    """A frozen parameter may have any dtype, and plain optimizers carry it along."""
    frozen = [torch.arange(5, dtype=torch.int8), torch.tensor([True, False, True])]
    return [*parameters([()]), *(Parameter(one, requires_grad=False) for one in frozen), *parameters([(4, 3)])]


def carried_along(rank: int, world: int) -> None:
    for views in (False, True):
        twins = Twins(odd_kinds, AdamW, sharded={"parameters_as_bucket_view": views})
        for step in range(3):
            for both in (twins.ours, twins.theirs):
                both[0].grad, both[3].grad = values((), step), values((4, 3), step)
            twins.opt.step()
            twins.plain.step()
        twins.check()
        twins.opt.check_replicas()


def test_frozen_integers_and_bools_are_carried_along():
    run_ranks(carried_along, 3)


def untouched(rank: int, world: int) -> None:
    params = parameters(SHAPES)
    groups = [{"params": params[:2], "lr": 0.5, "shard": "tensor"}, {"params": params[2:], "betas": (0.5, 0.6)}]
    added = {"params": parameters([(3,)]), "shard": "tensor"}
    before = [{**group, "params": list(group["params"])} for group in (*groups, added)]
    memory = [param.data_ptr() for param in params]
    opt = ZeroRedundancyOptimizer(groups, AdamW, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step()
    opt.add_param_group(added)
    for group, old in zip((*groups, added), before, strict=True):
        assert {**group, "params": None} == {**old, "params": None}
        assert all(one is other for one, other in zip(group["params"], old["params"], strict=True))
    assert [param.data_ptr() for param in params] == memory, "without views the parameters stay where they are"


def test_the_callers_dicts_lists_and_memory_are_not_changed():
    run_ranks(untouched, 3)
