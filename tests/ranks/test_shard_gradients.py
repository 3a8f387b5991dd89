"""ZeRO-2. Oracle: DDP and the plain optimizer, every rank with its own batch, float64.

DDP divides before it sums and sums in an order of its own; we sum in rank order and divide once. For one rank, and for
two (a + b == b + a, and halving is exact), both are the same bits, and bits are compared. For more ranks a mean differs
by a few units of 1e-16; twenty steps, also those of Adam that divide by the root of a mean of squares, leave that far
below 1e-9. A gradient that is lost, doubled or of one rank only moves these weights by 1e-4 and more: every weight
moves by that, which is asserted.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, RMSprop
from torch.utils.checkpoint import checkpoint

from shardstep import ShardedGradient, ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import assert_same, values_of
from tests.versions import Muon, needs_muon

STEPS = 20
KB, KB64 = 1 / 1024, 64 / 1024
LIMITS = {"timeout": 80, "pg_timeout": 20}


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def batch(rank: int, step: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return noise(*shape, seed=1000 * rank + step, dtype=dtype)


@contextmanager
def transport(name: str) -> Iterator[None]:
    if name == "sockets":
        os.environ["SHARDSTEP_SHARED_MEMORY"] = "0"
    try:
        yield
    finally:
        os.environ.pop("SHARDSTEP_SHARED_MEMORY", None)


def sharded(params: Any, optimizer_class: Any, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, optimizer_class, shard_gradients=True, **options)


# --- training, ours and theirs ------------------------------------------------------------------------------------


@dataclass
class Case:
    """A model and what is done with it in a step. ``loss`` calls the model once: it may be wrapped in DDP."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], Tensor]
    plain_loss: Callable[[nn.Module, int, int], Tensor] | None = None  # the same loss in a form that DDP can do
    ddp: dict[str, Any] = field(default_factory=dict)
    still: frozenset[str] = frozenset()  # parameters that are not trained
    close: float = 1e-9  # with more than two ranks
    exact: bool = True  # whether sums have one order: the bits of DDP with two ranks, and of every other cap

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        params = list(model.parameters())
        if len(params) < 2:
            return [{"params": params}]
        half = len(params) // 2
        return [{"params": params[:half], "weight_decay": 0.1}, {"params": params[half:], "lr": 0.004}]


def fit(model: Any, optimizers: list, loss: Callable, rank: int, steps: int = STEPS) -> list[list[Tensor]]:
    """The weights after each step."""
    weights = []
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(model, rank, step).backward()
        for optimizer in optimizers:
            optimizer.step()
        weights.append(values_of(model.parameters()))
    return weights


def assert_close(ours: list[list[Tensor]], theirs: list[list[Tensor]], claim: str, close: float) -> None:
    """The same weights after each step. ``close`` is an absolute difference; 0 compares bits."""
    for step, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
        for position, (one, other) in enumerate(zip(mine, expected, strict=True)):
            where = f"{claim}: after step {step}, parameter {position}"
            assert (one.dtype, one.shape) == (other.dtype, other.shape), where
            apart = (one - other).abs().max().item() if one.numel() else 0.0
            assert apart <= close, f"{where} is {apart} away"  # also if it is nan


def tolerance(world: int, close: float = 1e-9) -> float:
    return 0 if world <= 2 else close


def assert_all_moved(model: nn.Module, start: list[Tensor], still: frozenset[str] = frozenset()) -> None:
    for (name, param), before in zip(model.named_parameters(), start, strict=True):
        if name not in still and param.numel():
            assert (param.detach() - before).abs().max() > 1e-4, f"{name} was not trained: this test proves nothing"


def with_ddp(case: Case, rank: int, optimizer_class: Any, steps: int = STEPS, **options: Any) -> list[list[Tensor]]:
    model = case.make()
    start = values_of(model.parameters())
    ddp = DistributedDataParallel(model, **case.ddp)
    weights = fit(ddp, [optimizer_class(case.groups(model), **options)], case.plain_loss or case.loss, rank, steps)
    assert_all_moved(model, start, case.still)
    return weights


def with_ours(
    case: Case, rank: int, optimizer_class: Any, zero: dict[str, Any], steps: int = STEPS, **options: Any
) -> list[list[Tensor]]:
    model = case.make()
    optimizer = sharded(case.groups(model), optimizer_class, **zero, **options)
    weights = fit(model, [optimizer], case.loss, rank, steps)
    optimizer.check_replicas()
    return weights


