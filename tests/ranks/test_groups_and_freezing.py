"""Groups that are added in any form, and freezing in combinations that the programs of the harness do not draw."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.optim import Adagrad, AdamW

from shardstep import ZeroRedundancyOptimizer
from tests.differential.cases import run
from tests.differential.configurations import Configuration
from tests.differential.programs import Backward, Edit, Freeze, Move, Resume, Step, Unfreeze, ZeroGrad
from tests.harness import run_ranks
from tests.oracle import parameters, values
from tests.twins import Twins
from tests.versions import needs_adagrad_that_grows

SHAPES = [(7, 5), (5,), (3, 2, 2), (11, 3), (1,)]
MODES = [
    {"shard": shard, "parameters_as_bucket_view": views} for shard in ("tensor", "element") for views in (False, True)
]
VIEWS = Configuration(mode="views", shard="element", ranks=3)
WHOLE = Configuration(shard="tensor", ranks=3)
STEP = (ZeroGrad(), Backward(), Step())


def add(twins: Twins, make: Any, form: Any = list, **options: Any) -> None:
    """The same new group to both."""
    for params, optimizer in ((twins.ours, twins.opt), (twins.theirs, twins.plain)):
        made = make()
        params += made
        optimizer.add_param_group({"params": form(made), **options})


def added_groups(rank: int, world: int) -> None:
    for mode in MODES:
        twins = Twins(lambda: parameters(SHAPES[:2]), AdamW, sharded=mode, lr=0.1, name=str(mode))
        add(twins, lambda: parameters([(5, 3)]), lambda made: made[0])  # before the first step, one tensor
        twins.step()
        add(twins, lambda: parameters(SHAPES[2:]), iter, weight_decay=0.3)
        add(twins, list)  # empty
        add(twins, lambda: parameters([(4, 3), (6,)], torch.float32), tuple, lr=0.2)  # another dtype
        assert [g["weight_decay"] for g in twins.opt.param_groups] == [
            g["weight_decay"] for g in twins.plain.param_groups
        ]
        twins.step(2)
        add(twins, lambda: [Parameter(values((5, 3), 8), requires_grad=False)])
        frozen = len(twins.ours) - 1
        twins.step(2, skip=[frozen])
        assert not twins.opt.state[twins.ours[frozen]]
        for params in (twins.ours, twins.theirs):
            params[frozen].requires_grad_(True)
        twins.step(2)
        twins.check()
        twins.opt.check_replicas()


def test_a_group_may_be_added_in_every_form_dtype_and_frozen():
    run_ranks(added_groups, 3)


def added_with_state(rank: int, world: int) -> None:
    twins = Twins(lambda: parameters(SHAPES[:2]), Adagrad)
    twins.step()
    add(twins, lambda: parameters(SHAPES[2:]))
    twins.step(2)
    twins.check()


@needs_adagrad_that_grows
def test_a_group_that_is_added_to_an_optimizer_that_makes_state_at_once_trains_exactly():
    run_ranks(added_with_state, 3)


# --- freezing ---------------------------------------------------------------------------------------------------------


FREEZING = {
    "a value that is set while frozen": (*STEP, Freeze(3), *STEP, Edit(3), *STEP, Unfreeze(), *STEP, *STEP),
    "frozen and given other memory before one step": (*STEP, Freeze(3), Move(), *STEP, *STEP),
    "built frozen, and thawed": (*(Freeze(index) for index in range(1, 6)), Resume(), *STEP, Unfreeze(), *STEP, *STEP),
}


@pytest.mark.parametrize("config", [VIEWS, WHOLE], ids=["views", "whole"])
@pytest.mark.parametrize("program", FREEZING)
def test_freezing_in_combination_equals_ddp(config, program):
    run(config, FREEZING[program])


def frozen_with_gradient(rank: int, world: int) -> None:
    for mode in MODES:
        twins = Twins(lambda: parameters(SHAPES), AdamW, sharded=mode, lr=0.1, name=str(mode))
        twins.step(2)
        for params in (twins.ours, twins.theirs):
            params[0].requires_grad_(False)
            params[3].requires_grad_(False)
        twins.opt.step()  # the old gradients are still there: the plain optimizer uses them
        twins.plain.step()
        twins.check()
        for skip in ([0], [0, 3], [3]):
            twins.step(1, skip=skip)
            twins.check()
        twins.opt.check_replicas()


def test_a_frozen_parameter_that_holds_a_gradient_is_stepped_as_by_the_plain_optimizer():
    run_ranks(frozen_with_gradient, 3)


def sent(rank: int, world: int) -> None:
    os.environ["SHARDSTEP_SHARED_MEMORY"] = "0"  # what goes through memory is not counted by messages
    params = parameters([(25,)] * 40)
    # ten parameters of 200 bytes in a bucket, each from a 64-byte boundary on
    opt = ZeroRedundancyOptimizer(params, AdamW, shard="element", bucket_cap_mb=2504 / 2**20)
    for frozen in (0, 20, 40):
        for position, param in enumerate(params):
            param.requires_grad_(position >= frozen)
            param.grad = torch.ones_like(param) if position >= frozen else None
        opt.step()
        with patch.object(dist, "isend", wraps=dist.isend) as isend:  # everything is really sent
            opt.step()
        total = torch.tensor(sum(call.args[0].nbytes for call in isend.call_args_list))
        dist.all_reduce(total)
        assert total == (40 - frozen) * 200 * (world - 1), "each active element goes to each other rank once"
        assert isend.call_count <= (40 - frozen) // 10 * (world - 1), "one message per bucket and other rank"


def test_frozen_parameters_are_not_sent_and_others_by_the_bucket():
    run_ranks(sent, 3)
