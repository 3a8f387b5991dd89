"""Mixed dtypes in one optimizer, complex parameters, accelerators where there are any."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.harness import run_ranks
from tests.twins import Twins, parameters, values

MIXED = [
    ((7, 5), torch.bfloat16),
    ((11,), torch.float32),
    ((3, 4), torch.float64),
    ((13,), torch.bfloat16),
    ((6, 6), torch.float32),
    ((5,), torch.float64),
    ((2, 2), torch.float16),
]
MODES = [("tensor", False), ("element", False), ("element", True)]


def _mixed_params() -> list[Parameter]:
    return [Parameter(values(shape, position, dtype)) for position, (shape, dtype) in enumerate(MIXED)]


def _two_groups(p):
    return [{"params": p[:4], "weight_decay": 0.1}, {"params": p[4:], "lr": 0.05}]


GROUPINGS = {
    "one group": list,
    "two groups across the dtypes": _two_groups,
    "a group per dtype": lambda p: [
        {"params": [one for one in p if one.dtype == dtype]}
        for dtype in (torch.bfloat16, torch.float64, torch.float32, torch.float16)
    ],
}
# Kernels of bfloat16 and float16 round in the scalar code of a tail otherwise than in the vector code: a fused
# multiply-add more or less before the one rounding to 16 bits. A cut puts other elements into the tail, so in 16 bits
# "element" is equal up to roundings of 2**-8, while float32 and float64 stay bit-equal.
SIXTEEN_BIT = {torch.bfloat16: 2**-6, torch.float16: 2**-8}


def _mixed(rank, world_size):
    for optimizer_class, options in (
        (torch.optim.AdamW, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
    ):
        for grouping, groups in GROUPINGS.items():
            if "foreach" in options and groups is not _two_groups:
                continue
            for shard, views in MODES:
                twins = Twins(
                    _mixed_params,
                    optimizer_class,
                    groups,
                    name=f"{optimizer_class.__name__} {options} {grouping} {shard} {views=}",
                    sharded={"shard": shard, "parameters_as_bucket_view": views},
                    **options,
                )
                dtypes = {bucket.dtype for bucket in twins.opt.layout.buckets}
                assert dtypes == {"bfloat16", "float32", "float64", "float16"}
                twins.step(5)
                if shard == "tensor":
                    twins.check(to=world_size - 1)
                else:
                    _check_cut(twins)
                twins.opt.check_replicas()


def _check_cut(twins: Twins) -> None:
    for position, (mine, theirs) in enumerate(zip(twins.ours, twins.theirs, strict=True)):
        where = f"{twins.name}: parameter {position} of {mine.dtype}"
        slack = SIXTEEN_BIT.get(mine.dtype)
        if slack is None:
            assert torch.equal(mine, theirs), where
        else:
            torch.testing.assert_close(mine, theirs, rtol=slack, atol=slack, msg=where)
        state, expected = twins.opt.full_state(mine), twins.plain.state[theirs]
        assert state.keys() == expected.keys(), where
        for key, value in state.items():
            if slack is None or value is None or value.dim() == 0:
                assert value is expected[key] is None or torch.equal(value, expected[key]), f"{where} {key}"
            else:
                assert value.dtype == expected[key].dtype
                torch.testing.assert_close(value, expected[key], rtol=slack, atol=slack, msg=f"{where} {key}")


@pytest.mark.parametrize("world_size", [1, 3])
def test_mixed_dtypes_in_several_groups_train_as_in_the_plain_optimizer(world_size):
    run_ranks(_mixed, world_size)


def _sixteen_bit_auto(rank, world_size):
    """Whatever "auto" chooses for 16-bit parameters, a tensor that it keeps whole is bit-equal."""
    for optimizer_class in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.ASGD):
        twins = Twins(lambda: parameters([(37, 5), (19,), (64, 9)], torch.bfloat16), optimizer_class, lr=0.1)
        twins.name = optimizer_class.__name__
        twins.step(4)
        if all(spec.granularity == "tensor" for spec in twins.opt.layout.specs):
            twins.check()
        else:
            _check_cut(twins)
        twins.opt.check_replicas()


def test_bfloat16_is_bit_equal_when_whole_and_within_a_rounding_when_cut():
    run_ranks(_sixteen_bit_auto, 3)


def _complex(rank, world_size):
    for optimizer_class, options in (
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {}),
        (torch.optim.Rprop, {}),
    ):
        for dtype in (torch.complex128, torch.complex64) if optimizer_class is torch.optim.SGD else (torch.complex128,):
            for shard, views in MODES:
                twins = Twins(
                    lambda dtype=dtype: [
                        *parameters([(7, 3), (5,)], dtype),
                        *parameters([(4, 3)]),
                        *parameters([(11,)], dtype),
                    ],
                    optimizer_class,
                    lambda p: [{"params": p[:3]}, {"params": p[3:], "lr": 0.02}],
                    name=f"{optimizer_class.__name__} {dtype} {shard} {views=}",
                    sharded={"shard": shard, "parameters_as_bucket_view": views},
                    **options,
                )
                twins.step(3)
                twins.check()
                twins.opt.check_replicas()


@pytest.mark.parametrize("world_size", [1, 3])
def test_complex_parameters_train_as_in_the_plain_optimizer(world_size):
    run_ranks(_complex, world_size)


# --- accelerators -------------------------------------------------------------------------------------------------

_accelerators = torch.accelerator.device_count()


def _on_devices(rank, world_size, devices):
    def params():
        return [
            Parameter(values(shape, position, torch.float32).to(devices[position % len(devices)]))
            for position, shape in enumerate([(300, 129), (5,), (3, 2, 2), (41, 3), (1,)])
        ]

    for shard in ("tensor", "auto"):
        for views in (False, True):
            twins = Twins(
                params,
                torch.optim.AdamW,
                sharded={"shard": shard, "parameters_as_bucket_view": views},
                # kernels on accelerators are element-wise, but a foreach kernel may round by position
                close=None if shard == "tensor" else (1e-6, 1e-6),
            )
            for step in range(3):
                for position, both in enumerate(zip(twins.ours, twins.theirs, strict=True)):
                    for param in both:
                        param.grad = values(param.shape, 10 * step + position, torch.float32).to(param.device)
                twins.opt.step()
                twins.plain.step()
            twins.check_weights()
            twins.opt.check_replicas()
            found = {bucket.device for bucket in twins.opt.layout.buckets}
            assert len(found) == len(devices), "a bucket never spans devices"


def _lone_element(rank, world_size, directory):
    def make():
        return [Parameter(torch.arange(8.0)[3::8]), Parameter(torch.arange(3.0)), Parameter(torch.ones(1, 9)[:, ::9])]

    for number, options in enumerate(({}, {"shard": "tensor"}, {"shard_gradients": True}, {"lazy_gather": True})):
        params, theirs = make(), make()
        assert params[0].stride() == (8,)
        opt = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.1, **options)
        plain = torch.optim.AdamW(theirs, lr=0.1)
        for step in range(4):
            for optimizer, some in ((opt, params), (plain, theirs)):
                optimizer.zero_grad()
                sum((param * param).sum() for param in some).backward()
                optimizer.step()
            opt.check_replicas()
            if step == 1:
                opt.consolidate_state_dict()
                checkpoint.save(directory / str(number), opt)
                checkpoint.load(directory / str(number), opt)
        for one, other in zip(params, theirs, strict=True):
            assert torch.equal(one, other), options


def test_a_single_element_with_a_stride_is_stepped_compared_and_saved(tmp_path):
    """It is contiguous, because it is alone, and there is no view of it as bytes."""
    run_ranks(_lone_element, 3, tmp_path)


def _two_devices(rank, world_size):
    kind = torch.accelerator.current_accelerator().type
    _on_devices(rank, world_size, [torch.device(kind, 0), torch.device(kind, 1)])


@pytest.mark.skipif(_accelerators < 2, reason="needs two accelerators")
def test_a_model_split_over_two_accelerators_has_buckets_per_device():
    """gloo: two processes that share both devices."""
    run_ranks(_two_devices, 2)


def _nccl(rank, world_size):
    import torch.distributed as dist

    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    _on_devices(rank, world_size, [torch.device("cuda", 0)])
    opt = ZeroRedundancyOptimizer([Parameter(torch.ones(5, device="cuda"))], torch.optim.AdamW)
    opt.consolidate_state_dict()


@pytest.mark.skipif(
    _accelerators < 1 or not torch.distributed.is_nccl_available(), reason="needs an accelerator and NCCL"
)
def test_one_accelerator_on_nccl():
    run_ranks(_nccl, 1)