# --- every optimizer, every cap, every number of ranks ------------------------------------------------------------

SIZES = (40, 130, 50, 3)  # weights of 41 KB, 51 KB and 1 KB in float64, biases of 1 KB and less


def make_mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(SIZES):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def mlp_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    return (model(batch(rank, step, 4, SIZES[0], dtype=dtype)) - 1).square().sum()


MLP = Case(make_mlp, mlp_loss)
ALL_CUTS = list(product(("element", "tensor"), (KB, KB64, 25)))
ELEMENT_WISE: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (AdamW, {"lr": 0.01}),
    "SGD": (SGD, {"lr": 0.001, "momentum": 0.9, "nesterov": True}),
    "RMSprop": (RMSprop, {"lr": 0.003, "centered": True, "momentum": 0.5}),
}


def element_wise_optimizers(rank: int, world: int) -> None:
    for name, (optimizer_class, options) in ELEMENT_WISE.items():
        theirs = with_ddp(MLP, rank, optimizer_class, **options)
        bits = None
        for shard, cap in ALL_CUTS if name == "AdamW" else ALL_CUTS[1::2]:
            claim = f"{name} {shard} cap {cap * 1024} KB"
            ours = with_ours(MLP, rank, optimizer_class, {"shard": shard, "bucket_cap_mb": cap}, **options)
            assert_close(ours, theirs, claim, tolerance(world))
            bits = bits or ours
            assert_same(ours, bits, f"{claim}: other bits than the first")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_twenty_steps_equal_ddp_for_element_wise_optimizers_at_every_cap_and_granularity(world):
    """Two groups with different options. All runs of an optimizer are the same bits."""
    run_ranks(element_wise_optimizers, world, **LIMITS)


def test_the_caps_of_these_tests_make_several_buckets():
    run_ranks(count_buckets, 2, **LIMITS)


def count_buckets(rank: int, world: int) -> None:
    counts = []
    for cap in (KB, KB64, 25):
        layout = sharded(make_mlp().parameters(), AdamW, bucket_cap_mb=cap).layout
        counts.append(len(layout.buckets))
    assert counts[0] >= 5
    assert counts[1] in (2, 3)
    assert counts[2] == 1


def muon_and_adamw(rank: int, world: int) -> None:
    """torch's Muon takes matrices only, so two optimizers share one backward, each with buckets of its own."""

    def halves(model: nn.Module) -> tuple[list, list]:
        params = list(model.parameters())
        return [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]

    model = make_mlp()
    start, (matrices, others) = values_of(model.parameters()), halves(model)
    optimizers: list = [Muon(matrices, lr=0.02, momentum=0.9), AdamW(others, lr=0.01)]
    theirs = fit(DistributedDataParallel(model), optimizers, mlp_loss, rank)
    assert_all_moved(model, start)
    for shard, cap in (("auto", KB), ("tensor", KB64), ("auto", 25)):
        model = make_mlp()
        matrices, others = halves(model)
        zero = {"shard": shard, "bucket_cap_mb": cap}
        optimizers = [
            sharded(matrices, Muon, **zero, lr=0.02, momentum=0.9),
            sharded(others, AdamW, **zero, lr=0.01),
        ]
        assert_close(fit(model, optimizers, mlp_loss, rank), theirs, f"Muon {zero}", tolerance(world))


def hybrid_groups(model: nn.Module, lr: float | None) -> list[dict[str, Any]]:
    params = list(model.parameters())
    second = {"params": [p for p in params if p.dim() != 2], "use_muon": False}
    return [
        {"params": [p for p in params if p.dim() == 2], "use_muon": True},
        second if lr is None else {**second, "lr": lr},
    ]


def hybrid_muon(rank: int, world: int, lr: float | None = 0.01) -> None:
    """One optimizer with Muon groups, which stay whole, and AdamW groups, which are cut."""
    from pytorch_optimizer import Muon as HybridMuon

    model = make_mlp()
    theirs = fit(DistributedDataParallel(model), [HybridMuon(hybrid_groups(model, lr), lr=0.02)], mlp_loss, rank)
    for cap in (KB, 25):
        model = make_mlp()
        optimizer = sharded(hybrid_groups(model, lr), HybridMuon, bucket_cap_mb=cap, lr=0.02)
        assert_close(fit(model, [optimizer], mlp_loss, rank), theirs, f"hybrid Muon, cap {cap}", tolerance(world))


