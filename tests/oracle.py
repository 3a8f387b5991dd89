"""What sharded results are compared with: the plain optimizer on the same gradients, bit by bit. See also ``twins``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

# 161 elements: 1 modulo 2 and 4, 2 modulo 3, so that no number of ranks divides them.
SHAPES = ((7, 5), (13,), (3, 4, 2), (1,), (11, 8))


def values(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that are the same on every rank; complex ones for a complex dtype."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(tuple(shape), generator=generator, dtype=wide).to(dtype)


def parameters(shapes: Iterable[Sequence[int]] = SHAPES, dtype: torch.dtype = torch.float64) -> list[Parameter]:
    """The same parameters on every rank and in every call."""
    return [Parameter(values(shape, 1000 + position, dtype)) for position, shape in enumerate(shapes)]


def set_gradients(params: Iterable[Tensor], step: int) -> None:
    """The gradients of one step: the same on every rank."""
    for position, param in enumerate(params):
        param.grad = values(param.shape, 100 * step + position, param.dtype)


def train(optimizer: Any, params: Sequence[Tensor], steps: Iterable[int]) -> None:
    """Step with the gradients of these steps."""
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def assert_same(ours: Any, expected: Any, where: str = "", close: tuple[float, float] | None = None) -> None:
    """Equal through dicts, lists and tuples: types, keys, dtypes, shapes, and every bit (or ``close``: rtol, atol)."""
    if isinstance(ours, Tensor) and isinstance(expected, Tensor):
        assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape), f"{where}: {ours} is not {expected}"
        if close is None:
            assert torch.equal(ours.cpu(), expected.cpu()), f"{where}: {ours} is not {expected}"
        else:
            torch.testing.assert_close(ours.cpu(), expected.cpu(), rtol=close[0], atol=close[1], msg=where)
    elif isinstance(ours, Mapping) and isinstance(expected, Mapping):
        assert ours.keys() == expected.keys(), f"{where}: keys {list(ours)} are not {list(expected)}"
        for key in expected:
            assert_same(ours[key], expected[key], f"{where}[{key!r}]", close)
    elif isinstance(expected, (list, tuple)) and type(ours) is type(expected):
        assert len(ours) == len(expected), f"{where}: length {len(ours)} is not {len(expected)}"
        for position, (one, other) in enumerate(zip(ours, expected, strict=True)):
            assert_same(one, other, f"{where}[{position}]", close)
    else:
        assert type(ours) is type(expected), f"{where}: {ours!r} is not {expected!r}"
        assert ours == expected, f"{where}: {ours!r} is not {expected!r}"


def values_of(params: Iterable[Tensor]) -> list[Tensor]:
    return [param.detach().clone() for param in params]


def error_of(call: Callable[[], Any], claim: str = "") -> BaseException:
    """The exception that ``call`` raises; it is an error if it raises none."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError(f"{claim}: expected an error but there was none")
