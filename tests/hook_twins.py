"""DDP + the plain optimizer beside DDP + a sharded one that steps in DDP's hook: the same models, the same batches.

Both reduce the same bytes with the same inner hook, so weights and states are compared bit by bit, after every
iteration.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from shardstep import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved
from tests.oracle import assert_same, values_of

HOOKS = {"at the end": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}
WIDTH = 16
SMALL_CAP = 0.002  # MiB: one 16 x 16 layer in float64 with its bias


class Tangled(nn.Module):
    """Five layers, registered in another order than they run in, of which ``skip`` may leave some out.

    DDP's first buckets follow the registration and those it rebuilds follow the order of gradients: they differ.
    """

    RUNS = (3, 0, 4, 1, 2)

    def __init__(self, seed: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=torch.float64) for _ in range(5))

    def forward(self, batch: Tensor, skip: Sequence[int] = ()) -> Tensor:
        for position in self.RUNS:
            if position not in skip:
                batch = torch.tanh(self.layers[position](batch)) + batch
        return batch


class Chain(nn.Module):
    """Square matrices, used in the given order."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.order = order
        self.matrices = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 4) for _ in order
        )

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for position in self.order:
            batch = torch.tanh(batch @ self.matrices[position]) + batch
        return batch


class SignMomentum(Optimizer):
    """No class of torch's: steps by the sign of a running mean, with its own count and clock in the state."""

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.8, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["count"], state["mean"] = 0, torch.zeros_like(param)
                state["count"] += 1
                state["mean"].lerp_(param.grad, 1 - group["beta"])
                param.mul_(1 - group["lr"] * group["decay"])
                param.sub_(state["mean"].sign() * group["lr"] / state["count"] ** 0.5)
        return loss


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "AdamW": (AdamW, {"lr": 0.05, "weight_decay": 0.3}),
    "custom": (SignMomentum, {"lr": 0.02, "decay": 0.2}),
}
# Weight decay moves also what has a gradient of zero: a parameter that must be left alone shows.
DECAY = OPTIMIZERS["AdamW"][1]
BOTH = (False, True)


def all_params(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters())