def test_options_that_a_class_chooses_for_a_group_are_those_of_the_plain_optimizer():
    """pytorch_optimizer's Muon gives its AdamW groups a learning rate of their own, unless the group has one."""
    run_ranks(hybrid_muon, 2, lr=None, **LIMITS)


def schedule_free(rank: int, world: int) -> None:
    from schedulefree import AdamWScheduleFree

    def train(model: Any, optimizer: Any) -> list[list[Tensor]]:
        weights = []
        for start in (0, 10):
            optimizer.train()
            weights += fit(model, [optimizer], lambda m, r, s: mlp_loss(m, r, start + s), rank, 10)  # noqa: B023
            optimizer.eval()
            weights.append(values_of(model.parameters()))
        return weights

    model, options = make_mlp(), {"lr": 0.01, "warmup_steps": 3}
    theirs = train(DistributedDataParallel(model), AdamWScheduleFree(MLP.groups(model), **options))
    for shard, cap in ALL_CUTS[1::2]:
        model = make_mlp()
        optimizer = sharded(MLP.groups(model), AdamWScheduleFree, shard=shard, bucket_cap_mb=cap, **options)
        assert_close(train(model, optimizer), theirs, f"schedule-free {shard} {cap}", tolerance(world))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "train",
    [pytest.param(muon_and_adamw, marks=needs_muon), hybrid_muon, schedule_free],
    ids=lambda train: train.__name__,
)
def test_twenty_steps_equal_ddp_for_muon_and_schedule_free(train, world):
    run_ranks(train, world, **LIMITS)


# --- every kind of model ------------------------------------------------------------------------------------------


class MixedDtypes(nn.Module):
    """Buckets of two dtypes whose gradients come alternately."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(
            nn.Linear(9, 9).to(dtype) for dtype in (torch.float64, torch.float32, torch.float64, torch.float32)
        )
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float32))  # 0-dim

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.double() * self.scale


class Tied(nn.Module):
    """An embedding that is also the last layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(11, 6).double()
        self.middle = nn.Linear(6, 6).double()
        self.head = nn.Linear(6, 11, bias=False).double()
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


def tied_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    tokens = torch.randint(0, 11, (7,), generator=torch.Generator().manual_seed(100 * rank + step))
    return nn.functional.cross_entropy(model(tokens), tokens.roll(1)) * 10


class Stack(nn.Module):
    """Five layers. ``order`` says which are applied, one after the other: some twice, some not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layers = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(5))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for position in order:
            x = torch.tanh(self.layers[position](x))
        return x


def stack_loss(order: Callable[[int, int], tuple[int, ...]]) -> Callable[[nn.Module, int, int], Tensor]:
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return (model(batch(rank, step, 3, 8), order(rank, step)) - 0.5).square().sum()

    return loss


def used_twice(rank: int, step: int) -> tuple[int, ...]:
    return (0, 1, 2, 1, 3, 4, 0)


def unused_now_and_then(rank: int, step: int) -> tuple[int, ...]:
    """Layer step % 5 rests on all ranks: the first, the last, and whole buckets of small caps."""
    return tuple(position for position in range(5) if position != step % 5)


def unused_on_one_rank(rank: int, step: int) -> tuple[int, ...]:
    return tuple(position for position in range(5) if position != step % 5 or rank != step % 3)


def used_on_one_rank(rank: int, step: int) -> tuple[int, ...]:
    """Layer 2 is used by one rank, layer 4 by another, in another order than that of the others."""
    return (0, 1, *((2,) if rank == step % 2 else ()), 3, *((4,) if rank == 1 - step % 2 else ()))


def another_order_on_every_rank(rank: int, step: int) -> tuple[int, ...]:
    return tuple(random.Random(100 * rank + step).sample(range(5), k=5))


def one_layer_never(rank: int, step: int) -> tuple[int, ...]:
    return (0, 1, 3, 4)


class Checkpointed(nn.Module):
    """Layers with activation checkpointing in several arrangements; ``None`` computes the same without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(8, 8).double()
        self.a = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
        self.b = nn.Sequential(nn.Tanh(), nn.Linear(8, 8)).double()
        self.last = nn.Linear(8, 8).double()

    def forward(self, x: Tensor, segments: str, reentrant: bool | None) -> Tensor:
        def run(function: Callable, x: Tensor) -> Tensor:
            return function(x) if reentrant is None else checkpoint(function, x, use_reentrant=reentrant)

        if segments == "middle":
            return self.last(run(self.b, run(self.a, self.first(x))))
        if segments == "all":
            return run(self.last, run(self.b, run(self.a, run(self.first, x))))
        if segments == "first only":
            return self.last(self.b(self.a(run(self.first, x))))
        if segments == "shared":  # between two segments, and with what is outside of them
            return self.last(self.first(run(self.a, run(self.b, run(self.a, self.first(x))))))
        if segments == "all shared":
            return run(self.last, run(self.first, run(self.a, run(self.b, run(self.a, run(self.first, x))))))
        assert segments == "nested"
        return self.last(run(lambda y: run(self.b, run(self.a, y)), self.first(x)))


