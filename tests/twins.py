"""The plain optimizer beside the sharded one: equal parameters, equal gradients, bit for bit the same outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shardstep import ZeroRedundancyOptimizer


def values(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that are the same on every rank; complex ones for a complex dtype."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(tuple(shape), generator=generator, dtype=wide).to(dtype)


def parameters(shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float64) -> list[Parameter]:
    return [Parameter(values(shape, 100 + position, dtype)) for position, shape in enumerate(shapes)]


def assert_same(ours: Any, expected: Any, where: str, close: tuple[float, float] | None = None) -> None:
    """Equal through dicts and lists: types, keys, dtypes, shapes, and every bit (or ``close``: rtol, atol)."""
    if isinstance(expected, Tensor):
        assert isinstance(ours, Tensor), f"{where}: {ours!r} is no tensor"
        assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape), f"{where}: {ours!r} != {expected!r}"
        if close is None:
            assert torch.equal(ours.cpu(), expected.cpu()), f"{where}: {ours} != {expected}"
        else:
            torch.testing.assert_close(ours.cpu(), expected.cpu(), rtol=close[0], atol=close[1], msg=where)
    elif isinstance(expected, dict):
        assert ours.keys() == expected.keys(), f"{where}: keys {list(ours)} != {list(expected)}"
        for key in expected:
            assert_same(ours[key], expected[key], f"{where}[{key!r}]", close)
    elif isinstance(expected, (list, tuple)):
        assert type(ours) is type(expected), f"{where}: {ours!r} != {expected!r}"
        assert len(ours) == len(expected), f"{where}: {ours!r} != {expected!r}"
        for position, (one, other) in enumerate(zip(ours, expected, strict=True)):
            assert_same(one, other, f"{where}[{position}]", close)
    else:
        assert type(ours) is type(expected), f"{where}: {ours!r} != {expected!r}"
        assert ours == expected, f"{where}: {ours!r} != {expected!r}"


class Twins:
    """A sharded optimizer and the plain one, each over its own copy of the same parameters.

    ``groups`` turns a list of parameters into what is passed as ``params``; keys named "shard" are for ours only.
    """

    def __init__(
        self,
        params: Callable[[], list[Parameter]],
        optimizer_class: Any,
        groups: Callable[[list[Parameter]], Any] = list,
        name: str = "",
        sharded: dict[str, Any] | None = None,
        close: tuple[float, float] | None = None,
        **defaults: Any,
    ) -> None:
        self.name = name or getattr(optimizer_class, "__name__", str(optimizer_class))
        self.close = close
        self.ours, self.theirs = params(), params()
        self.opt = ZeroRedundancyOptimizer(groups(self.ours), optimizer_class, **(sharded or {}), **defaults)
        plain_groups = groups(self.theirs)
        if isinstance(plain_groups, list) and all(isinstance(group, dict) for group in plain_groups):
            plain_groups = [{key: group[key] for key in group if key != "shard"} for group in plain_groups]
        self.plain = optimizer_class(plain_groups, **defaults)
        self.seed = 1000

    def set_gradients(self, skip: Sequence[int] = ()) -> None:
        """New gradients, the same for both; none for the parameters in ``skip``."""
        for position, (mine, theirs) in enumerate(zip(self.ours, self.theirs, strict=True)):
            self.seed += 1
            gradient = None if position in skip else values(mine.shape, self.seed, mine.dtype)
            mine.grad, theirs.grad = gradient, None if gradient is None else gradient.clone()

    def step(self, count: int = 1, skip: Sequence[int] = ()) -> None:
        for _ in range(count):
            self.set_gradients(skip)
            self.opt.step()
            self.plain.step()

    def check_weights(self) -> None:
        for position, (mine, theirs) in enumerate(zip(self.ours, self.theirs, strict=True)):
            assert_same(mine.detach(), theirs.detach(), f"{self.name}: parameter {position}", self.close)

    def check(self, to: int = 0) -> None:
        """Weights on every rank, and the consolidated state dict on rank ``to``."""
        self.check_weights()
        self.opt.consolidate_state_dict(to=to)
        if self.opt.rank == to:
            assert_same(self.opt.state_dict(), self.plain.state_dict(), f"{self.name}: state_dict()", self.close)
