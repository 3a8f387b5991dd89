"""What sharded results are compared with: the plain optimizer on the same gradients, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

# 161 elements: 1 modulo 2 and 4, 2 modulo 3, so that no number of ranks divides them.
SHAPES = ((7, 5), (13,), (3, 4, 2), (1,), (11, 8))


def parameters(shapes: Iterable[Sequence[int]] = SHAPES, dtype: torch.dtype = torch.float64) -> list[Parameter]:
    """The same parameters on every rank and in every call."""
    return [Parameter(_values(shape, 1000 + position).to(dtype)) for position, shape in enumerate(shapes)]


def set_gradients(params: Iterable[Tensor], step: int) -> None:
    """The gradients of one step: the same on every rank."""
    for position, param in enumerate(params):
        param.grad = _values(param.shape, 100 * step + position).to(param.dtype)


def train(optimizer: Any, params: Sequence[Tensor], steps: Iterable[int]) -> None:
    """Step with the gradients of these steps."""
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def difference(a: Any, b: Any, where: str = "") -> str:
    """The first place at which two nested values are not bit-equal; empty if they are."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return "" if alike else f"{where}: {a} is not {b}"
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if list(a) != list(b) and set(a) != set(b):
            return f"{where}: keys {list(a)} are not {list(b)}"
        return next(filter(None, (difference(a[key], b[key], f"{where}[{key!r}]") for key in a)), "")
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        if len(a) != len(b):
            return f"{where}: length {len(a)} is not {len(b)}"
        return next(filter(None, (difference(a[i], b[i], f"{where}[{i}]") for i in range(len(a)))), "")
    return "" if type(a) is type(b) and a == b else f"{where}: {a!r} is not {b!r}"


def assert_same(a: Any, b: Any, claim: str = "") -> None:
    """Bit-equal, through dicts, lists and tuples."""
    found = difference(a, b)
    assert not found, f"{claim} {found}"


def values_of(params: Iterable[Tensor]) -> list[Tensor]:
    return [param.detach().clone() for param in params]


def error_of(call: Callable[[], Any], claim: str = "") -> BaseException:
    """The exception that ``call`` raises; it is an error if it raises none."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError(f"{claim}: expected an error but there was none")


def _values(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