def checkpointed(segments: str, reentrant: bool) -> Case:
    def loss(reentrant: bool | None) -> Callable[[nn.Module, int, int], Tensor]:
        def evaluate(model: nn.Module, rank: int, step: int) -> Tensor:
            x = batch(rank, step, 3, 8).requires_grad_()  # or a re-entrant first segment has no backward
            return (model(x, segments, reentrant) - 0.5).square().sum()

        return evaluate

    # A re-entrant segment hands over what it has of a shared parameter by itself: the parts are added up elsewhere.
    return Case(Checkpointed, loss(reentrant), plain_loss=loss(None), exact=not (reentrant and "shared" in segments))


class OneWeight(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(noise(*shape, seed=8))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.sin().sum() * x


def scalar_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step, 1)).sum() + 1


class WithEmpty(nn.Module):
    """A parameter without elements between others, and a layer of zero outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.first = nn.Linear(8, 5).double()
        self.nothing = nn.Parameter(torch.zeros(0, 5, dtype=torch.float64))
        self.last = nn.Linear(5, 3).double()
        self.nobody = nn.Parameter(torch.zeros(0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(torch.cat([x, self.nothing + 0])).square().sum() + self.nobody.sum()


def vector_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step, 4, 8)).sum()


class Pictures(nn.Module):
    """Weights in channels_last, and a transposed one: the memory of a piece is no range of elements."""

    def __init__(self, channels_last: bool) -> None:
        super().__init__()
        torch.manual_seed(10)
        self.one = nn.Conv2d(3, 5, 3).double()
        self.two = nn.Conv2d(5, 4, 2).double()
        self.mix = nn.Parameter(torch.randn(4, 6, dtype=torch.float64).t())
        if channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return (self.mix @ self.two(torch.tanh(self.one(x))).flatten(2)).square().mean()


def pictures_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    x = batch(rank, step, 2, 3, 5, 5)
    return 10 * model(x.to(memory_format=torch.channels_last) if step % 2 else x)


class Penalized(nn.Module):
    """Double backward: a loss of a gradient. And a hook of the user's, which must see and change the local gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1, bias=False)).double()
        self.net[0].weight.register_hook(lambda gradient: gradient * 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square() + self.net(x).square().flatten()


UNUSED = {"ddp": {"find_unused_parameters": True}}
CASES = {
    # float32 rounds at 6e-8, and Adam's first steps are as long for a small gradient as for a large one
    "mixed dtypes": Case(MixedDtypes, lambda m, r, s: (m(batch(r, s, 3, 9)) - 1).square().sum(), close=1e-5),
    "tied weights": Case(Tied, tied_loss),
    "used twice": Case(Stack, stack_loss(used_twice)),
    "another order on every rank": Case(Stack, stack_loss(another_order_on_every_rank)),
    "unused now and then": Case(Stack, stack_loss(unused_now_and_then), **UNUSED),
    "unused on one rank": Case(Stack, stack_loss(unused_on_one_rank), **UNUSED),
    "used on one rank": Case(Stack, stack_loss(used_on_one_rank), **UNUSED),
    "never used": Case(
        Stack, stack_loss(one_layer_never), **UNUSED, still=frozenset({"layers.2.weight", "layers.2.bias"})
    ),
    "one tiny parameter": Case(lambda: OneWeight(1), scalar_loss),
    "one parameter": Case(lambda: OneWeight(37, 5), scalar_loss),
    "zero-element parameters": Case(WithEmpty, vector_loss),
    "channels_last": Case(lambda: Pictures(True), pictures_loss),
    "channels_last gradients": Case(lambda: Pictures(False), pictures_loss),
    "double backward and a tensor hook": Case(Penalized, vector_loss),
    "checkpointing": checkpointed("middle", False),
    "checkpointing all": checkpointed("all", False),
    "checkpointing shared": checkpointed("shared", False),
    "re-entrant": checkpointed("middle", True),
    "re-entrant all": checkpointed("all", True),
    "re-entrant first only": checkpointed("first only", True),
    "re-entrant shared": checkpointed("shared", True),
    "re-entrant all shared": checkpointed("all shared", True),
    "re-entrant nested": checkpointed("nested", True),
}
# Together these meet every granularity with both caps and both transports.
VARIANTS = [
    ("element", KB, "sockets"),
    ("element", 25, "shared memory"),
    ("tensor", KB, "shared memory"),
    ("tensor", 25, "sockets"),
]
TRIED = {1: VARIANTS[:1], 2: VARIANTS[1:2], 3: VARIANTS[::3], 4: VARIANTS[2:3]}


def kinds_of_models(rank: int, world: int, names: list[str]) -> None:
    failures = []
    for name in names:
        case, bits = CASES[name], None
        theirs = with_ddp(case, rank, AdamW, lr=0.01)
        for shard, cap, way in TRIED[world]:
            with transport(way):
                ours = with_ours(case, rank, AdamW, {"shard": shard, "bucket_cap_mb": cap}, lr=0.01)
            bits = bits or ours
            try:
                claim = f"{name}, {shard}, cap {cap * 1024} KB, {way}"
                assert_close(ours, theirs, claim, tolerance(world, case.close) if case.exact else case.close)
                if case.exact:
                    assert_close(ours, bits, f"{claim}: other bits than {TRIED[world][0]}", 0)
            except AssertionError as failure:  # nothing collective was left out: the others are of interest too
                failures.append(str(failure))
    assert not failures, "\n".join(failures)


FAMILIES = {
    "usage": [name for name in CASES if "used" in name or name in ("tied weights", "another order on every rank")],
    "checkpointing": [name for name in CASES if "checkpointing" in name],
    "re-entrant checkpointing": ["re-entrant all shared", "re-entrant nested"],
}
MORE = "more re-entrant checkpointing"
FAMILIES[MORE] = [name for name in CASES if "re-entrant" in name and name not in FAMILIES["re-entrant checkpointing"]]
FAMILIES["shapes and dtypes"] = [name for name in CASES if not any(name in family for family in FAMILIES.values())]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.extended] * ("checkpointing" in name or name == MORE)) for name in FAMILIES],
)
def test_twenty_steps_equal_ddp_for_every_kind_of_model(family, world):
    run_ranks(kinds_of_models, world, FAMILIES[family], **LIMITS)


