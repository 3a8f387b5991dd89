"""Every public signature has types, and ``Any`` stands only where there is no other type.

Read off the signatures as they are written. Whether they are true, type checkers tell (``tests/package``).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import shardstep
from shardstep import checkpoint

PLAIN = "torch's form of a state dict, whose values are whatever the optimizer keeps"
OPTIONS = "options of any optimizer class"
HANDED_ON = "handed on to torch's method, whose arguments differ between versions"
DISPATCH = "the arguments and the result of any operator of torch"
EXTRA = "what a user saved as extra"
PICKLED = "Python's protocol of copying and pickling"

# Where ``Any`` stands, and why no other type can.
ANY = {
    "ZeroRedundancyOptimizer.__init__(defaults)": OPTIONS,
    "ZeroRedundancyOptimizer.add_param_group(param_group)": OPTIONS,
    "ZeroRedundancyOptimizer.step(kwargs)": "further arguments of any optimizer's step",
    "UnevenInputs.join_hook(kwargs)": "torch's Join passes whatever its user gave it",
    "ZeroRedundancyOptimizer.__getstate__(return)": PICKLED,
    "ZeroRedundancyOptimizer.__setstate__(state)": PICKLED,
    "ShardedOptimizer.state_dict(return)": PLAIN,
    "ShardedOptimizer.load_state_dict(state_dict)": PLAIN,
    "ShardedOptimizer.sharded_state_dict(return)": PLAIN,
    "ShardedOptimizer.load_sharded_state_dict(state_dict)": PLAIN,
    "ShardedOptimizer.full_state(return)": PLAIN,
    "ShardedOptimizer.state(value)": PLAIN,
    "ShardedOptimizer.saves(return)": "no part of the API: what checkpoints keep",
    "ShardedGradient.__torch_function__(func)": DISPATCH,
    "ShardedGradient.__torch_function__(types)": DISPATCH,
    "ShardedGradient.__torch_function__(args)": DISPATCH,
    "ShardedGradient.__torch_function__(kwargs)": DISPATCH,
    "ShardedGradient.__torch_function__(return)": DISPATCH,
    "ShardedGradient.__torch_dispatch__(func)": DISPATCH,
    "ShardedGradient.__torch_dispatch__(types)": DISPATCH,
    "ShardedGradient.__torch_dispatch__(args)": DISPATCH,
    "ShardedGradient.__torch_dispatch__(kwargs)": DISPATCH,
    "ShardedGradient.__torch_dispatch__(return)": DISPATCH,
    "StateShard.__torch_dispatch__(func)": DISPATCH,
    "StateShard.__torch_dispatch__(types)": DISPATCH,
    "StateShard.__torch_dispatch__(args)": DISPATCH,
    "StateShard.__torch_dispatch__(kwargs)": DISPATCH,
    "StateShard.__torch_dispatch__(return)": DISPATCH,
    "StateShard.__deepcopy__(memo)": PICKLED,
    "load(return)": EXTRA,
    "load_extra(return)": EXTRA,
    "resume(return)": EXTRA,
    "Reader.read_metadata(args)": HANDED_ON,
    "Reader.read_metadata(kwargs)": HANDED_ON,
    "Reader.set_up_storage_reader(args)": HANDED_ON,
    "Reader.set_up_storage_reader(kwargs)": HANDED_ON,
}


def is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


def is_ours(function: object) -> bool:
    return getattr(function, "__module__", "").startswith("shardstep")


def functions_of(member: object) -> Iterator[Callable[..., Any]]:
    """The functions behind a name of a class: a property has up to three."""
    if isinstance(member, property):
        yield from (part for part in (member.fget, member.fset, member.fdel) if part is not None)
    elif isinstance(member, (classmethod, staticmethod)):
        yield member.__func__
    elif inspect.isfunction(member):
        yield member


def public_functions() -> Iterator[Callable[..., Any]]:
    """Of the names in ``__all__``: functions, and methods of classes, also those of base classes of ours."""
    for module in (shardstep, checkpoint):
        for value in (getattr(module, name) for name in module.__all__):
            if inspect.isfunction(value):
                yield value
            for kind in inspect.getmro(value) if inspect.isclass(value) else ():
                for name, member in vars(kind).items():
                    if is_public(name) and is_ours(kind):
                        yield from filter(is_ours, functions_of(member))


def annotations_of(function: Callable[..., Any]) -> Iterator[tuple[str, str | None]]:
    """The places of a signature, and what is written there; None: nothing."""
    signature = inspect.signature(function)
    for name, parameter in signature.parameters.items():
        if name not in ("self", "cls"):
            missing = parameter.annotation is inspect.Parameter.empty
            yield f"{function.__qualname__}({name})", None if missing else str(parameter.annotation)
    missing = signature.return_annotation is inspect.Signature.empty
    yield f"{function.__qualname__}(return)", None if missing else str(signature.return_annotation)


PLACES = {place: text for function in public_functions() for place, text in annotations_of(function)}


def test_every_parameter_and_result_of_the_public_api_has_a_type():
    assert [place for place, text in PLACES.items() if text is None] == []


def test_any_stands_only_where_no_other_type_exists():
    assert {place for place, text in PLACES.items() if text and re.search(r"\bAny\b", text)} == set(ANY)


@pytest.mark.parametrize(
    "place",
    [
        "ZeroRedundancyOptimizer.__init__(params)",
        "ZeroRedundancyOptimizer.step(closure)",
        "ShardedOptimizer.state(return)",
        "StateShard.__create_write_items__(return)",
        "hook_with_zero_step(return)",
        "save(extra)",
        "SaveHandle.wait(timeout)",
        "SafeLoadPlanner.load_bytes(value)",
    ],
)
def test_the_walk_through_the_api_comes_by(place):
    assert place in PLACES
