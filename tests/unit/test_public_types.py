"""Every public signature has types. Whether they are true, type checkers tell (``tests/package``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import shardstep
from shardstep import checkpoint


def functions_behind(member: object) -> Iterator[Callable[..., Any]]:
    """A property has up to three."""
    if isinstance(member, property):
        yield from filter(None, (member.fget, member.fset, member.fdel))
    elif isinstance(member, (classmethod, staticmethod)):
        yield member.__func__
    elif inspect.isfunction(member):
        yield member


def public_functions() -> Iterator[Callable[..., Any]]:
    """Of the names in ``__all__``: functions, and methods of classes, also those of base classes of ours."""
    for value in (getattr(module, name) for module in (shardstep, checkpoint) for name in module.__all__):
        yield from functions_behind(value)
        for kind in inspect.getmro(value) if inspect.isclass(value) else ():
            if kind.__module__.startswith("shardstep"):
                public = [member for name, member in vars(kind).items() if not name.startswith("_") or "__" in name]
                yield from (function for member in public for function in functions_behind(member))


def untyped(function: Callable[..., Any]) -> list[str]:
    signature = inspect.signature(function)
    places = {name: one.annotation for name, one in signature.parameters.items() if name not in ("self", "cls")}
    places["return"] = signature.return_annotation
    return [f"{function.__qualname__}({name})" for name, given in places.items() if given is inspect.Signature.empty]


def test_every_parameter_and_result_of_the_public_api_has_a_type():
    found = [one for one in public_functions() if one.__module__.startswith("shardstep")]
    assert {"ZeroRedundancyOptimizer.step", "hook_with_zero_step", "save"} <= {one.__qualname__ for one in found}
    assert [place for function in found for place in untyped(function)] == []