# --- compiled models ----------------------------------------------------------------------------------------------


def compiled(rank: int, world: int, backend: str) -> None:
    """The backward of a compiled model is one node that finishes all gradients at once."""
    torch._inductor.config.compile_threads = 1
    theirs = with_ddp(MLP, rank, AdamW, lr=0.01)
    for shard, cap in (("element", KB), ("tensor", 25)):
        model = make_mlp()
        optimizer = sharded(MLP.groups(model), AdamW, shard=shard, bucket_cap_mb=cap, lr=0.01)
        ours = fit(torch.compile(model, backend=backend), [optimizer], mlp_loss, rank)
        assert_close(ours, theirs, f"{backend}, {shard}", 1e-9)


def compiled_while_there_are_gradients(rank: int, world: int, backend: str) -> None:
    """Dynamo looks at ``param.grad`` when it compiles. Here it is a sharded gradient, and it adds up."""

    def train(model: nn.Module, eager: Any, second: Any, optimizer: Any) -> list[list[Tensor]]:
        weights = []
        for step in range(4):
            optimizer.zero_grad()
            mlp_loss(eager, rank, step).backward()
            mlp_loss(second, rank, 100 + step).backward()
            mlp_loss(second, rank, 200 + step).backward()
            optimizer.step()
            weights.append(values_of(model.parameters()))
        return weights

    model = make_mlp()
    ddp = DistributedDataParallel(model)
    theirs = train(model, ddp, ddp, AdamW(model.parameters(), lr=0.01))
    model = make_mlp()
    optimizer = sharded(model.parameters(), AdamW, lr=0.01)
    ours = train(model, model, torch.compile(model, backend=backend), optimizer)
    assert_close(ours, theirs, backend, 1e-9)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.again)])
