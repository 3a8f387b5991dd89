"""DDP with the plain optimizer beside DDP whose gradients our optimizer shards: the same models, the same batches.

Float64. The sums over ranks are added in another order than gloo's all-reduce adds them, a rounding or two per element
(2e-16 relative to it); a few steps of optimizers that divide by the size of a gradient enlarge that. Differences seen
are below 1e-15; ``CLOSE`` leaves a factor of a thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardstep import ShardedGradient, ZeroRedundancyOptimizer, reduce_scatter_hook, shard_ddp_gradients
from tests.hook_twins import HOOKS, SMALL_CAP, Side, Tangled, batch_of, two_groups
from tests.twins import assert_same as assert_close

CLOSE = (0.0, 1e-12)  # rtol, atol


def in_rank_order(state, bucket):
    """A DDP hook that adds up as ours promises to: rank 0's part plus rank 1's and so on, then one division."""
    buffer = bucket.buffer()
    parts = [torch.empty_like(buffer) for _ in range(dist.get_world_size(state))]
    dist.all_gather(parts, buffer, group=state)
    total = parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(total.div_(len(parts)))
    return future


def sharded(
    module: nn.Module,
    optimizer_class: Any,
    groups: Callable[[nn.Module], Any] = two_groups,
    ddp: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    hook: str = "",
    bare: bool = False,
    group: Any = None,
    **defaults: Any,
) -> Side:
    """A model in DDP whose gradients are sharded. ``hook``: a key of ``HOOKS``, for a step in backward."""
    wrapped = DistributedDataParallel(module, process_group=group, **{"bucket_cap_mb": SMALL_CAP, **(ddp or {})})
    options = {"overlap_with_ddp": bool(hook), "bucket_cap_mb": SMALL_CAP, **(zero or {}), **defaults}
    optimizer = ZeroRedundancyOptimizer(groups(module), optimizer_class, group, **options)
    if hook:
        wrapped.register_comm_hook(None, HOOKS[hook](reduce_scatter_hook, wrapped, optimizer))
    elif bare:
        wrapped.register_comm_hook(optimizer, reduce_scatter_hook)
    else:
        shard_ddp_gradients(wrapped, optimizer)
    return Side(wrapped, optimizer)


def plain(
    module: nn.Module,
    optimizer_class: Any,
    groups: Callable[[nn.Module], Any] = two_groups,
    ddp: dict[str, Any] | None = None,
    hook: Callable[[Any, Any], Any] | None = None,
    group: Any = None,
    **defaults: Any,
) -> Side:
    """A model in DDP as it is, and the plain optimizer."""
    wrapped = DistributedDataParallel(module, process_group=group, **{"bucket_cap_mb": SMALL_CAP, **(ddp or {})})
    if hook is not None:
        wrapped.register_comm_hook(group, hook)
    return Side(wrapped, optimizer_class(groups(module), **defaults))


class ShardedTwins:
    """``theirs`` is the oracle. What is done is done with both."""

    def __init__(self, theirs: Side, ours: Side, schedule: Callable[[Any], Any] | None = None, name: str = "") -> None:
        self.theirs, self.ours, self.name = theirs, ours, name
        self.rank = dist.get_rank()
        self.iteration = 0
        self.schedulers = [schedule(side.optimizer) for side in (theirs, ours)] if schedule else []

    @classmethod
    def make(
        cls,
        optimizer_class: Any,
        *,
        make: Callable[[], nn.Module] = Tangled,
        groups: Callable[[nn.Module], Any] = two_groups,
        ddp: dict[str, Any] | None = None,
        zero: dict[str, Any] | None = None,
        hook: str = "",
        oracle: Callable[[Any, Any], Any] | None = None,
        schedule: Callable[[Any], Any] | None = None,
        group: Any = None,
        **defaults: Any,
    ) -> ShardedTwins:
        """``oracle``: a hook for the other side, which else is DDP as it is."""
        theirs = plain(make(), optimizer_class, groups, ddp, oracle, group=group, **defaults)
        ours = sharded(make(), optimizer_class, groups, ddp, zero, hook, group=group, **defaults)
        return cls(theirs, ours, schedule, f"{optimizer_class.__name__} {ddp} {zero} {hook}")

    def each(self, do: Callable[[Side], Any]) -> list[Any]:
        return [do(self.theirs), do(self.ours)]

    def batch(self, micro: int = 0) -> Tensor:
        return batch_of(self.rank, self.iteration, micro)

    def zero_grad(self) -> None:
        self.each(lambda side: side.optimizer.zero_grad())

    def backward(self, micro: int = 0, sync: bool = True, **forward: Any) -> None:
        for side in (self.theirs, self.ours):
            if sync:
                side.backward(self.batch(micro), **forward)
            else:
                with side.ddp.no_sync():
                    side.backward(self.batch(micro), **forward)

    def clip(self, max_norm: float, **options: Any) -> None:
        """torch's own clipping, on both."""
        norms = self.each(lambda side: nn.utils.clip_grad_norm_(side.ddp.parameters(), max_norm, **options))
        assert_close(norms[1], norms[0], f"{self.name}: norm", CLOSE)

    def step(self) -> None:
        self.each(lambda side: side.optimizer.step())
        for scheduler in self.schedulers:
            scheduler.step()
        self.iteration += 1

    def train(self, count: int, close: tuple[float, float] | None = CLOSE, clip: float | None = None) -> None:
        """Iterations as in every program; the weights are compared after each."""
        for _ in range(count):
            self.zero_grad()
            self.backward()
            if clip is not None:
                self.clip(clip)
            self.step()
            self.check_weights(close)

    def check_weights(self, close: tuple[float, float] | None = CLOSE) -> None:
        claim = f"{self.name}, iteration {self.iteration}"
        assert_close(self.ours.weights(), self.theirs.weights(), claim, close)

    def check_gradients(self, optimizers: Sequence[ZeroRedundancyOptimizer] = ()) -> None:
        """Collective. Our whole gradients are DDP's; None where DDP has None."""
        owner = {
            param: one
            for one in optimizers or [self.ours.optimizer]
            for group in one.param_groups
            for param in group["params"]
        }
        pairs = zip(self.ours.ddp.module.named_parameters(), self.theirs.ddp.module.parameters(), strict=True)
        for (name, mine), other in pairs:
            assert (mine.grad is None) == (other.grad is None), f"{self.name}: {name}.grad is {mine.grad}"
            if mine in owner and mine.grad is not None:
                assert isinstance(mine.grad, ShardedGradient), f"{self.name}: {name}.grad is {type(mine.grad)}"
            whole = owner[mine].full_grad(mine) if mine in owner else mine.grad
            if other.grad is not None:
                assert_close(whole, other.grad, f"{self.name}: gradient of {name}", CLOSE)

    def check_state(self, close: tuple[float, float] | None = CLOSE) -> None:
        """Collective: the consolidated state dict on rank 0."""
        self.ours.optimizer.consolidate_state_dict(to=0)
        if self.ours.optimizer.rank == 0:
            state = self.ours.optimizer.state_dict()["state"]
            assert_close(state, self.theirs.optimizer.state_dict()["state"], f"{self.name}: state", close)
        self.ours.optimizer.check_replicas()
