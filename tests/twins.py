"""The plain optimizer beside the sharded one: equal parameters, equal gradients, bit for bit the same outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import Parameter

from shardstep import ZeroRedundancyOptimizer
from tests.oracle import assert_same, values


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
        self.seed = 2000

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