def test_a_compiled_model_trains_as_the_plain_one_in_ddp(backend):
    run_ranks(compiled, 2, backend, timeout=120, pg_timeout=60)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_may_be_compiled_while_there_are_sharded_gradients(backend):
    run_ranks(compiled_while_there_are_gradients, 2, backend, timeout=120, pg_timeout=60)


# --- things that happen to parameters -----------------------------------------------------------------------------


def start_apart(rank: int, world: int) -> None:
    """DDP gives all ranks rank 0's parameters; so do we, also those of a group that is added later."""
    for shard in ("element", "tensor"):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3)).double()
        torch.manual_seed(0)
        expected = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3)).double()
        optimizer = sharded(model[0].parameters(), AdamW, shard=shard, lr=0.01)
        assert_same(values_of(model[0].parameters()), values_of(expected[0].parameters()), "construction")
        optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.02})
        assert_same(values_of(model[1].parameters()), values_of(expected[1].parameters()), "add_param_group")
        plain = AdamW([{"params": expected[0].parameters()}, {"params": expected[1].parameters(), "lr": 0.02}], lr=0.01)
        theirs = fit(DistributedDataParallel(expected), [plain], vector_loss, rank)
        assert_close(fit(model, [optimizer], vector_loss, rank), theirs, shard, tolerance(world))
    torch.manual_seed(rank)
    model = nn.Linear(8, 5)
    before = values_of(model.parameters())
    sharded(model.parameters(), AdamW, broadcast_parameters=False)
    assert_same(values_of(model.parameters()), before, "broadcast_parameters=False")


@pytest.mark.parametrize("world", [2, 4])
def test_parameters_that_start_different_become_those_of_rank_0(world):
    run_ranks(start_apart, world, **LIMITS)


def freeze_and_unfreeze(rank: int, world: int) -> None:
    """DDP cannot follow a change of requires_grad: the oracle's wrapper is made anew each time."""
    phases: list[set[int]] = [{0, 3}, {3}, set(), {1, 2, 4}, {0, 1}, set()]  # the layers that rest, four steps each

    def train(model: nn.Module, optimizer: Any, wrap: Callable) -> list[list[Tensor]]:
        weights = []
        for number, resting in enumerate(phases):
            for position, layer in enumerate(model.layers):
                layer.requires_grad_(position not in resting)
            loss = stack_loss(lambda rank, step: (0, 1, 2, 3, 4))
            weights += fit(wrap(model), [optimizer], lambda m, r, s: loss(m, r, 4 * number + s), rank, 4)  # noqa: B023
        return weights

    for shard, cap, way in VARIANTS[::3]:
        model = Stack()
        model.layers[0].requires_grad_(False)  # frozen from the start
        groups = MLP.groups(model)
        theirs = train(model, AdamW(groups, lr=0.01), DistributedDataParallel)
        model = Stack()
        model.layers[0].requires_grad_(False)
        with transport(way):
            optimizer = sharded(MLP.groups(model), AdamW, shard=shard, bucket_cap_mb=cap, lr=0.01)
        ours = train(model, optimizer, lambda model: model)
        assert_close(ours, theirs, f"{shard} {cap} {way}", tolerance(world))


def add_groups_later(rank: int, world: int) -> None:
    """Until their group is added, the parameters of a layer are nobody's: their gradients must not be touched."""

    def train(model: nn.Module, optimizer: Any, wrapped: Any) -> list[list[Tensor]]:
        loss = stack_loss(used_twice)
        weights = fit(wrapped, [optimizer], loss, rank, 5)
        for layer in model.layers[:2]:
            assert all(type(param.grad) is Tensor for param in layer.parameters())
        for position in (1, 0):
            model.layers[position].zero_grad()
            optimizer.add_param_group({"params": model.layers[position].parameters(), "lr": 0.02 + position})
            weights += fit(wrapped, [optimizer], lambda m, r, s: loss(m, r, 50 * (position + 1) + s), rank, 5)  # noqa: B023
            model.zero_grad()
        return weights

    for shard, cap, way in VARIANTS[::3]:
        model = Stack()
        plain = SGD(model.layers[2:].parameters(), lr=0.01, momentum=0.9)
        theirs = train(model, plain, DistributedDataParallel(model))
        model = Stack()
        with transport(way):
            optimizer = sharded(
                model.layers[2:].parameters(), SGD, shard=shard, bucket_cap_mb=cap, lr=0.01, momentum=0.9
            )
            ours = train(model, optimizer, model)
        assert_close(ours, theirs, f"{shard} {cap} {way}", tolerance(world))