def two_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors have another learning rate."""
    params = list(module.parameters())
    return [
        {"params": [param for param in params if param.dim() > 1]},
        {"params": [param for param in params if param.dim() <= 1], "lr": 0.07},
    ]


def batch_of(rank: int, iteration: int, micro: int = 0, width: int = WIDTH) -> Tensor:
    """Another one on every rank and in every iteration."""
    generator = torch.Generator().manual_seed(1000 * iteration + 10 * rank + micro)
    return torch.randn(4, width, generator=generator, dtype=torch.float64)


def delayed(delays: random.Random) -> Callable[[Any, Any], Any]:
    """Reduces, but each bucket starts late, and its result is known later still: in any order on any rank."""

    def hook(group, bucket):
        time.sleep(delays.choice([0, 0, 0, 0.001, 0.003]))

        def result(future):
            time.sleep(delay)
            return future.value()

        delay = delays.choice([0, 0, 0.001, 0.004])
        return allreduce_hook(group, bucket).then(result)

    return hook


class Side(NamedTuple):
    """A model in DDP and its optimizer."""

    ddp: DistributedDataParallel
    optimizer: Any

    def backward(self, batch: Tensor, **forward: Any) -> Tensor:
        loss = self.ddp(batch, **forward).square().mean()
        loss.backward()
        return loss

    def weights(self) -> list[Tensor]:
        return values_of(self.ddp.module.parameters())


class HookTwins:
    """``ours`` steps in DDP's hook, ``theirs`` is DDP with the inner hook alone and the plain optimizer.

    Args:
        make: builds the module; called twice.
        groups: from the module to what is passed as ``params``; keys named "shard" are for ours only.
        hook: a key of ``HOOKS``.
        inner: the DDP hook that reduces; ``inner_state`` makes the state it is registered with.
        ddp: further arguments of DDP; ``zero``: of the sharded optimizer.
        group: the process group of both; ``zero`` may name another one for the optimizer.
        schedule: makes a learning rate scheduler for an optimizer; it steps after every iteration.
    """

    def __init__(
        self,
        optimizer_class: Any,
        *,
        make: Callable[[], nn.Module] = Tangled,
        groups: Callable[[nn.Module], Any] = two_groups,
        hook: str = "interleaved",
        inner: Callable[[Any, Any], Any] = allreduce_hook,
        inner_state: Callable[[], Any] | None = None,
        shard_buckets: bool = False,
        ddp: dict[str, Any] | None = None,
        zero: dict[str, Any] | None = None,
        group: Any = None,
        schedule: Callable[[Any], Any] | None = None,
        name: str = "",
        **defaults: Any,
    ) -> None:
        self.name = name or f"{optimizer_class.__name__} {hook} {ddp} {zero}"
        wrap = {"process_group": group, "bucket_cap_mb": SMALL_CAP, **(ddp or {})}
        make_state = inner_state or (lambda: group)
        theirs = DistributedDataParallel(make(), **wrap)
        plain_groups = groups(theirs.module)
        if isinstance(plain_groups, list) and all(isinstance(entry, dict) for entry in plain_groups):
            plain_groups = [{key: entry[key] for key in entry if key != "shard"} for entry in plain_groups]
        self.theirs = Side(theirs, optimizer_class(plain_groups, **defaults))
        theirs.register_comm_hook(make_state(), inner)
        self.ours_buckets: list[int] = []  # how many buckets DDP handed over, by iteration
        ours = DistributedDataParallel(make(), **wrap)
        arguments = {"process_group": group, **(zero or {}), **defaults}
        zero_optimizer = ZeroRedundancyOptimizer(
            groups(ours.module), optimizer_class, overlap_with_ddp=True, **arguments
        )
        self.ours = Side(ours, zero_optimizer)
        wrapped = HOOKS[hook](self._counting(inner), ours, zero_optimizer, shard_buckets)
        ours.register_comm_hook(make_state(), wrapped)
        self.rank = dist.get_rank(group)
        self.iteration = 0
        self.schedulers = [schedule(side.optimizer) for side in (self.theirs, self.ours)] if schedule else []

    @property
    def zero(self) -> ZeroRedundancyOptimizer:
        return self.ours.optimizer

    @property
    def plain(self) -> Any:
        return self.theirs.optimizer

    def _counting(self, inner: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def counted(state, bucket):
            if bucket.index() == 0:
                self.ours_buckets.append(0)
            self.ours_buckets[-1] += 1
            return inner(state, bucket)

        return counted

    def iterate(
        self,
        count: int = 1,
        *,
        step: bool = True,
        micro: int = 0,
        zero_grad: Callable[[Any], None] | None = lambda optimizer: optimizer.zero_grad(),
        check: bool = True,
        **forward: Any,
    ) -> None:
        """Iterations of both sides with the same batches; then their weights are compared.

        Args:
            step: whether ours is told to step, which changes nothing.
            micro: how many micro-batches are accumulated under ``no_sync`` first.
            zero_grad: what is done about old gradients (None: nothing).
            forward: given to the module, e.g. ``skip``.
        """
        for _ in range(count):
            self.iteration += 1
            for side in (self.theirs, self.ours):
                if zero_grad is not None:
                    zero_grad(side.optimizer)
                for position in range(micro):
                    with side.ddp.no_sync():
                        side.backward(self.batch(1 + position), **forward)
                side.backward(self.batch(), **forward)
                if side is self.theirs or step:
                    side.optimizer.step()
            for scheduler in self.schedulers:
                scheduler.step()
            if check:
                self.check_weights()

    def batch(self, micro: int = 0) -> Tensor:
        return batch_of(self.rank, self.iteration, micro)

    def check_weights(self) -> None:
        claim = f"{self.name}, iteration {self.iteration}"
        assert_same(self.ours.weights(), self.theirs.weights(), claim)

    def check_gradients(self) -> None:
        """What DDP leaves in ``.grad`` is not touched."""
        pairs = zip(self.ours.ddp.module.parameters(), self.theirs.ddp.module.parameters(), strict=True)
        for position, (mine, other) in enumerate(pairs):
            assert_same(mine.grad, other.grad, f"{self.name}: gradient {position}")

    def check_state(self, to: int = 0) -> None:
        """Collective: the consolidated state dict on rank ``to``."""
        self.zero.consolidate_state_dict(to=to)
        if self.zero.rank == to:
            ours, theirs = self.zero.state_dict(), self.plain.state_dict()
            assert_same(ours["state"], theirs["state"], f"{self.name}: state")
            assert_same(ours["param_groups"], theirs["param_groups"], f"{self.name}: groups")

    def check(self, to: int = 0) -> None:
        self.check_weights()
        self.check_gradients()
        self.check_state(to)
        self.zero.check_replicas()
