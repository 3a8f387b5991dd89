"""Parameters of several dtypes in one optimizer, and complex ones."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, AdamW, RMSprop

from tests.harness import run_ranks
from tests.oracle import parameters, values
from tests.twins import Twins

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float16)
SIZES = ((7, 5), (11,), (3, 4), (13,), (6, 6), (2, 2))
# Kernels of bfloat16 and float16 round in the scalar code of a tail otherwise than in the vector code: a fused
# multiply-add more or less before the one rounding to 16 bits. A cut puts other elements into the tail, so in 16 bits
# "element" is equal up to roundings of 2**-8, while float32 and float64 stay bit-equal.
SLACK = {torch.bfloat16: 2**-6, torch.float16: 2**-8}
MODES = ({"shard": "tensor"}, {"shard": "element"}, {"shard": "element", "parameters_as_bucket_view": True})


def two_groups(params: list[Parameter]) -> list[dict[str, Any]]:
    """Across the dtypes."""
    return [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:], "lr": 0.05}]


def mixed_parameters() -> list[Parameter]:
    both = zip(SIZES, DTYPES, strict=True)
    return [Parameter(values(size, position, dtype)) for position, (size, dtype) in enumerate(both)]


def mixed(rank: int, world: int) -> None:
    for kind, options in ((AdamW, {}), (SGD, {"momentum": 0.9}), (AdamW, {"foreach": True})):
        for mode in MODES:
            twins = Twins(mixed_parameters, kind, two_groups, sharded=mode, lr=0.1, **options)
            twins.name = f"{kind.__name__} {options} {mode}"
            twins.step(5)
            if mode["shard"] == "tensor":
                twins.check(to=world - 1)
            for mine, theirs in zip(twins.ours, twins.theirs, strict=True):
                slack = SLACK.get(mine.dtype, 0.0)
                torch.testing.assert_close(mine, theirs, rtol=slack, atol=slack, msg=twins.name)
                for key, value in twins.opt.full_state(mine).items():
                    expected = twins.plain.state[theirs][key]
                    torch.testing.assert_close(value, expected, rtol=slack, atol=slack, msg=f"{twins.name} {key}")
            twins.opt.check_replicas()


def test_mixed_dtypes_in_two_groups_train_as_in_the_plain_optimizer():
    run_ranks(mixed, 3)


def complex_parameters() -> list[Parameter]:
    return [*parameters([(7, 3), (5,)], torch.complex128), *parameters([(4, 3)]), *parameters([(11,)], torch.complex64)]


def complex_numbers(rank: int, world: int) -> None:
    for kind, options in ((SGD, {"momentum": 0.9}), (AdamW, {"foreach": True}), (Adagrad, {}), (RMSprop, {})):
        for mode in MODES:
            twins = Twins(complex_parameters, kind, two_groups, sharded=mode, **options)
            twins.name = f"{kind.__name__} {mode}"
            twins.step(3)
            twins.check()
            twins.opt.check_replicas()


def test_complex_parameters_train_as_in_the_plain_optimizer():
    run_ranks(complex_numbers, 3)
