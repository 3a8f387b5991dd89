"""The two sides of a comparison: ``Plain`` is DDP with the plain optimizer, ``Sharded`` is ours.

Both have the same methods, one for each thing that a program does, so that an operation is written once.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import shardstep
from shardstep import ZeroRedundancyOptimizer
from tests.differential.configurations import Configuration, optimizer_of
from tests.differential.models import Expected, Net, batch
from tests.differential.programs import Backward, Clip, Loop, Uneven

HOOKS: dict[str, tuple[Any, Any]] = {
    "hook": (shardstep.hook_with_zero_step, allreduce_hook),
    "interleaved": (shardstep.hook_with_zero_step_interleaved, allreduce_hook),
    "hook scattering": (shardstep.hook_with_zero_step, shardstep.reduce_scatter_hook),
    "interleaved scattering": (shardstep.hook_with_zero_step_interleaved, shardstep.reduce_scatter_hook),
}


class Side:
    """A model, what it is wrapped in, and its optimizer, on one rank."""

    wrapped: nn.Module
    optimizer: Any

    def __init__(self, config: Configuration, ranks: Any, rank: int, frozen: set[str], added: bool) -> None:
        self.config, self.ranks, self.rank = config, ranks, rank
        self.model = Net(config.model, config.dtype, seed=10 + rank)  # (DDP, or ours, begins with rank 0's)
        for name, param in self.model.named_parameters():
            param.requires_grad_(name not in frozen)
        self.added, self.ddp_cap = added, config.ddp_cap
        self.scheduler: Any = None
        self.fetched: dict[int, Tensor] = {}  # batches that were fetched early
        self.scaler = torch.amp.GradScaler(self.device, init_scale=2.0**10, growth_interval=2)

    device = "cpu"

    # --- building -------------------------------------------------------------------------------------------------

    def params(self) -> list[tuple[str, nn.Parameter]]:
        """What the optimizer has, by name, in its order."""
        ordered = [one for group in self._split() for one in group]
        return ordered + ([(f"late.{name}", param) for name, param in self.model.late.named_parameters()] * self.added)

    def _split(self) -> list[list[tuple[str, nn.Parameter]]]:
        """By group: matrices, and vectors."""
        trained = self.model.trained()
        if self.config.groups == "one":
            return [trained]
        split = [one for one in trained if one[1].dim() > 1], [one for one in trained if one[1].dim() <= 1]
        return [group for group in split if group]

    def groups(self, tensors: Callable[[nn.Parameter], Tensor] = lambda param: param) -> list[dict[str, Any]]:
        """Matrices, vectors with other options, and what was added."""
        others = optimizer_of(self.config.optimizer)[2]
        found: list[dict[str, Any]] = [{"params": params} for params in self._split()]
        for group in found[1:]:
            group |= others
        if self.added:
            found.append(self.late_group())
        for group in found:
            names = [(name, tensors(param)) for name, param in group["params"]]
            group["params"] = names if self.config.names else [tensor for _, tensor in names]
        return found

    def late_group(self) -> dict[str, Any]:
        named = [(f"late.{name}", param) for name, param in self.model.late.named_parameters()]
        return {"params": named, "lr": 0.03}

    def move(self) -> None:
        """To where it is trained."""
        if self.config.memory_format == "channels_last":
            self.model.to(memory_format=torch.channels_last)
        self.model.place(self.device)

    def wrap(self, find_unused: bool) -> None:
        config = self.config
        options = {} if self.ddp_cap is None else {"bucket_cap_mb": self.ddp_cap}
        self.wrapped = DistributedDataParallel(
            self.model,
            process_group=self.ranks,
            find_unused_parameters=find_unused,
            static_graph=config.static_graph,
            gradient_as_bucket_view=config.gradient_views,
            **options,
        )

    # --- what a program does --------------------------------------------------------------------------------------

    def fetch(self, number: int) -> Tensor:
        """A batch, as a DataLoader with pin_memory brings it: the host does not wait."""
        data = batch(number, self.rank, self.config.dtype)
        return data if self.device == "cpu" else data.pin_memory().to(self.device, non_blocking=True)

    def loss(self, op: Backward, number: int, place: str = "") -> Tensor:
        data = self.fetched.pop(number, None)
        if data is None:
            data = self.fetch(number)
        skip = op.skip if op.only is None or op.only == self.rank else ()
        place = "late" if op.late == self.rank else place
        result = self.wrapped(data, skip, place).square().mean()
        return result * float("inf") if op.bad == self.rank and number % 2 else result

    def backward(self, op: Backward, number: int, place: str = "") -> Tensor:
        with contextlib.nullcontext() if op.sync else self.no_sync():
            loss = self.loss(op, number, place)
            spoilt = self.params()[number % len(self.params())][1]
            handle = spoilt.register_hook(with_infinity) if self._spoils(op, number, spoilt) else None
            (self.scaler.scale(loss) if op.scaled else loss).backward()
            if handle is not None:
                handle.remove()
        return loss.detach()

    def _spoils(self, op: Backward, number: int, param: Tensor) -> bool:
        return op.bad == self.rank and number % 2 == 0 and param.requires_grad and param.numel() > 0

    def no_sync(self) -> Any:
        return self.wrapped.no_sync()

    def step(self, **arguments: Any) -> Any:
        return self.optimizer.step(**arguments)

    def zero_grad(self, set_to_none: bool = True, by: str = "optimizer") -> None:
        (self.optimizer if by == "optimizer" else self.model).zero_grad(set_to_none)

    def clip(self, op: Clip) -> Tensor | None:
        params = [param for _, param in self.params()]
        if op.how == "value":
            nn.utils.clip_grad_value_(params, op.max_norm)
            return None
        return nn.utils.clip_grad_norm_(params, op.max_norm, op.norm_type)

    def loop(self, op: Loop, first: int) -> None:
        for number in range(first, first + op.count):
            self.iterate(op, number)

    def iterate(self, op: Loop, number: int) -> None:
        for _, call in self.parts(op, number):
            call()

    def parts(self, op: Loop, number: int) -> list[tuple[str, Callable[[], Any]]]:
        """Of an iteration."""
        clip = [("clip", lambda: self.clip(Clip(how=op.clip)))] if op.clip else []
        rounds = [
            Backward(sync=sync, late=op.late if at % 2 == 0 else None) for at, sync in enumerate((*op.before, True))
        ]
        backwards = [("backward", lambda one=one: self.backward(one, number)) for one in rounds]
        return [("zero_grad", self.zero_grad), *backwards, *clip, ("step", self.step)]

    def schedule(self) -> None:
        if self.scheduler is None:
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.8)
        self.scheduler.step()

    def freeze(self, names: set[str]) -> None:
        for name, param in self.model.named_parameters():
            param.requires_grad_(name not in names)
            if name in names:
                param.grad = None
        self.rewrap()

    def rewrap(self) -> None:
        raise NotImplementedError

    def joinables(self) -> list[Any]:
        return [self.wrapped]

    def join(self) -> Any:
        return Join(self.joinables())

    def uneven(self, count: int, first: int, op: Uneven, join: Any) -> None:
        """One epoch; ``join`` is the context, new or from the epoch before."""
        with join:
            for number in range(first, first + count):
                if op.closure:
                    self.step(closure=partial(self._evaluate, number, op.clip))
                else:
                    self._evaluate(number, op.clip)
                    self.step()
        self.zero_grad()

    def _evaluate(self, number: int, clip: float | None) -> Tensor:
        self.zero_grad()
        loss = self.backward(Backward(), number)
        if clip is not None:
            self.clip_in_join(clip)
        return loss

    def clip_in_join(self, max_norm: float) -> None:
        self.clip(Clip(max_norm))


def with_infinity(gradient: Tensor) -> Tensor:
    """Its last element is infinite."""
    added = torch.zeros_like(gradient)
    added[tuple(size - 1 for size in gradient.shape)] = float("inf")
    return gradient + added


class Plain(Side):
    """DDP with the plain optimizer; 16-bit parameters have float32 copies, made by hand.

    Nobody else rounds at random as we do. There the reference is ours on one rank, ``alone``: the bits are promised to
    be the same at any number of ranks, in any mode and after loading.
    """

    def __init__(self, *args: Any, alone: Any) -> None:
        super().__init__(*args)
        self.move()
        self.rewrap()
        kind, options, _ = optimizer_of(self.config.optimizer)
        if self.config.masters == "stochastic":
            self.masters = {}
            options |= {"master_weights": "stochastic", "bucket_cap_mb": 1}
            self.optimizer = ZeroRedundancyOptimizer(self.groups(), kind, alone, **options)
            return
        self.masters = (
            {param: nn.Parameter(param.detach().float()) for _, param in self.params()} if self._by_hand else {}
        )
        self.optimizer = kind(self.groups(lambda param: self.masters.get(param, param)), **options)

    @property
    def _by_hand(self) -> bool:
        return self.config.sixteen and self.config.masters != "stochastic"

    def rewrap(self) -> None:
        self.wrap(self.config.finds_unused)
        if self.config.mode in ("hook", "interleaved"):  # DDP alone multiplies by 1/N, its hook divides by N
            self.wrapped.register_comm_hook(self.ranks, allreduce_hook)

    def zero_grad(self, set_to_none: bool = True, by: str = "optimizer") -> None:
        super().zero_grad(set_to_none, by)
        for param in self.masters:  # its optimizer has the copies
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def add_group(self) -> None:
        self.added, group = True, self.late_group()
        for _, param in group["params"]:
            param.grad = None
            if self._by_hand:
                self.masters[param] = nn.Parameter(param.detach().float())
        named = [(name, self.masters.get(param, param)) for name, param in group["params"]]
        group["params"] = named if self.config.names else [tensor for _, tensor in named]
        self.optimizer.add_param_group(group)

    def step(self, **arguments: Any) -> Any:
        if not self._by_hand:
            return super().step(**arguments)
        loss = None
        if "closure" in arguments:
            loss = arguments.pop("closure")()
        self.adopt()
        for param, master in self.masters.items():
            master.grad = None if param.grad is None else param.grad.float()
        super().step(**arguments)
        self.write_back()
        return loss

    @torch.no_grad()
    def adopt(self) -> None:
        """Copies of elements that were changed are what they were changed to."""
        for param, master in self.masters.items():
            master.copy_(torch.where(rounded(master, param.dtype) == param, master, param.float()))

    @torch.no_grad()
    def write_back(self) -> None:
        for param, master in self.masters.items():
            if param.requires_grad:
                param.copy_(rounded(master, param.dtype))

    def state_of(self, param: Tensor) -> dict[str, Any]:
        if self.config.masters == "stochastic":
            return self.optimizer.full_state(param)
        self.adopt()
        found = dict(self.optimizer.state.get(self.masters.get(param, param), {}))
        if param in self.masters and found and found.get("step", 1) != 0:  # (Adagrad has state before its first step)
            found["master_weight"] = self.masters[param]
        return found

    def state_dict(self) -> dict[str, Any]:
        if self.config.masters == "stochastic":
            self.optimizer.consolidate_state_dict()
        return self.optimizer.state_dict()


class Alone(Side):
    """A plain optimizer over a model in one process, without DDP."""

    def __init__(self, config: Configuration, frozen: set[str], added: bool) -> None:
        super().__init__(config, None, 0, frozen, added)
        kind, options, _ = optimizer_of(config.optimizer)
        self.optimizer = kind(self.groups(), **options)


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """To nearest; what lies in the middle goes away from zero (docs/precision.md), where torch rounds to even."""
    near = value.to(dtype)
    away = (near.view(torch.int16) + 1).view(dtype)
    in_the_middle = (value.double() - near.double()).abs() == (away.double() - value.double()).abs()
    return torch.where(in_the_middle & (away.abs() > value.abs()), away, near)


class Sharded(Side):
    """Ours."""

    optimizer: ZeroRedundancyOptimizer

    def __init__(self, config: Configuration, ranks: Any, rank: int, frozen: set[str], added: bool, over: Any) -> None:
        self.over = over  # the process group or mesh that the state is sharded over
        self.device = config.device
        super().__init__(config, ranks, rank, frozen, added)
        if config.built == "first":
            self._build()
            with torch.no_grad():
                for param in self.model.parameters():
                    param.data = param.data.clone(memory_format=torch.preserve_format)
            self.move()
            self._connect()
        else:
            self.move()
            self.wrapped = self.model
            self._connect(self._build)
        if config.optimizer == "ScheduleFree":
            self.optimizer.train()

    def _build(self) -> None:
        config = self.config
        kind, options, _ = optimizer_of(config.optimizer)
        own: dict[str, Any] = {"shard": config.shard, "bucket_cap_mb": config.cap, "master_weights": config.masters}
        own["parameters_as_bucket_view"] = config.mode == "views"
        own["lazy_gather"] = config.mode in ("lazy", "sharded lazy")
        own["overlap_with_ddp"] = config.steps_in_backward
        if not config.uses_ddp:
            own["shard_gradients"] = True
            own["find_unused_parameters"] = config.find_unused
            own |= {
                "as it is": {},
                "one in flight": {"gradient_buckets_in_flight": 1},
                "six in flight": {"gradient_buckets_in_flight": 6},
                "at the end": {"overlap_backward": False},
                "float32": {"reduce_dtype": torch.float32},
            }[config.reducing]
        self.optimizer = ZeroRedundancyOptimizer(self.groups(), kind, self.over, **own, **options)

    def _connect(self, build: Callable[[], None] = lambda: None) -> None:
        """Wrap the model as the mode wants it, build the optimizer meanwhile, and register hooks."""
        config, self.wrapped = self.config, self.model
        if config.uses_ddp:
            self.wrap(config.find_unused)
        build()
        if config.mode == "under DDP":
            shardstep.shard_ddp_gradients(self.wrapped, self.optimizer)
        elif config.mode == "bare hook":
            self.wrapped.register_comm_hook(self.optimizer, shardstep.reduce_scatter_hook)
        elif config.mode in HOOKS:
            stepping, reducing = HOOKS[config.mode]
            self.wrapped.register_comm_hook(self.ranks, stepping(reducing, self.wrapped, self.optimizer))

    def rewrap(self) -> None:
        if self.config.uses_ddp:
            self.wrapped = self.model
            gc.collect()  # the earlier wrapper has to be gone
            self._connect()

    def rebuild(self, number: int) -> None:
        """Another optimizer over the same model. What is under way is thrown away with the old one."""
        optimizer = self.optimizer
        optimizer.consolidate_state_dict(to=0)
        box = [optimizer.state_dict() if optimizer.rank == 0 else None]
        dist.broadcast_object_list(box, group=self.ranks, group_src=0)
        if not self.config.steps_in_backward:
            self.backward(Backward(), number)
        self.optimizer = optimizer = self.scheduler = None  # type: ignore[assignment]
        self.wrapped = self.model
        gc.collect()
        for param in self.model.parameters():
            param.grad = None
        self._connect(self._build)
        self.optimizer.load_state_dict(box[0])
        if self.config.optimizer == "ScheduleFree":
            self.optimizer.train()

    def relocate(self, cleared: bool) -> None:
        """Other memory for the parameters. DDP cannot be moved: it is built anew. ``cleared``: gradients, elsewhere."""
        self.wrapped = self.model
        if self.device != "cpu":
            self.model.cpu()
            if cleared:
                self.zero_grad()
        else:
            with torch.no_grad():
                for param in self.model.parameters():
                    param.data = param.data.clone(memory_format=torch.preserve_format)
        self.model.place(self.device)
        self.rewrap()

    def add_group(self) -> None:
        self.added, group = True, self.late_group()
        for _, param in group["params"]:
            param.grad = None
        group["params"] = group["params"] if self.config.names else [tensor for _, tensor in group["params"]]
        self.optimizer.add_param_group(group)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with self.wrapped.no_sync() if self.config.uses_ddp else self.optimizer.no_sync():
            yield

    def clip(self, op: Clip) -> Tensor | None:
        if op.how == "ours":
            return self.optimizer.clip_grad_norm_(op.max_norm, op.norm_type)
        return super().clip(op)

    def clip_in_join(self, max_norm: float) -> None:
        self.optimizer.clip_grad_norm_(max_norm)

    def joinables(self) -> list[Any]:
        return [self.wrapped, self.optimizer] if self.config.uses_ddp else [self.optimizer]

    def gradient(self, param: Tensor) -> Tensor | None:
        return self.optimizer.full_grad(param)


def raises_expected(call: Callable[[], Any]) -> None:
    """Run what is told to fail; it is an error if it does not."""
    try:
        call()
    except Expected:
        return
    raise AssertionError("expected the exception of the program, but there was none")


def ranks_of(count: int, which: str, world: int) -> list[int]:
    """The processes that take part."""
    return list(range(world - count, world)) if which == "last" else list(range(count))


def share(value: Any, source: int) -> Any:
    """``value`` of process ``source`` on all processes."""
    box = [value]
    dist.broadcast_object_list(box, source)
    return box[0]