def two_optimizers(rank: int, world: int) -> None:
    """Halves of a model that are stepped in turns; each backward reaches both."""

    def train(model: nn.Module, optimizers: list, wrapped: Any) -> list[list[Tensor]]:
        weights = []
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            mlp_loss(wrapped, rank, step).backward()
            for position, optimizer in enumerate(optimizers):
                if step % 3 != position:
                    optimizer.step()
            weights.append(values_of(model.parameters()))
        return weights

    model = make_mlp()
    plain: list = [SGD(model[:2].parameters(), lr=0.001, momentum=0.9), AdamW(model[2:].parameters(), lr=0.01)]
    theirs = train(model, plain, DistributedDataParallel(model))
    for shard, cap, way in VARIANTS[::3]:
        model = make_mlp()
        zero = {"shard": shard, "bucket_cap_mb": cap}
        with transport(way):
            ours = [
                sharded(model[:2].parameters(), SGD, **zero, lr=0.001, momentum=0.9),
                sharded(model[2:].parameters(), AdamW, **zero, lr=0.01),
            ]
        assert_close(train(model, ours, model), theirs, f"{zero} {way}", tolerance(world))


def interleaved_halves(rank: int, world: int) -> None:
    """Every second layer belongs to the other optimizer, and ranks send the buckets of both at different speeds."""
    delays = random.Random(rank)
    theirs_model, model = Stack(), Stack()
    for layer in model.layers:
        layer.weight.register_hook(lambda gradient: time.sleep(delays.choice([0, 0.001, 0.003])))
    loss = stack_loss(lambda rank, step: (0, 1, 2, 3, 4))
    halves = [
        [p for layer in m.layers[start::2] for p in layer.parameters()]
        for m in (theirs_model, model)
        for start in (0, 1)
    ]
    theirs = fit(DistributedDataParallel(theirs_model), [AdamW(half, lr=0.01) for half in halves[:2]], loss, rank)
    optimizers = [sharded(half, AdamW, bucket_cap_mb=KB, lr=0.01) for half in halves[2:]]
    assert_close(fit(model, optimizers, loss, rank), theirs, "interleaved", tolerance(world))


def subgroup(rank: int, world: int) -> None:
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        model = make_mlp()
        theirs = fit(
            DistributedDataParallel(model, process_group=group), [AdamW(model.parameters(), lr=0.01)], mlp_loss, rank
        )
        model = make_mlp()
        ours = fit(model, [sharded(model.parameters(), AdamW, process_group=group, lr=0.01)], mlp_loss, rank)
        assert_close(ours, theirs, "ranks 1 and 3", 0)


def owns_nothing(rank: int, world: int) -> None:
    """One parameter of one element, four ranks: three own nothing and still take part."""
    case = CASES["one tiny parameter"]
    model = case.make()
    optimizer = sharded(model.parameters(), AdamW, lr=0.01)
    owned = [optimizer.layout.owned_elements(one) for one in range(world)]
    assert sorted(owned) == [0, 0, 0, 1]
    scalar_loss(model, rank, 0).backward()
    assert isinstance(model.weight.grad, ShardedGradient)
    expected = sum(batch(one, 0, 1).item() for one in range(world)) / world * case.make().weight.cos()
    torch.testing.assert_close(optimizer.full_grad(model.weight), expected.detach(), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("work", "world"),
    [
        (freeze_and_unfreeze, 3),
        (add_groups_later, 3),
        (two_optimizers, 3),
        (interleaved_halves, 4),
        (subgroup, 4),
        (owns_nothing, 4),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_parameters_are_trained_as_in_ddp_whatever_happens_to_them(work, world):
    run_ranks(work, world, **LIMITS)
