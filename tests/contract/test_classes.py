"""Every class of torch.optim, with every set of options and every wrong input that torch's own tests have for it.

The tables are torch's: ``torch.testing._internal.common_optimizers``. They change with torch, so one version is read.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import assert_same, parameters, values
from tests.twins import Twins

CLASSES = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
REFUSED = {"LBFGS", "SparseAdam"}  # tests/unit/test_probe.py
WHOLE = {"Adafactor", "Muon"}
SHAPES = ((13, 17), (5, 1), (3, 7), (97, 2))  # 443 elements, and matrices only: Muon takes no others
# A fused kernel steps the last (length modulo vector width) elements of a tensor with scalar code that rounds
# differently. A cut that is no multiple of the width moves elements there. One rounding per step, in float64.
FUSED_ROUNDING = (1e-13, 1e-13)


def info_of(name: str) -> Any:
    """Imported here and not in the ranks: it takes a second, and changes settings of torch."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13):
        pytest.skip("the tables are read as torch 2.13 has them")
    pytest.importorskip("expecttest", reason="torch's tables import it")
    from torch.testing._internal.common_optimizers import optim_db

    return next(info for info in optim_db if info.optim_cls is CLASSES[name])


def option_sets(name: str) -> list[dict[str, Any]]:
    info = info_of(name)
    found = [given.kwargs for given in info.optim_inputs_func(device="cpu")]
    implementations = [flag for flag in ("foreach", "fused") if flag in info.supported_impls]
    return found + [{**found[-1], flag: True} for flag in implementations]


# --- training, and state dicts that go on in the other --------------------------------------------------------------


def train(rank: int, world_size: int, name: str, sets: list[dict[str, Any]], supports_complex: bool) -> None:
    for given in sets:
        options = copy.deepcopy(given)  # (tensors in it came through shared memory)
        for shard in ("auto",) if name in WHOLE else ("element", "tensor") if "fused" in options else ("element",):
            close = FUSED_ROUNDING if "fused" in options and shard == "element" else None
            twins = Twins(
                partial(some_parameters, supports_complex and "fused" not in options),
                CLASSES[name],
                name=f"{name} {options} {shard}",
                sharded={"shard": shard},
                close=close,
                **options,
            )
            granularity = "tensor" if name in WHOLE else shard
            assert {spec.granularity for spec in twins.opt.layout.specs} == {granularity}
            twins.step(3)
            twins.check_weights()
            exchange(twins, options, shard)
            twins.step(2)
            twins.check()


def some_parameters(with_complex: bool) -> list[Parameter]:
    more = [Parameter(values((5, 3), 7, torch.complex128))] if with_complex else []
    return parameters(SHAPES) + more


def exchange(twins: Twins, options: dict[str, Any], shard: str) -> None:
    """New optimizers; the sharded one loads the plain one's state dict, and the plain one the sharded one's."""
    twins.opt.consolidate_state_dict(to=0)
    box = [twins.opt.state_dict()]
    dist.broadcast_object_list(box)
    theirs, kind = copy.deepcopy(twins.plain.state_dict()), type(twins.plain)
    assert_same(box[0], theirs, twins.name, twins.close)
    twins.opt = ZeroRedundancyOptimizer(twins.ours, kind, shard=shard, **options)
    twins.plain = kind(twins.theirs, **options)
    twins.opt.load_state_dict(theirs)
    twins.plain.load_state_dict(box[0])


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", sorted(CLASSES.keys() - REFUSED))
def test_a_class_trains_and_resumes_with_the_bits_of_the_plain_one_whatever_its_options(name, world_size):
    run_ranks(train, world_size, name, option_sets(name), info_of(name).supports_complex)


def test_the_tables_have_every_class():
    for name in CLASSES:
        assert info_of(name).optim_inputs_func(device="cpu")


def aligned(rank: int, world_size: int) -> None:
    for name in ("Adagrad", "Adam", "AdamW", "SGD"):
        options = {"momentum": 0.9} if name == "SGD" else {}
        for dtype in (torch.float64, torch.float32):
            make = partial(parameters, [(251, 197), (64 * 256 * world_size + 3,)], dtype)
            twins = Twins(make, CLASSES[name], name=name, fused=True, **options)
            assert twins.opt.layout.cut_params
            twins.step(3)
            twins.check()


def test_fused_kernels_are_bit_equal_where_tensors_are_large_enough_to_be_cut_at_multiples_of_the_vector_width():
    run_ranks(aligned, 3)


# --- wrong input ----------------------------------------------------------------------------------------------------


# Where ours raises another type.
OTHERWISE: dict[str, type[BaseException]] = {
    "all optimizer params should be with/without names": TypeError,  # (no reason is known: torch's type would be right)
    "does not support complex parameters": ValueError,  # told when it is built, as the probe cannot step them
}


def error_of(build: Any, steps: bool) -> type[BaseException] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            optimizer = build()
            if steps:
                optimizer.step()
        except (Exception, UserWarning) as error:
            return type(error)
    return None


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_wrong_input_raises_what_the_plain_class_raises(name):
    found = {}
    for given in info_of(name).optim_error_inputs_func(device="cpu", dtype=torch.float64):
        wrong, steps = given.optimizer_error_input, given.error_on.name == "STEP_ERROR"
        params = [Parameter(torch.ones(3, 2))] if wrong.params is None else wrong.params
        plain = error_of(partial(CLASSES[name], params, **wrong.kwargs), steps)
        ours = error_of(partial(ZeroRedundancyOptimizer, params, CLASSES[name], **wrong.kwargs), steps)
        assert plain is given.error_type, f"{wrong.desc}: torch raises {plain}"
        found[wrong.desc] = (ours, OTHERWISE.get(wrong.desc, plain))
    assert {what: pair for what, pair in found.items() if pair[0] is not pair[1]} == {}
