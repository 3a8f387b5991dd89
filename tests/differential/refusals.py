"""What is not allowed together: one table. Wrong use is an outcome like any other.

A row is a configuration, something to do in it, the error that it must end with on every rank, and words that the
message must have. Many rows run one after the other in the same processes, between steps of a training that is
compared with DDP (``trial.py``): what a row must not change would show there.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import LBFGS, SGD, Adafactor, Adam, AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as recompute

import shardstep
from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.differential import leftovers
from tests.differential.configurations import Configuration, Fails
from tests.differential.models import Expected, Net, batch
from tests.differential.programs import AddGroup, Backward, Program, Step, ZeroGrad
from tests.differential.trial import Trial, difference

ODD = 1  # the rank that does something else than the others, where one does
SOON = 15.0  # seconds: below the time-out of any process group, and enough for a machine that is busy
BRIEF = 3.0  # seconds: the time-out of a process group that is made to be waited for
START: Program = (Backward(), Step(), ZeroGrad())
GO_ON: Program = (ZeroGrad(), Backward(), Step(), ZeroGrad())


# Of two ranks two groups run at a time; three are where "ranks 0, 2" can be told.
PAIR = Configuration(names=True, watch="weights")
THREE = replace(PAIR, ranks=3)
SHARDED, UNDER = replace(PAIR, mode="sharded"), replace(PAIR, mode="under DDP")


class Odd(NamedTuple):
    """What rank ``ODD`` has, and what the others have."""

    here: Any
    elsewhere: Any


def told(error: Any) -> Odd:
    """Rank ``ODD`` raises it, and the others are told: their message has its number, and the same words."""
    return Odd(error, RuntimeError)


EITHER = (ValueError, RuntimeError)  # only the ranks that own a piece see it; they tell the others
MISSED = Odd(None, RuntimeError)  # rank ODD does not come, and the others say so
# What becomes of the training of the trial: the row has an optimizer of its own, or the training goes on and is
# compared, or every further call is refused, or nothing is promised.
BESIDE, TRAINS, REFUSES, OVER = "beside", "trains", "refuses", "over"


@dataclass(frozen=True)
class Row:
    """``words`` are parts of the message, with | between them. ``changes``: the issue that changes it on purpose."""

    what: str
    do: Callable[[Trial], Any]
    error: Any  # a class, None for nothing, or an Odd of them
    words: Any  # or an Odd
    config: Configuration = THREE
    after: str = BESIDE
    changes: int | None = None
    waits: bool = False  # for a rank that does not come: there is a group with a short time-out, ``t.brief``


def mine(t: Trial, value: Any) -> Any:
    return (value.here if t.rank == ODD else value.elsewhere) if isinstance(value, Odd) else value


def operation(function: Callable[..., Any]) -> Callable[..., Callable[[Trial], Any]]:
    """``function(t, ...)`` as something to do: give it the other arguments, of which each may be an ``Odd``."""

    def with_arguments(*args: Any, **options: Any) -> Callable[[Trial], Any]:
        def do(t: Trial) -> Any:
            chosen = {key: mine(t, value) for key, value in options.items()}
            return function(t, *(mine(t, value) for value in args), **chosen)

        return do

    return with_arguments


# --- how a row is checked -----------------------------------------------------------------------------------------


def outcome(call: Callable[[], Any]) -> tuple[type[BaseException] | None, str]:
    """Class and text of what it raises. Its frames are cleared: an optimizer keeps what another rank has told it."""
    try:
        call()
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        return type(error), str(error)
    return None, ""


def check(row: Row, t: Trial) -> None:
    """Run a row on this rank. AssertionError if it ends in another way than the table says."""
    started = time.monotonic()
    found, text = outcome(lambda: row.do(t))
    took = time.monotonic() - started
    expected, words = mine(t, row.error), mine(t, row.words).split("|")
    if isinstance(row.error, Odd) and t.rank != ODD and row.error.elsewhere is not None:
        words = [*words, f"rank {ODD}"]
    shown = f"{row.what!r} ended with {found and found.__name__}: {text} (rank {t.rank})"
    if expected is None:
        assert found is None, f"expected nothing to be raised, but {shown}"
    else:
        assert found is not None, f"expected {expected}, but {row.what!r} raised nothing (rank {t.rank})"
        assert issubclass(found, expected), f"expected {expected}, but {shown}"
        missing = [word for word in words if word not in text]
        assert not missing, f"expected the words {missing}, but {shown}"
    assert took < SOON, f"{row.what!r} took {took:.1f} s (rank {t.rank})"
    if row.after == TRAINS:
        for op in GO_ON:
            t._do(op)
    elif row.after == REFUSES:
        further = () if t.config.steps_in_backward else (t.ours.step,)  # (DDP goes no further after an error in a hook)
        for call in (*further, t.ours.optimizer.check_replicas, t.ours.optimizer.consolidate_state_dict):
            found, text = outcome(call)
            assert found is not None, f"after {row.what!r} {call.__name__} raised nothing (rank {t.rank})"
            assert AGAIN in text, f"after {row.what!r}: {call.__name__} ended with {text} (rank {t.rank})"


AGAIN = "Start the processes again, from a checkpoint"


def run(config: Configuration, names: Iterable[str], folder: Path) -> Counter[str]:
    """Rows of one configuration. Collective over all processes; of two ranks there are two groups at a time."""
    before, counts = leftovers.Before(), Counter[str]()
    groups = ("first", "last") if config.ranks == 2 and not config.mesh else (config.group,)
    queue, trials = [TABLE[name] for name in names], list[Trial]()
    for first in range(0, len(queue), len(groups)):
        rows = queue[first : first + len(groups)]
        if not trials:
            trials = [Trial(replace(config, group=group), folder / f"{first} {group}") for group in groups]
            for t in trials:
                t.brief = dist.new_group(t.members, timeout=timedelta(seconds=BRIEF)) if rows[0].waits else None
                t.run(START)
        for row, t in zip(rows, trials, strict=False):
            counts[row.what] += 1
            if t.is_member:
                check(row, t)
        if any(row.after in (REFUSES, OVER) for row in rows):
            trials = []
        dist.barrier()
    for t in trials:
        t.run(GO_ON)
    t = trials = None  # type: ignore[assignment]  # (and with them everything that a row has kept)
    if not any(row.after in (REFUSES, OVER) for row in queue):
        _check_leftovers(before)
    return counts


def _check_leftovers(before: leftovers.Before, patience: float = 5.0) -> None:
    """A thread may hold something for a moment."""
    end = time.monotonic() + patience
    while True:
        try:
            return before.check()
        except AssertionError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


# --- small things to do wrong something with ----------------------------------------------------------------------


def weight(*shape: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape or (3, 2), dtype=dtype))


def few(shapes: Iterable[tuple[int, ...]] = ((7, 5), (5,), (3, 4, 2), (11,))) -> list[tuple[str, nn.Parameter]]:
    return [(f"layer{number}", weight(*shape)) for number, shape in enumerate(shapes)]


def half(*dtypes: str) -> Callable[[], list[nn.Parameter]]:
    return lambda: [weight(dtype=getattr(torch, dtype)) for dtype in dtypes or ["bfloat16"]]


def net() -> Net:
    return Net("plain", torch.float64, seed=10)


def wrap(t: Trial, module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module or net(), process_group=t.ranks, bucket_cap_mb=0.0005, **options)


def zero(t: Trial, params: Any, kind: Any = SGD, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, kind, t.ours.over, lr=0.1, **options)


def backward(t: Trial, model: nn.Module) -> None:
    place = next(model.parameters()).device
    model(batch(0, t.rank, torch.float64).to(place)).square().mean().backward()


def iterate(t: Trial, model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    backward(t, model)
    optimizer.step()


@operation
def as_plain(t: Trial, connect: Any, way: Any = iterate, make: Any = net, expected: Any = net) -> Any:
    """``connect`` wraps a model and builds its optimizer. It ends where DDP with the plain optimizer does."""
    model, other = make().to(t.config.device), expected()
    connected = connect(t, model)
    both = connected, (wrap(t, other, find_unused_parameters=True), SGD(other.parameters(), lr=0.1))
    for turn in range(3):
        for wrapped, optimizer in both:
            way(t, wrapped, optimizer, *(() if way is iterate else (turn,)))
    t.exact = False
    t._same("the model", model.state_dict(), other.state_dict())


def sharded(t: Trial, model: nn.Module) -> tuple[Any, Any]:
    return model, zero(t, model.named_parameters(), shard_gradients=True, bucket_cap_mb=0.0005)


def set_ones(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        param.grad = torch.ones_like(param)


class Lookup(nn.Module):
    """Its gradient is sparse, or dense if it is asked for with a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=True)

    def forward(self, dense: bool = False) -> Tensor:
        return (torch.eye(8) @ self.table.weight if dense else self.table(torch.tensor([1, 3]))).sum()


class NeedsLr(SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)


class Fussy(SGD):
    def __init__(self, params: Any, lr: float = 0.1, fails: bool = False) -> None:
        super().__init__(params, lr=lr)
        if fails:
            raise ValueError("too fussy")


class Habit(SGD):
    """SGD that does something else first."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, lr=lr, momentum=momentum)

    def step(self, closure: Any = None) -> Any:
        self.first([param for group in self.param_groups for param in group["params"] if param.grad is not None])
        return super().step(closure)

    def first(self, params: list[Tensor]) -> None:
        pass


class Talks(Habit):
    def first(self, params: list[Tensor]) -> None:
        dist.all_reduce(params[0].grad)


class Couples(Habit):
    def first(self, params: list[Tensor]) -> None:
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        torch._foreach_mul_([param.grad for param in params], float((0.1 / norm).clamp(max=1)))


class Projects(Habit):
    """Acts on gradients that are orthogonal to their parameter."""

    def first(self, params: list[Tensor]) -> None:
        for param in params:
            if (param.grad * param).sum().abs() < 1e-3 * param.grad.norm() * param.norm():
                param.grad.sub_(param.grad.mean())


class Blocks(Habit):
    """Rounds in blocks, where a size is a multiple of them."""

    def first(self, params: list[Tensor]) -> None:
        for param in params:
            if param.numel() and param.numel() % 4096 == 0:
                blocks = param.grad.view(-1, 2048)
                scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
                blocks.copy_((blocks / scale).round() * scale)


class Random(Habit):
    def first(self, params: list[Tensor]) -> None:
        for param in params:
            param.grad.add_(torch.randn_like(param.grad))


class Keeps(Habit):
    def first(self, params: list[Tensor]) -> None:
        for param in params:
            self.state[param]["helper"] = object()


class HasInner(Habit):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base_optimizer = AdamW(self.param_groups)


class NoGroups(Habit):
    def __init__(self, params: Any) -> None:
        super().__init__([param.detach().requires_grad_() for param in params])


class Wants(Habit):
    def step(self, closure: Any = None, *, factor: float) -> Any:  # type: ignore[override]
        return super().step(closure)


class Around(torch.optim.Optimizer):
    """A wrapper that nobody knows."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults


# --- building -----------------------------------------------------------------------------------------------------


@operation
def build(t: Trial, params: Any = few, kind: Any = SGD, over: Any = None, **options: Any) -> Any:
    """Build an optimizer over what ``params`` makes."""
    return ZeroRedundancyOptimizer(params(), kind, t.ours.over if over is None else over(t), **options)


def sparse() -> Tensor:
    return torch.ones(3, 2).to_sparse()


def shared() -> list[nn.Parameter]:
    first, second = weight(10), weight(10)
    second.data = first.data
    return [first, second]


DENSE = "only supports using the same dense type"
BUILDING = [
    # What is wrong with params: as torch.optim says it, where torch.optim does.
    *(Row(f"params: {what}", build(params, Adam), error, words)
        for what, params, error, words in (
            ("a tensor", weight, TypeError, "params|torch.DoubleTensor|[tensor]"),
            ("a plain tensor", lambda: torch.ones(2), TypeError, "params|torch.FloatTensor"),
            ("a number", lambda: 3, TypeError, "params|int|model.parameters()"),
            ("None", lambda: None, TypeError, "params|NoneType"),
            ("a module", net, TypeError, "params|Net|model.parameters()"),
            ("an empty list", list, ValueError, "empty parameter list"),
            ("an empty generator", lambda: iter(()), ValueError, "empty parameter list"),
            ("tensors and dicts", lambda: [weight(), {"params": weight()}], TypeError, "params|dict"),
            ("tensors and strings", lambda: [weight(), "w"], TypeError, "params|str"),
            ("a string", lambda: "weights", TypeError, "params|str"),
            ("tensors and pairs", lambda: [weight(), ("w", weight())], TypeError, "params|tuple"),
            ("pairs the wrong way", lambda: [(weight(), "w")], TypeError, "params|tuple"),
            ("a dict without params", lambda: [{"lr": 0.1}], ValueError, "'params'|lr"),
            ("a set in a group", lambda: [{"params": {weight()}}], TypeError, "set|list"),
            ("a set", lambda: {weight()}, TypeError, "set|list"),
            ("strings in a group", lambda: [{"params": ["w"]}], TypeError, "str"),
            ("a sparse tensor first", lambda: [sparse(), weight()], ValueError, DENSE),
            ("a sparse tensor later", lambda: [weight(), sparse()], ValueError, DENSE),
            ("a sparse tensor in a group", lambda: [{"params": sparse()}], ValueError, DENSE),
            ("a sparse tensor with a name", lambda: [("w", sparse())], ValueError, DENSE),
            ("a non-leaf", lambda: [weight() * 2], ValueError, "non-leaf"),
            ("named and unnamed groups", lambda: [{"params": few()}, {"params": [weight()]}], ValueError, "names"),
            ("twice in two groups", lambda: [{"params": one} for one in [weight()] * 2], ValueError, "more than one"),
            ("over the same memory", shared, ValueError, "share memory|0 and 1|one Parameter in both"),
        )),
    # What is wrong with the class.
    Row("a required option is missing", build(kind=NeedsLr), TypeError, "lr"),
    Row("an unknown option", build(no_such_option=1), TypeError, "no_such_option"),
    Row("a bad option", build(lr=-1.0), ValueError, "Invalid learning rate"),
    Row("a class of something else", build(kind=nn.Linear), ValueError, "optimizer_class|Linear"),
    Row("no class", build(kind=3), TypeError, "optimizer_class|3|torch.optim"),
    Row("an instance", lambda t: build(kind=SGD([weight()]))(t), TypeError, "optimizer_class|torch.optim"),
    Row("a factory of something else", build(kind=lambda params: 3), ValueError, "optimizer_class|int"),
    Row("LBFGS", build(kind=LBFGS), ValueError, "LBFGS cannot be sharded"),
    *(Row(f"{kind.__name__}, {shard}", build(kind=kind, shard=shard), ValueError, f"{kind.__name__}|{words}")
        for kind, words in (
            (Talks, "sends something"),
            (HasInner, "AdamW of its own inside (.base_optimizer)"),
            (NoGroups, "groups"),
            (Couples, "others"),
            (Keeps, "'helper' cannot be carried"),
        )
        for shard in ("auto", "tensor")
    ),
    Row("Random", build(kind=Random), ValueError, "Random cannot be sharded|random numbers|shard='tensor'"),
    Row("Adafactor cut", build(kind=Adafactor, shard="element"), ValueError, "shard='element'|Adafactor|'tensor'"),
    *(Row(f"{kind.__name__} cut", build(kind=kind, shard="element"), ValueError, f"shard='element'|{kind.__name__}")
      for kind in (Projects, Blocks)),
    Row("Wants cut", build(kind=Wants, shard="element"), ValueError, "shard='element' expects|its step wants an arg"),
    # What is wrong with our own arguments.
    *(Row(f"{name}={value!r}", build(**{name: value}), ValueError, f"{name}|{words}")
        for name, value, words in (
            ("shard", "rows", "'rows'|auto"),
            ("shard", None, "None|auto"),
            ("shard", ["auto"], "auto"),
            ("bucket_cap_mb", 0, "0|25"),
            ("bucket_cap_mb", -1.5, "-1.5"),
            ("bucket_cap_mb", "25", "'25'"),
            ("bucket_cap_mb", float("nan"), "nan"),
            ("bucket_cap_mb", float("inf"), "inf"),
            ("reduce_dtype", torch.float32, "shard_gradients=True"),
            ("gradient_buckets_in_flight", 4, "shard_gradients=True"),
            ("overlap_backward", False, "shard_gradients=True"),
            ("find_unused_parameters", True, "shard_gradients=True"),
            ("broadcast_parameters", False, "shard_gradients=True"),
            ("rounding_seed", 1, "'stochastic'|nothing else rounds at random"),
        )),
    *(Row(f"{name}={value!r} with shard_gradients", build(shard_gradients=True, **{name: value}), ValueError, words)
        for name, value, words in (
            ("overlap_with_ddp", True, "shard_gradients=True and overlap_with_ddp=True exclude|Drop one"),
            ("reduce_dtype", torch.int32, "reduce_dtype|torch.int32"),
            ("reduce_dtype", torch.bool, "reduce_dtype|torch.bool"),
            ("reduce_dtype", torch.complex64, "reduce_dtype|torch.complex64"),
            ("reduce_dtype", "float32", "reduce_dtype|float32"),
            ("reduce_dtype", float, "reduce_dtype|float"),
            ("gradient_buckets_in_flight", 0, "gradient_buckets_in_flight|0"),
            ("gradient_buckets_in_flight", -1, "gradient_buckets_in_flight|-1"),
            ("gradient_buckets_in_flight", 1.5, "gradient_buckets_in_flight|1.5"),
            ("gradient_buckets_in_flight", "2", "gradient_buckets_in_flight|'2'"),
        )),
    *(Row(f"{name} that is no bool", build(**{name: value}), TypeError, f"{name} expects a bool but got {value!r}")
        for name, value in (
            ("shard_gradients", "yes"),
            ("overlap_with_ddp", 1),
            ("lazy_gather", None),
            ("parameters_as_bucket_view", "no"),
            ("broadcast_parameters", 0),
            ("overlap_backward", 1),
            ("find_unused_parameters", "auto"),
        )),
    Row("lazy in backward", build(overlap_with_ddp=True, lazy_gather=True), ValueError,
        "lazy_gather=True and overlap_with_ddp=True exclude|Drop one"),
    Row("reduce_dtype with the hooks", build(overlap_with_ddp=True, reduce_dtype=torch.float32), ValueError,
        "reduce_dtype|shard_gradients=True"),
    Row("mistyped", build(shard_gradient=True), TypeError,
        "neither ZeroRedundancyOptimizer nor SGD has|'shard_gradient'|did you mean `shard_gradients`?"),
    Row("a group's shard", build(lambda: [{"params": few(), "shard": 1}]), ValueError, "shard|1|auto"),
    Row("an argument of ours in a group", build(lambda: [{"params": few(), "bucket_cap_mb": 1}]), ValueError,
        "parameter group 0|'bucket_cap_mb'|the same for all groups|Pass bucket_cap_mb to ZeroRedundancyOptimizer"),
    Row("another class in a group", build(lambda: [{"params": few(), "optimizer_class": Adam}]), ValueError,
        "parameter group 0|'optimizer_class'|build another one"),
    Row("complex with a real reduce_dtype", build(lambda: [weight(dtype=torch.complex64)], shard_gradients=True,
        reduce_dtype=torch.float32), ValueError, "reduce_dtype expects real parameters|imaginary"),
    *(Row(f"masters: {what}", build(params, lr=1.0, **options), ValueError, words)
        for what, params, options, words in (
            ("a string", half(), {"master_weights": "float32"}, "expects None, torch.float32|'float32'|if unsure"),
            ("another dtype", half(), {"master_weights": torch.bfloat16}, "torch.bfloat16"),
            ("a bool", half(), {"master_weights": True}, "got True"),
            ("of a group", lambda: [{"params": half()(), "master_weights": 3}], {}, "parameter group 0|3"),
            ("remainders of float16", half("bfloat16", "float16"), {"master_weights": "remainder"},
             "parameter group 0|float16|Use torch.float32"),
            ("of float32", half("float32"), {"master_weights": torch.float32}, "float32 only|Drop it"),
            ("of a group of float32", lambda: [{"params": half()()}, {"params": half("float32")(), "master_weights":
             "remainder"}], {}, "parameter group 1|float32 only|Drop master_weights"),
            ("of an empty group", lambda: [{"params": half()()}, {"params": [], "master_weights": torch.float32}], {},
             "parameter group 1|the group has no parameters.|Drop master_weights"),
            ("a seed that is text", half(), {"master_weights": "stochastic", "rounding_seed": "x"},
             "rounding_seed|'x'"),
            ("a seed that is a bool", half(), {"master_weights": "stochastic", "rounding_seed": True},
             "rounding_seed|True"),
        )),
]  # fmt: skip
BUILDING = [replace(row, config=PAIR) for row in BUILDING]


# --- ranks that are not alike -------------------------------------------------------------------------------------


def changed(index: int, change: Callable[[nn.Parameter], nn.Parameter]) -> Odd:
    def here() -> list[tuple[str, nn.Parameter]]:
        found = few()
        found[index] = (found[index][0], change(found[index][1]))
        return found

    return Odd(here, few)


def like(words: str, us: str = "ranks 0, 2") -> str:
    """'what is A / B': which value the others have, and which one rank ODD has."""
    what, _, odd = words.partition(" / ")
    return f"{what} on {us}|{odd} on rank {ODD}"


def swapped() -> list[tuple[str, nn.Parameter]]:
    found = few()
    return [found[0], found[2], found[1], found[3]]


UNLIKE = [
    *(Row(f"ranks differ: {what}", do, RuntimeError, like(words))
        for what, do, words in (
            ("order", build(Odd(swapped, few)),
             "parameter 1 ('layer1') of group 0 / parameter 1 ('layer2') of group 0"),
            ("shape", build(changed(2, lambda p: weight(4, 3, 2))),
             "parameter 2 ('layer2') of group 0: shape is [3, 4, 2] / [4, 3, 2]"),
            ("dtype", build(changed(1, lambda p: weight(5, dtype=torch.float32))),
             "parameter 1 ('layer1') of group 0: dtype is float64 / float32"),
            ("requires_grad", build(changed(3, lambda p: p.requires_grad_(False))),
             "parameter 3 ('layer3') of group 0: requires_grad is True / False"),
            ("number of parameters", build(Odd(lambda: few()[:3], few)), "parameter group 0: parameters is 4 / 3"),
            ("groups", build(Odd(lambda: [{"params": few()}], lambda: [{"params": few()[:2]}, {"params": few()[2:]}])),
             "number of groups is 2 / 1"),
            ("an option", build(lr=Odd(0.2, 0.1)), "parameter group 0: lr is 0.1 / 0.2"),
            ("an option that is a tensor", build(lr=Odd(torch.tensor(0.5), torch.tensor(0.25)), kind=AdamW),
             "parameter group 0: lr is tensor(0.25, dtype=float32) / tensor(0.5, dtype=float32)"),
            ("a class", build(kind=Odd(AdamW, Adam)), "optimizer_class is Adam / AdamW"),
            ("bucket_cap_mb", build(bucket_cap_mb=Odd(3, 25)), "bucket_cap_mb is 25.0 / 3.0"),
            ("shard", build(shard=Odd("tensor", "auto")), "('layer0') of group 0: granularity is element / tensor"),
            ("parameters_as_bucket_view", build(parameters_as_bucket_view=Odd(True, False)),
             "parameters_as_bucket_view is False / True"),
            ("lazy_gather", build(lazy_gather=Odd(True, False)), "lazy_gather is False / True"),
            ("overlap_with_ddp", build(overlap_with_ddp=Odd(True, False)), "overlap_with_ddp is False / True"),
            ("shard_gradients", build(shard_gradients=Odd(True, False)), "shard_gradients is False / True"),
            ("reduce_dtype", build(shard_gradients=True, reduce_dtype=Odd(torch.float32, None)),
             "reduce_dtype is None / torch.float32"),
            ("gradient_buckets_in_flight", build(shard_gradients=True, gradient_buckets_in_flight=Odd(3, 2)),
             "gradient_buckets_in_flight is 2 / 3"),
            ("broadcast_parameters", build(shard_gradients=True, broadcast_parameters=Odd(False, True)),
             "broadcast_parameters is True / False"),
            ("find_unused_parameters", build(shard_gradients=True, find_unused_parameters=Odd(True, False)),
             "find_unused_parameters is False / True"),
            ("master_weights", build(half(), master_weights=Odd("remainder", torch.float32)),
             "master_weights is float32 / remainder"),
            ("rounding_seed", build(half(), master_weights="stochastic", rounding_seed=Odd(1, 2)),
             "rounding_seed is 2 / 1"),
        )),
    Row("three opinions", lambda t: zero(t, few(), weight_decay=float(t.rank)), RuntimeError,
        "weight_decay is 0.0 on rank 0 but 1.0 on rank 1 but 2.0 on rank 2"),
    *(Row(f"one rank refuses: {what}", do, told(error), words)
        for what, do, error, words in (
            ("no parameters", build(Odd(list, few)), ValueError, "empty parameter list"),
            ("a tensor", build(Odd(weight, few)), TypeError, "[tensor]"),
            ("a sparse parameter", build(Odd(lambda: [sparse()], few)), ValueError, DENSE),
            ("shard", build(shard=Odd("row", "auto")), ValueError, "'row'"),
            ("a class", build(kind=Odd(dict, SGD)), ValueError, "optimizer_class"),
            ("an option", build(lr=Odd(-1.0, 0.1)), ValueError, "Invalid learning rate"),
            ("in its own constructor", build(kind=Fussy, fails=Odd(True, False)), ValueError, "too fussy"),
            ("bucket_cap_mb", build(bucket_cap_mb=Odd(0, 25)), ValueError, "bucket_cap_mb"),
            ("reduce_dtype", build(reduce_dtype=Odd(torch.float32, None)), ValueError, "reduce_dtype"),
            ("a flag", build(lazy_gather=Odd(2, True)), TypeError, "lazy_gather expects a bool"),
        )),
]  # fmt: skip


# --- groups that are added ----------------------------------------------------------------------------------------


def trains(*rows: Row) -> list[Row]:
    """They are about the trial's own optimizer, whose training goes on."""
    return [replace(row, after=TRAINS) for row in rows]


@operation
def add(t: Trial, group: Any) -> None:
    t.ours.optimizer.add_param_group(group(t))


def fresh(*shape: int, **options: Any) -> Callable[[Trial], Any]:
    return lambda t: {"params": [("new", weight(*shape))], **options}


def known(t: Trial) -> Any:
    return {"params": t.ours.params()[:1]}


ADDING = trains(
    Row("added: no dict", add(lambda t: [weight()]), TypeError, "a parameter group expects a dict but got"),
    Row("added: a number", add(lambda t: 5), TypeError, "a parameter group expects a dict but got"),
    Row("added: no params", add(lambda t: {"lr": 0.1}), ValueError, "'params'"),
    Row("added: a set", add(lambda t: {"params": {weight()}}), TypeError, "set"),
    Row("added: a non-leaf", add(lambda t: {"params": [("new", weight() * 2)]}), ValueError, "non-leaf"),
    Row("added: one that is there", add(known), ValueError, "more than one parameter group"),
    Row("added: without a name", add(lambda t: {"params": [weight()]}), ValueError, "names"),
    Row("added: shard", add(fresh(shard="rows")), ValueError, "shard|'rows'"),
    Row("added: sparse", add(lambda t: {"params": [("new", sparse())]}), ValueError, DENSE),
    Row("added: strings", add(lambda t: {"params": ["w"]}), TypeError, "str"),
    Row("added: an argument of ours", add(fresh(lazy_gather=True)), ValueError, "parameter group 2|'lazy_gather'"),
    Row("added: masters", add(fresh(master_weights="remainder")), ValueError, "parameter group 2|Drop master_weights"),
    Row("added: ranks differ in shape", add(Odd(fresh(4), fresh(5))), RuntimeError,
        like("('new') of group 2: shape is [5] / [4]")),
    Row("added: ranks differ in an option", add(Odd(fresh(lr=0.7), fresh(lr=0.1))), RuntimeError,
        like("parameter group 2: lr is 0.1 / 0.7")),
    Row("added: one rank has it already", add(Odd(known, fresh())), told(ValueError), "more than one parameter group"),
    Row("added: one rank refuses shard", add(Odd(fresh(shard="rows"), fresh())), told(ValueError), "'rows'"),
)  # fmt: skip


# --- state dicts --------------------------------------------------------------------------------------------------


@operation
def load(t: Trial, change: Any) -> Any:
    """Load what ``change`` makes of a good state dict, with another learning rate."""
    found = copy.deepcopy(t.plain.optimizer.state_dict())
    for group in found["param_groups"]:
        group["lr"] = 123.0
    t.ours.optimizer.load_state_dict(change(found))


def states(**changes: Any) -> Callable[[Any], Any]:
    """Other entries in the state of parameter 1."""
    return lambda d: d | {"state": d["state"] | {1: d["state"][1] | changes}}


def groups(change: Callable[[list[Any]], Any]) -> Callable[[Any], Any]:
    return lambda d: d | {"param_groups": change(d["param_groups"])}


def good(d: Any) -> Any:
    return d


BROKEN: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "fewer groups": (groups(lambda found: found[:1]), ValueError, "different number of parameter groups|2|1"),
    "more groups": (groups(lambda found: [*found, found[0]]), ValueError, "different number of parameter groups|2|3"),
    "other sizes": (groups(lambda found: [found[0] | {"params": [0]}, found[1]]), ValueError,
                    "doesn't match the size of optimizer's group|group 0 expects"),
    "another shape": (states(exp_avg=torch.ones(5, 3)), EITHER, "parameter 1|(5, 3)|shard='tensor'"),
    "no state": (lambda d: {"param_groups": d["param_groups"]}, ValueError, "with 'state' and 'param_groups'"),
    "no groups": (lambda d: {"state": d["state"]}, ValueError, "with 'state' and 'param_groups'"),
    "groups without params": (groups(lambda found: [{"lr": 1.0}, {"lr": 1.0}]), ValueError, "the key 'params'"),
    "a state that is no dict": (lambda d: d | {"state": 3}, ValueError, "expects a dict under 'state'"),
    "an entry that is no dict": (lambda d: d | {"state": d["state"] | {1: 5.0}}, ValueError, "state of parameter 1"),
    "groups that are no list": (groups(lambda found: 3), ValueError, "expects a list of dicts"),
    "nothing": (lambda d: None, TypeError, "load_state_dict expects a dict but got"),
    "a list": (lambda d: [1, 2], TypeError, "load_state_dict expects a dict but got"),
    "a model's": (lambda d: net().state_dict(), ValueError, "expects a dict with 'state'"),
}  # fmt: skip


@operation
def stale(t: Trial, change: Callable[[Trial], Any]) -> Any:
    t.ours.optimizer.consolidate_state_dict(to=2)
    change(t)
    torch.save({"optimizer": t.ours.optimizer.state_dict()}, io.BytesIO())


def saved_elsewhere(t: Trial) -> None:
    """All but the recipient raise, and it does so as well: a row has one outcome for all."""
    t.ours.optimizer.consolidate_state_dict(to=2)
    form = t.ours.optimizer.state_dict()
    if t.rank == 2:
        torch.save(form, io.BytesIO())
        raise RuntimeError("consolidated to rank 2, and saved on rank 2")
    torch.save(form, io.BytesIO())


def write_state(t: Trial) -> None:
    owned = [key for key, value in t.ours.optimizer.state.items() if value]
    t.ours.optimizer.state[owned[0]] = dict(t.ours.optimizer.state[owned[0]])


def missing_on_one_rank(t: Trial) -> None:
    params = [weight(31)]
    optimizer = zero(t, params, Adam, shard="element")
    if t.rank != ODD:
        set_ones(params)
    optimizer.step()
    optimizer.consolidate_state_dict()


@operation
def misshapen(t: Trial, value: Any) -> Any:
    """Only the owner of a parameter has use for its master, and sees that it does not fit."""
    params = half("bfloat16", "bfloat16")()
    optimizer = zero(t, params, AdamW, master_weights=torch.float32, shard="tensor")
    set_ones(params)
    optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    box = [optimizer.state_dict()]
    dist.broadcast_object_list(box, t.members[0], group=t.ranks)
    box[0]["state"][1]["master_weight"] = value
    optimizer.load_state_dict(box[0])


@operation
def reordered(t: Trial, names: str) -> None:
    """What was saved is loaded by name, also where the parameters have another order."""
    found = []
    for order in (names, names[::-1]):
        params = {name: weight(4) for name in order}
        found.append((zero(t, list(params.items()), momentum=0.9), params))
    (first, params), (second, others) = found
    for number, name in enumerate(sorted(names)):
        params[name].grad = torch.full((4,), 1.0 + number, dtype=torch.float64)
    first.step()
    checkpoint.save(t.folder / f"order {names}", first)
    checkpoint.load(t.folder / f"order {names}", second)
    for name in names:
        t._same(f"the state of {name}", second.full_state(others[name]), first.full_state(params[name]))


@operation
def method(t: Trial, name: str, *args: Any, **options: Any) -> Any:
    """A call of the trial's optimizer."""
    return getattr(t.ours.optimizer, name)(*args, **options)


@torch.no_grad()
def differ(t: Trial) -> None:
    """For a moment."""
    (_, param), *_ = t.ours.params()
    before = param.clone()
    if t.rank == ODD:
        param.add_(1)
    try:
        t.ours.optimizer.check_replicas()
    finally:
        param.copy_(before)


TO = "to expects a rank of the process group, from 0 to 2, but got "
STATES = trains(
    *(Row(f"load: {what}", load(change), error, words) for what, (change, error, words) in BROKEN.items()),
    *(Row(f"load on one rank: {what}", load(Odd(change, good)), told(error), words)
        for what, (change, error, words) in BROKEN.items()
    ),
    Row("load: another step on one rank", load(Odd(states(step=torch.tensor(9.0)), good)), RuntimeError,
        "parameter 1|step|rank 1"),
    Row("load: another option on one rank", load(Odd(
        groups(lambda found: [found[0], found[1] | {"weight_decay": 0.75}]), good)), RuntimeError,
        "parameter group 1|weight_decay|0.75 on rank 1"),
    Row("load: less state on one rank", load(Odd(
        lambda d: d | {"state": dict(list(d["state"].items())[2:])}, good)), RuntimeError, "parameter 0|on rank 1"),
    Row("load: each rank its own", lambda t: [t.ours.optimizer.consolidate_state_dict(to=ODD),
        t.ours.optimizer.load_state_dict(t.ours.optimizer.state_dict())], Odd(RuntimeError, ValueError),
        "did not receive the state|rank 1"),
    Row("a file that nobody consolidated", lambda t: torch.save(t.ours.optimizer.state_dict(), io.BytesIO()),
        RuntimeError, "consolidate_state_dict(to=|save on rank|shardstep.checkpoint.save"),
    Row("a file after a further step", stale(lambda t: [t._do(op) for op in GO_ON]), RuntimeError,
        "consolidate_state_dict(to=2)|save on rank 2"),
    Row("a file after state was written", stale(write_state), RuntimeError, "consolidate_state_dict(to=2)"),
    Row("a file after a load", stale(lambda t: t.ours.optimizer.load_state_dict(
        t.plain.optimizer.state_dict())), RuntimeError, "consolidate_state_dict(to=2)"),
    Row("a file of a rank that is not the recipient", saved_elsewhere, RuntimeError, "to rank 2|on rank 2"),
    Row("load: entries that came back empty", load(lambda d: d | {"state": {key: {} for key in d["state"]}}),
        ValueError, "its entry is empty|flattened"),
    *(Row(f"to={to!r}", method("consolidate_state_dict", to=to), ValueError, f"{TO}{to!r}")
      for to in (-1, 3, "0", None, 1.0)),
    *(Row(f"chunk_mb={size!r}", method("consolidate_state_dict", chunk_mb=size), ValueError,
          f"chunk_mb expects a size above 0 in MiB but got {size!r}") for size in (0, -1, "16", None)),
    Row("to of one rank is wrong", method("consolidate_state_dict", to=Odd(3, 0)), told(ValueError), f"{TO}3"),
    Row("ranks consolidate to different ones", method("consolidate_state_dict", to=Odd(1, 0)), RuntimeError,
        like("to is 0 / 1")),
    Row("ranks call different methods", lambda t: method(
        "check_replicas" if t.rank == ODD else "consolidate_state_dict")(t), RuntimeError,
        like("consolidate_state_dict / check_replicas")),
    *(Row(f"{call} of {what}", lambda t, call=call, given=given: getattr(t.ours.optimizer, call)(given()), ValueError,
          f"{call} expects a parameter of this optimizer but got")
      for call in ("full_state", "full_grad")
      for what, given in (("a stranger", weight), ("None", lambda: None), ("a name", lambda: "weight"))),
    Row("replicas that differ", differ, RuntimeError,
        "('before.weight') of shape (8, 6) differs between ranks [0, 2] and ranks [1]"),
)  # fmt: skip
STATES += [
    *(Row(f"loaded by name: {names}", reordered(names), None, "") for names in ("012", "201", "cab")),
    Row("a gradient that one rank lacked", missing_on_one_rank, RuntimeError,
        "parameter 0|expects state for all of its 31 elements, but the ranks hold"),
    Row("load: a master of another shape", misshapen(torch.ones(299)), EITHER,
        "the master_weight of parameter 1|expects a tensor"),
    Row("load: a master that is no tensor", misshapen(1.0), EITHER,
        "the master_weight of parameter 1|expects a tensor"),
]  # fmt: skip


# --- shard_gradients ----------------------------------------------------------------------------------------------


@operation
def look(t: Trial, code: str) -> Any:
    """At a sharded gradient as if it were whole."""
    t.ours.backward(Backward(), t.number)
    eval(code, globals(), {"grad": t.ours.model.before.weight.grad})


def ones(grad: Tensor) -> Tensor:
    return torch.ones(grad.shape, dtype=grad.dtype)


LOOKS = (
    "grad + 1", "1 - grad", "grad + grad", "grad @ grad.t()", "grad == 0", "-grad", "grad**2", "grad.sum()",
    "grad.mean()", "grad.abs().max()", "grad.norm(dim=1)", "torch.isnan(grad).any()", "torch.isfinite(grad).all()",
    "grad[0]",
    "list(grad)", "grad.view(-1)", "grad.reshape(-1)", "grad.flatten()", "grad.clone()", "grad.detach().clone()",
    "grad.data + 0", "grad.to(torch.float32)", "grad.float()", "grad.cpu().numpy()", "grad.numpy()", "grad.tolist()",
    "torch.cat([grad, grad])", "torch.stack([ones(grad), grad])", "ones(grad).copy_(grad)", "grad.copy_(ones(grad))",
    "grad.add_(ones(grad))", "grad.add_(1.0)", "grad.mul_(ones(grad))", "grad.clamp(-1, 1)",
    "grad.clamp_(max=ones(grad))", "torch.nan_to_num(grad)", "torch.nan_to_num(grad, out=ones(grad))",
    "setattr(grad, 'data', ones(grad))", "grad.sign()", "torch.histc(grad, 10)", "torch.allclose(grad, grad)",
    "torch.equal(grad, ones(grad))", "dist.all_reduce(grad)", "torch.save(grad, io.BytesIO())", "copy.copy(grad)",
    "copy.deepcopy(grad)", "torch._foreach_mul_([ones(grad), grad], [0.5, 0.5])",
    "torch._foreach_mul_([grad], torch.full((3,), 0.5))",
)  # fmt: skip


def reduced_twice(t: Trial, when: str, options: dict[str, Any]) -> None:
    """DDP around the model of an optimizer that reduces by itself: told at the first backward."""
    model, options = net(), dict(options)
    hook = options.pop("hook", None)
    ddp = wrap(t, model, **options) if when == "before" else None
    optimizer = zero(t, model.parameters(), shard_gradients=True)
    ddp = ddp or wrap(t, model, **options)
    if hook is not None:
        ddp.register_comm_hook(t.ranks, hook)
    try:
        backward(t, ddp)
    finally:
        optimizer.zero_grad()


@operation
def sparse_gradient(t: Trial, *dense: bool, no_sync: bool = False, **options: Any) -> Any:
    """After dense ones, perhaps."""
    model = Lookup()
    optimizer = zero(t, model.named_parameters(), shard_gradients=True, **options)
    for one in dense:
        model(one).backward()
    with optimizer.no_sync() if no_sync else contextlib.nullcontext():
        model().backward()
    optimizer.step()


def two_of_them(t: Trial) -> None:
    model = net()
    first = zero(t, model.parameters(), shard_gradients=True)
    second = zero(t, model.parameters(), shard_gradients=True)
    try:
        backward(t, model)
    finally:
        first.zero_grad()
        second.zero_grad()


def without_its_optimizer(t: Trial) -> None:
    model = net()
    optimizer = zero(t, model.named_parameters(), shard_gradients=True)
    backward(t, model)
    del optimizer
    model.before.weight.grad.norm()


@operation
def enter(t: Trial, context: Callable[[Trial], Any]) -> Any:
    with context(t):
        pass


def forgotten_no_sync(t: Trial) -> None:
    model = net()
    optimizer = zero(t, model.parameters(), shard_gradients=True)
    shardstep.add_no_sync(model, optimizer)
    del optimizer
    with model.no_sync():
        pass


TWICE = "shard_gradients=True expects a model that is not wrapped|DistributedDataParallel"
COPY = "cannot be copied or pickled|load_state_dict(optimizer.state_dict())"
SHARDING = trains(
    *(Row(f"a sharded gradient: {code}", look(code), RuntimeError, "full_grad") for code in LOOKS),
    *(Row(f"the norm of order {order}", look(f"grad.norm({order})"), ValueError,
          f"the order of a sharded gradient's norm expects a number above 0, or inf, but got {order}")
      for order in (0, -1.0)),
    *(Row(f"{what} with shard_gradients", lambda t, copied=copied: copied(t.ours.optimizer), TypeError, COPY)
      for what, copied in (("copy", copy.copy), ("deepcopy", copy.deepcopy), ("pickle", pickle.dumps))),
    Row("add_no_sync to no module", lambda t: shardstep.add_no_sync(3, t.ours.optimizer), TypeError,
        "expects a module"),
    Row("add_no_sync to DDP", lambda t: shardstep.add_no_sync(wrap(t), t.ours.optimizer), ValueError,
        "DistributedDataParallel has one"),
    Row("add_no_sync of nothing", lambda t: shardstep.add_no_sync(t.ours.model), TypeError, "but got none"),
    Row("add_no_sync of a plain optimizer", lambda t: shardstep.add_no_sync(t.ours.model, t.plain.optimizer), TypeError,
        "of class shardstep.ZeroRedundancyOptimizer but got a AdamW"),
    Row("add_no_sync of the default mode", lambda t: shardstep.add_no_sync(t.ours.model, zero(t, [weight()])),
        ValueError, "this one leaves that to DDP"),
    Row("add_no_sync of another model", lambda t: shardstep.add_no_sync(net(), t.ours.optimizer), ValueError,
        "it has none of them"),
    Row("clip by order 0", method("clip_grad_norm_", 1.0, 0), ValueError,
        "expects a number above 0, or inf, but got 0"),
)  # fmt: skip
SHARDING += [
    *(Row(f"wrapped {when}: {what}", lambda t, when=when, options=options: reduced_twice(t, when, options),
          ValueError, f"{TWICE}|a ZeroRedundancyOptimizer of SGD over|Do not wrap the model|docs/frameworks.md")
      for when in ("before", "later")
      for what, options in (("plain", {}), ("gradient views", {"gradient_as_bucket_view": True}),
                            ("a static graph", {"static_graph": True}), ("a hook", {"hook": allreduce_hook}))),
    Row("a sparse gradient", sparse_gradient(), RuntimeError, "dense gradients|('table.weight')|Drop shard_gradients"),
    Row("a sparse gradient in no_sync", sparse_gradient(no_sync=True), RuntimeError, "dense gradients|table.weight"),
    Row("a sparse gradient after a dense one", sparse_gradient(True), RuntimeError, "dense gradients|table.weight"),
    Row("a sparse gradient after a dense one, in float64", sparse_gradient(True, reduce_dtype=torch.float64),
        RuntimeError, "dense gradients|table.weight"),
    Row("two that reduce the same gradients", two_of_them, RuntimeError, "shard_gradients"),
    Row("the gradient of an optimizer that is gone", without_its_optimizer, RuntimeError, "is gone|param.grad to None"),
    Row("no_sync of an optimizer that is gone", forgotten_no_sync, RuntimeError, "model.no_sync|is gone"),
]  # fmt: skip
SHARDING = [replace(row, config=SHARDED) for row in SHARDING]


def kept(t: Trial, value: Any) -> Any:
    """Alive until the trial ends."""
    t.__dict__.setdefault("kept", []).append(value)
    return value


# --- DDP and its hooks --------------------------------------------------------------------------------------------

STEPPING = (shardstep.hook_with_zero_step, shardstep.hook_with_zero_step_interleaved)


@operation
def hook_of(
    t: Trial, hook: Any, make: Callable[[Trial, DistributedDataParallel], Any], inside: Any = allreduce_hook
) -> Any:
    """Make a stepping hook with what ``make`` returns."""
    ddp = wrap(t)
    hook(inside, ddp, make(t, ddp))


def stepping(hook: Any, *others: Any) -> Callable[[Trial, Any], tuple[Any, Any]]:
    """DDP with this hook, and the optimizer that it steps."""

    def connect(t: Trial, ddp: Any) -> tuple[Any, Any]:
        optimizer = zero(t, [*ddp.module.named_parameters(), *others], overlap_with_ddp=True)
        ddp.register_comm_hook(t.ranks, hook(allreduce_hook, ddp, optimizer))
        return ddp, optimizer

    return connect


@operation
def unfrozen(t: Trial, connect: Callable[[Trial, Any], tuple[Any, Any]]) -> Any:
    """DDP does not know what was frozen when the model was wrapped: nobody would reduce it."""
    model = net()
    model.after.bias.requires_grad_(False)
    ddp, optimizer = connect(t, wrap(t, model))
    iterate(t, ddp, optimizer)
    model.after.bias.requires_grad_(True)
    optimizer.zero_grad()
    try:
        backward(t, ddp)
    finally:
        dist.barrier(t.ranks)  # who ends first must not be missed in buckets that the others still reduce


def under_ddp(t: Trial, ddp: Any) -> tuple[Any, Any]:
    optimizer = zero(t, ddp.module.named_parameters())
    shardstep.shard_ddp_gradients(ddp, optimizer)
    return ddp, optimizer


def unused_under_ddp(t: Trial, model: nn.Module) -> tuple[Any, Any]:
    return under_ddp(t, wrap(t, model, find_unused_parameters=True))


def turned(t: Trial, **options: Any) -> tuple[Any, Any]:
    """A memory format that changes after the optimizer was built."""
    model = nn.Conv2d(3, 4, 2).double()
    optimizer = zero(t, model.named_parameters(), **options)
    return wrap(t, model.to(memory_format=torch.channels_last)), optimizer


def hook_around(t: Trial) -> Any:
    ddp = wrap(t)
    first = shardstep.hook_with_zero_step(allreduce_hook, ddp, zero(t, ddp.parameters(), overlap_with_ddp=True))
    shardstep.hook_with_zero_step_interleaved(first, ddp, zero(t, [weight()], overlap_with_ddp=True))


def alone(t: Trial, params: Any) -> ZeroRedundancyOptimizer:
    """Of a group of one rank."""
    return ZeroRedundancyOptimizer(params, SGD, dist.new_group([dist.get_rank()], use_local_synchronization=True))


# Which optimizers of a DDP module; the error; words; the issue.
CASES: dict[str, tuple[Callable[[Trial, Any], list[Any]], Any, str, int | None]] = {
    "of a plain optimizer": (lambda t, ddp: [SGD(ddp.parameters())], TypeError,
                             "of class shardstep.ZeroRedundancyOptimizer but got SGD", None),
    "of no optimizer": (lambda t, ddp: [], TypeError, "but got none", None),
    "of another process group": (lambda t, ddp: [alone(t, ddp.parameters())], ValueError,
                                 "Pass the same process_group to both", None),
    "of overlap_with_ddp": (lambda t, ddp: [zero(t, ddp.parameters(), overlap_with_ddp=True)], ValueError,
                            "register hook_with_zero_step(reduce_scatter_hook, ddp, optimizer)", None),
    "of shard_gradients": (lambda t, ddp: [zero(t, [weight()], shard_gradients=True)], ValueError,
                           "Drop shard_gradients", None),
    "of a model that is wrapped twice": (lambda t, ddp: kept(t, wrap(t, ddp)) and [zero(t, ddp.parameters())],
                                         ValueError, "wrapped in DistributedDataParallel once", 26),
    "of a model in two modules": (lambda t, ddp: kept(t, wrap(t, ddp.module)) and [zero(t, ddp.parameters())],
                                  ValueError, "wrapped in DistributedDataParallel once", 26),
    "of a parameter in two optimizers": (lambda t, ddp: [zero(t, list(ddp.parameters())[:n]) for n in (9, 1)],
                                         ValueError, "parameter 0 is in two of them", None),
    "of another model": (lambda t, ddp: [zero(t, [*ddp.parameters(), weight()])], ValueError,
                         "expects an optimizer over parameters of the DDP module", None),
    "of one that DDP ignores": (lambda t, ddp: ddp.parameters_to_ignore.add("after.bias") or [
                                zero(t, ddp.module.named_parameters())], ValueError,
                                "('after.bias') is one that DDP was told to ignore", None),
    "of two modules on one rank": (lambda t, ddp: kept(t, wrap(t, mine(t, Odd(ddp.module, net())))) and [
                                   zero(t, ddp.parameters())], told(ValueError),
                                   "wrapped in DistributedDataParallel once", 26),
    "of a plain optimizer on one rank": (lambda t, ddp: [mine(t, Odd(SGD(ddp.parameters()), kept(t, zero(
                                         t, ddp.parameters()))))], told(TypeError), "but got SGD", None),
}  # fmt: skip


@operation
def at_once(t: Trial, case: Callable[[Trial, Any], list[Any]]) -> Any:
    ddp = wrap(t)
    shardstep.shard_ddp_gradients(ddp, *case(t, ddp))


@operation
def by_the_hook(t: Trial, case: Callable[[Trial, Any], list[Any]]) -> Any:
    ddp = wrap(t)
    optimizers = case(t, ddp)
    ddp.register_comm_hook(optimizers[0] if len(optimizers) == 1 else optimizers, shardstep.reduce_scatter_hook)
    backward(t, ddp)


def unregistered(hook: Any) -> Callable[[Trial, Any], tuple[Any, Any]]:
    def connect(t: Trial, model: Any) -> tuple[Any, Any]:
        ddp, optimizer = wrap(t, model), zero(t, model.named_parameters(), overlap_with_ddp=True)
        return (ddp, optimizer, hook(allreduce_hook, ddp, optimizer))[:2]

    return connect


HOOKED = [
    *(Row(f"{hook.__name__} that nobody registers", as_plain(unregistered(hook)), None, "") for hook in STEPPING),
    *(Row(f"{hook.__name__} {what}", hook_of(hook, make), error, words)
        for hook in STEPPING
        for what, make, error, words in (
            ("of the default mode", lambda t, ddp: zero(t, ddp.parameters()), ValueError, "overlap_with_ddp=True"),
            ("of shard_gradients", lambda t, ddp: zero(t, [weight()], shard_gradients=True), ValueError,
             "overlap_with_ddp=True"),
            ("of a plain optimizer", lambda t, ddp: SGD(ddp.parameters()), ValueError, "overlap_with_ddp=True"),
            ("of None", lambda t, ddp: None, ValueError, "overlap_with_ddp=True"),
            ("of an unknown wrapper", lambda t, ddp: Around(zero(t, ddp.parameters())), TypeError,
             "Around|ZeroRedundancyOptimizer inside (.inner)"),
            ("after shard_ddp_gradients", lambda t, ddp: under_ddp(t, ddp)[1], ValueError,
             "without another hook"),
        )),
    *(Row(f"{hook.__name__} of no DDP", lambda t, hook=hook: hook(allreduce_hook, net(), zero(
        t, [weight()], overlap_with_ddp=True)), ValueError, "expects a DistributedDataParallel module but got Net")
      for hook in STEPPING),
    *(Row(f"{hook.__name__}: a parameter that DDP has not", lambda t, hook=hook: backward(t, stepping(
        hook, ("stray", weight(5)))(t, wrap(t))[0]), RuntimeError,
        "('stray') expects its gradient from DDP, but DDP did not reduce it") for hook in STEPPING),
    *(Row(f"{hook.__name__}: unfrozen", unfrozen(stepping(hook)), RuntimeError,
          "('after.bias') expects its gradient from DDP|wrap the model after unfreezing") for hook in STEPPING),
    *(Row(f"{hook.__name__}: another memory format", lambda t, hook=hook: hook(
        allreduce_hook, *turned(t, overlap_with_ddp=True)), ValueError,
        f"{hook.__name__}|memory format|DDP and the optimizer")
      for hook in STEPPING),
    Row("a stepping hook inside the interleaved one", hook_around, ValueError, "expects a hook that only reduces"),
    *(Row(f"{name} {what}", way(case), error, f"{name}|{words}", changes=changes)
        for name, way in (("shard_ddp_gradients", at_once), ("reduce_scatter_hook", by_the_hook))
        for what, (case, error, words, changes) in CASES.items()
    ),
    Row("shard_ddp_gradients of no DDP", lambda t: shardstep.shard_ddp_gradients(net(), zero(t, [weight()])), TypeError,
        "expects a DistributedDataParallel module but got a Net"),
    Row("shard_ddp_gradients of two modules", lambda t: shardstep.shard_ddp_gradients(nn.ModuleList(
        [wrap(t), wrap(t)]), zero(t, [weight()])), TypeError, "a ModuleList, with 2 of them in or around it"),
    Row("shard_ddp_gradients once more", lambda t: shardstep.shard_ddp_gradients(
        *under_ddp(t, wrap(t)), zero(t, [weight()])), ValueError, "sharded already|Call it once"),
    Row("shard_ddp_gradients where there is a hook", lambda t: (ddp := wrap(t)).register_comm_hook(
        t.ranks, allreduce_hook) or under_ddp(t, ddp), RuntimeError, "can only be called once"),
    Row("shard_ddp_gradients: ranks differ", lambda t: under_ddp(t, wrap(
        t, gradient_as_bucket_view=t.rank == ODD)), RuntimeError,
        like("gradient_as_bucket_view is False / True", "rank 0")),
    Row("shard_ddp_gradients: unfrozen", unfrozen(under_ddp), RuntimeError,
        "('after.bias') expects its gradient from DDP|wrap the model after unfreezing"),
    Row("shard_ddp_gradients: another memory format", lambda t: shardstep.shard_ddp_gradients(*turned(t)), ValueError,
        "shard_ddp_gradients|memory format|DDP and the optimizer"),
    Row("shard_ddp_gradients: a sparse gradient", lambda t: kept(t, under_ddp(t, wrap(t, Lookup())))[0]().backward(),
        RuntimeError, "expects dense gradients"),
]  # fmt: skip
HOOKED = [replace(row, config=PAIR) for row in HOOKED]
HOOKED += trains(
    *(
        row
        for mode in ("hook", "interleaved scattering")
        for row in (
            Row(f"{mode}: clip", method("clip_grad_norm_", 1.0), RuntimeError, "clip_grad_norm_|Drop overlap_with_ddp",
                replace(PAIR, mode=mode)),
            Row(f"{mode}: deepcopy", lambda t: copy.deepcopy(t.ours.optimizer), TypeError, COPY,
                replace(PAIR, mode=mode)),
        )),
    Row("under DDP: deepcopy", lambda t: copy.deepcopy(t.ours.optimizer), TypeError, COPY, UNDER),
    Row("under DDP: the optimizer's no_sync", enter(lambda t: t.ours.optimizer.no_sync()), RuntimeError,
        "Under DDP use no_sync of DDP", UNDER),
    Row("under DDP: a group that DDP has not", add(fresh()), ValueError,
        "add_param_group expects parameters of the DDP module", UNDER),
    *(Row(f"under DDP, a sharded gradient: {code}", look(code), RuntimeError, "full_grad",
          UNDER) for code in LOOKS[::8]),
)  # fmt: skip


# --- steps that fail ----------------------------------------------------------------------------------------------


def failing(t: Trial) -> None:
    """The local optimizer of one rank raises."""
    Fails.told = "before" if t.rank == ODD else ""
    try:
        t.ours.backward(Backward(), t.number)
        t.ours.step()
        t.ours.optimizer.wait_for_parameters()
    finally:
        Fails.told = ""


def failing_everywhere(t: Trial) -> None:
    Fails.told = "before"
    try:
        t.ours.step()
    finally:
        Fails.told = ""


class Breaks(SGD):
    """Raises at one of its calls, of which there is one for each bucket."""

    calls_left = 0

    def step(self, closure: Any = None) -> Any:
        Breaks.calls_left -= 1
        if Breaks.calls_left == 0:
            raise ArithmeticError("broken on purpose")
        return super().step(closure)


@operation
def broken(t: Trial, calls: Callable[[Trial], int], then: Callable[[Trial, Any], Any]) -> Any:
    """A step that fails at a bucket, on each rank at another one perhaps; then something else."""
    params = [weight(64) for _ in range(6)]
    optimizer = zero(t, params, Breaks, momentum=0.9, bucket_cap_mb=0.0005)
    set_ones(params)
    optimizer.step()
    Breaks.calls_left = calls(t)
    try:
        found, text = outcome(optimizer.step)
        assert found is not None, "the step did not fail"
        assert "broken on purpose" in text, text
    finally:
        Breaks.calls_left = 0
    then(t, optimizer)


class Switches(Fails, SGD):
    """Has the modes of a schedule-free optimizer."""

    def train(self) -> None:
        pass

    def eval(self) -> None:
        pass


def switched(t: Trial) -> None:
    """A change of mode completes no step that failed."""
    params = [weight(64), weight(3)]
    optimizer = zero(t, params, Switches, momentum=0.9)
    set_ones(params)
    Fails.told = "before"
    try:
        assert outcome(optimizer.step)[0] is not None, "the step did not fail"
    finally:
        Fails.told = ""
    optimizer.eval()
    optimizer.train()
    checkpoint.save(t.folder / "torn", optimizer)


def closure(t: Trial) -> None:
    def fails() -> float:
        if t.rank == ODD:
            raise ArithmeticError("out of luck")
        return 1.0

    t.ours.step(closure=fails)


STEPS = [
    *(Row(f"{mode}: a step fails on one rank", failing, RuntimeError,
            Odd("own step failed", f"own step failed|rank {ODD} failed"), after=REFUSES,
            config=Configuration(mode=mode, optimizer="Tempered", ranks=3))
        for mode in ("default", "sharded", "under DDP", "hook")
    ),
    *(Row(f"{mode}: a step fails on all ranks", failing_everywhere, RuntimeError, "own step failed", after=TRAINS,
            config=Configuration(mode=mode, optimizer="Tempered", ranks=3))
        for mode in ("default", "sharded", "under DDP")
    ),
    *trains(Row("a closure that is a number", method("step", 0), TypeError, "not callable"),
            Row("a closure by name that is a number", method("step", closure=0), TypeError, "not callable")),
    Row("a closure fails on one rank", closure, told(ArithmeticError), "out of luck", after=OVER),
    *(Row(f"{call} after ranks failed at different buckets", broken(lambda t: (2, 4, 0)[t.rank],
            lambda t, optimizer, call=call: getattr(optimizer, call)()), RuntimeError, f"{AGAIN}|broken on purpose")
        for call in ("step", "check_replicas", "consolidate_state_dict")
    ),
    Row("save after a step that failed, and eval()", switched, RuntimeError,
        "expects an optimizer whose last step was completed", config=PAIR),
    Row("save after a step that failed", broken(lambda t: 3, lambda t, optimizer: checkpoint.save(
        t.folder / "torn", optimizer)), RuntimeError, "half updated|Resume from the last checkpoint"),
]  # fmt: skip

# --- a rank that has no memory ------------------------------------------------------------------------------------


class NoMemory(TorchDispatchMode):
    """Counts the operations on tensors inside of it; raises at number ``at``, as an allocator would."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.count += 1
            if self.count - 1 == self.at:
                raise torch.OutOfMemoryError("no memory, on purpose")
        return func(*args, **(kwargs or {}))


def before_step(t: Trial) -> None:
    t.ours.zero_grad()
    t.ours.backward(Backward(), t.number)


def do_step(t: Trial) -> None:
    t.ours.step()
    t.ours.optimizer.wait_for_parameters()


@operation
def without_memory(t: Trial, call: Callable[[Trial], Any], part: float) -> Any:
    """One rank has no memory for one of the operations inside of a call."""
    before_step(t)
    with NoMemory() as counted:
        call(t)
    before_step(t)
    with NoMemory(int(part * counted.count) if t.rank == ODD else None):
        call(t)


@operation
def at_first_without_memory(t: Trial, call: str, part: float, **options: Any) -> Any:
    """The same, in the first such call of an optimizer."""

    def made() -> Any:
        params = half("bfloat16", "bfloat16", "bfloat16")()
        optimizer = zero(t, params, Switches, momentum=0.9, shard="element", **options)
        set_ones(params)
        return getattr(optimizer, call)

    first, second = made(), made()
    with NoMemory() as counted:
        first()
    with NoMemory(int(part * counted.count) if t.rank == ODD else None):
        second()


SMALL = Configuration(cap=0.0003, shard="element", watch="weights", names=True)
WITHOUT = told(RuntimeError), "on purpose"
# At the last operations the others have all they need. Other calls than these leave the others waiting for the
# time-out of the process group (docs/log.md, until issue 28).
MEMORY = [
    *(Row(f"{config.mode}, {config.precision}: no memory at {part} of a step", without_memory(do_step, part),
            *WITHOUT, config)
        for config, parts in (
            (SMALL, (0.0, 0.3, 0.6, 0.8)),
            (replace(SMALL, mode="sharded"), (0.0, 0.3, 0.6, 0.8)),
            (replace(SMALL, precision="bfloat16 float32"), (0.1, 0.3, 0.5, 0.7)),
            (replace(SMALL, precision="bfloat16 remainder", mode="sharded"), (0.1, 0.3, 0.5, 0.7)),
            (replace(SMALL, precision="bfloat16 stochastic"), (0.1, 0.5)),
            (replace(SMALL, mode="views"), (0.2, 0.6)),
            (replace(SMALL, mode="lazy"), (0.2, 0.7)),
            (replace(SMALL, mode="under DDP"), (0.2, 0.6)),
        )
        for part in parts
    ),
    *(Row(f"{masters}: no memory at {part} of the first {call}", at_first_without_memory(
            call, part, master_weights=masters), *WITHOUT, replace(SMALL, ranks=3))
        for call, masters, part in (("step", torch.float32, 0.2),
                                    ("step", torch.float32, 0.5), ("step", "stochastic", 0.1),
                                    ("train", torch.float32, 0.1), ("eval", "remainder", 0.3))
    ),
    *(Row(f"no memory at {part} of a save", without_memory(lambda t: checkpoint.save(
            t.folder / "m", t.ours.optimizer, t.ours.model), part), *WITHOUT, SMALL)
        for part in (0.0, 0.5, 0.999)
    ),
]  # fmt: skip
MEMORY = [replace(row, after=OVER) for row in MEMORY]

# --- one rank raises in forward or backward, and all skip the batch: five seconds of patience each ------------------


@operation
def skipped(t: Trial, place: str) -> Any:
    t._do(AddGroup())  # (what no optimizer has, DDP itself reduces: it would wait for its own time-out)
    t.ours.backward(Backward(), t.number, mine(t, Odd(place, "")))


def far_behind(sync: bool) -> Callable[..., None]:
    """At first a rank is later than the others wait in backward. Then another backward, perhaps in no_sync, and a step.

    (What DDP reduces last has what was in no_sync before.)
    """

    def way(t: Trial, model: Any, optimizer: Any, turn: int) -> None:
        ours = isinstance(optimizer, ZeroRedundancyOptimizer)
        optimizer.zero_grad()
        for number, one in enumerate((True, sync) if ours else (sync, True)):
            no_sync = (model if hasattr(model, "no_sync") else optimizer).no_sync if not one else contextlib.nullcontext
            with no_sync():
                loss = model(batch(0, t.rank, torch.float64)).square().mean()
                if ours and t.rank == ODD and turn == number == 0:
                    time.sleep(6)
                loss.backward()
        optimizer.step()

    return way


PATIENCE = [
    Row(f"{name}: a rank is far behind, then {'another backward' if sync else 'no_sync'}",
        as_plain(connect, far_behind(sync)), None, "", replace(PAIR, names=False, mode="sharded"))  # a case of its own
    for name, sync, connect in (
        ("sharded", True, sharded), ("sharded", False, sharded), ("under DDP", False, unused_under_ddp),
        ("under DDP", True, unused_under_ddp))
]  # fmt: skip
PATIENCE += trains(
    *(Row(f"{mode}: {place} raises on one rank", skipped(place), Odd(Expected, None), f"raised in {place}",
          replace(PAIR, mode=mode, cap=0.0003), changes=28)
      for mode, place in (("sharded", "forward"), ("sharded", "backward"), ("sharded lazy", "backward"),
                          ("under DDP", "forward"))),
)  # fmt: skip

# --- a rank that does not come ------------------------------------------------------------------------------------


@operation
def missed(t: Trial, call: Callable[[Trial, Any, Any], Any], here: Any = None, **options: Any) -> Any:
    """All but one rank call it, over a group with a short time-out; that one does something else, or nothing."""
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), Adam, t.brief, lr=0.1, **options)
    iterate(t, model, optimizer)
    backward(t, model)
    chosen = mine(t, Odd(here, call))
    if chosen is not None:
        chosen(t, model, optimizer)


def freeze(t: Trial, model: Any, optimizer: Any) -> None:
    model.after.bias.requires_grad_(False)
    model.after.bias.grad = None
    optimizer.step()


def step(t: Trial, model: Any, optimizer: Any) -> None:
    optimizer.step()


WAITING = replace(PAIR, names=False)  # a case of its own
NOT_HERE = "expects a call on every rank of the group"
ABSENT = [
    Row("one rank does not step, sharded", missed(step, shard_gradients=True), MISSED,
        "It expects all ranks|did not come to it"),
    Row("one rank does not step, lazy", missed(lambda t, model, optimizer: (
        optimizer.step(), model.before.weight.sum()), lazy_gather=True), MISSED, "could not be gathered"),
    Row("one rank does not consolidate", missed(lambda t, model, optimizer: optimizer.consolidate_state_dict()), MISSED,
        f"consolidate_state_dict {NOT_HERE}|did not call it"),
    Row("one rank does not ask for a norm", missed(lambda t, model, optimizer: model.before.weight.grad.norm(),
        shard_gradients=True), MISSED, "did not"),
    Row("one rank adds a group", missed(step, lambda t, model, optimizer: optimizer.add_param_group(
        {"params": [("new", weight())]})), RuntimeError, Odd(NOT_HERE, f"rank {ODD} waits in add_param_group")),
    Row("one rank freezes", missed(step, freeze), RuntimeError,
        Odd(f"step, after a change of requires_grad|{NOT_HERE}|('after.bias')",
            f"rank {ODD} waits in step|('after.bias')|from True to False")),
]  # fmt: skip
ABSENT = [replace(row, config=WAITING, after=OVER, waits=True) for row in ABSENT]
# --- meshes, DTensors ---------------------------------------------------------------------------------------------

MESH = Configuration(group="mesh replicated", ranks=4, names=True)
PLACES = [f"rank {rank} (replicate {rank // 2}, shard {rank % 2})" for rank in range(4)]


def mesh_of(ranks: Any, *names: str) -> Callable[[Trial], DeviceMesh]:
    return lambda t: DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names or None)


def placed(*placements: Any) -> Callable[[Trial], list[nn.Parameter]]:
    """Parameters that are DTensors."""
    return lambda t: [nn.Parameter(DTensor.from_local(torch.ones(6, 4), mesh_of(range(4))(t), placements))]


def freeze_unlike(t: Trial) -> None:
    """Nothing is changed: they are told before the step."""
    params = t.ours.model.after.bias, t.ours.model.after.weight
    t.ours.backward(Backward(), t.number)
    chosen = params[t.rank == ODD]
    chosen.requires_grad_(False)
    chosen.grad = None
    try:
        t.ours.step()
    finally:
        chosen.requires_grad_(True)


def partial_gradient(t: Trial) -> None:
    params = placed(Replicate())(t)
    optimizer = zero(t, params)
    params[0].grad = DTensor.from_local(torch.ones(6, 4), params[0].device_mesh, [Partial()])
    optimizer.step()


def within_a_replica(t: Trial) -> None:
    mesh = t.ours.optimizer.mesh
    ddp = DistributedDataParallel(net(), process_group=mesh.get_group(1))
    shardstep.hook_with_zero_step(allreduce_hook, ddp, zero(t, ddp.parameters(), overlap_with_ddp=True))


US = ", ".join(PLACES[rank] for rank in (0, 2, 3))
MESHES = [
    Row("a mesh of three dimensions", build(over=mesh_of([[[0, 1]], [[2, 3]]], "replicate", "tensor", "shard")),
        ValueError, "of two (replicate, shard), but got one of 3: (replicate: 2, tensor: 1, shard: 2)"),
    Row("a mesh the wrong way", build(over=mesh_of([[0, 1], [2, 3]], "shard", "replicate")), ValueError,
        "in this order, but got (shard: 2, replicate: 2)"),
    Row("a mesh of mixed rows", build(over=mesh_of([[0, 1], [3, 2]], "replicate", "shard")), ValueError,
        "[[0, 1], [3, 2]]|ranks of every row ascend"),
    Row("a mesh without one rank", build(over=mesh_of([0, 2, 3])), Odd(ValueError, None),
        "global rank 1 is not in the mesh (without a name: 3)"),
    Row("a group without one rank", build(over=lambda t: dist.new_group([0, 2, 3])), Odd(ValueError, None),
        "process_group expects its caller to be a member, but global rank 1 is not"),
    Row("ranks of a mesh differ", build(lr=Odd(0.2, 0.1)), RuntimeError, like("lr is 0.1 / 0.2", US)),
    Row("one rank has no mesh", build(over=Odd(lambda t: None, lambda t: t.ours.over)), RuntimeError,
        "mesh is (without a name: 2, without a name: 2) on|none on rank 1"),
    Row("one rank of a mesh fails", build(Odd(list, few)), Odd(ValueError, RuntimeError), "empty parameter list"),
    Row("a hook of DDP over one replica", within_a_replica, ValueError, "its process_group lacks global ranks"),
    *(Row(f"a DTensor: {placement!r}", lambda t, placement=placement: zero(t, placed(placement)(t)), ValueError,
          f"the placements ({placement!r}|to_local()") for placement in (Shard(1), Partial())),
    *(Row(f"a DTensor with {mode}", lambda t, mode=mode: zero(t, placed(Replicate())(t), **{mode: True}), ValueError,
          f"{mode}=True expects plain tensors|Drop {mode}")
      for mode in ("shard_gradients", "overlap_with_ddp", "lazy_gather", "parameters_as_bucket_view")),
    Row("a partial gradient", partial_gradient, ValueError, "gradient|Partial(sum)"),
    Row("deepcopy with DTensors", lambda t: copy.deepcopy(zero(t, placed(Replicate())(t))), TypeError, COPY),
    *trains(
        Row("ranks of a mesh freeze differently", freeze_unlike, RuntimeError,
            f"requires_grad is True on {US} but False on {PLACES[1]}"),
        Row("ranks of a mesh add differently", add(Odd(fresh(4), fresh(3))), RuntimeError,
            like("shape is [3] / [4]", US)),
        Row("ranks of a mesh consolidate differently", method("consolidate_state_dict", to=Odd(1, 0)), RuntimeError,
            like("to is 0 / 1", US)),
        Row("replicas of a mesh differ", differ, RuntimeError, f"differs between {US} and {PLACES[1]}"),
    ),
]  # fmt: skip
MESHES = [replace(row, config=MESH) for row in MESHES]


# --- Join ---------------------------------------------------------------------------------------------------------


@operation
def in_join(t: Trial, call: Callable[[Trial], Any]) -> Any:
    """``call`` after a backward in the context; its error leaves the context as usual."""
    found: list[BaseException] = []
    with Join(t.ours.joinables()):
        try:
            t.ours.backward(Backward(), t.number)
            call(t)
        except RuntimeError as error:
            found.append(error)
    if found:
        raise found.pop()


def early(t: Trial) -> None:
    with Join(t.ours.joinables(), throw_on_early_termination=True):
        for _ in range(1 + t.rank):
            t.ours.zero_grad()
            t.ours.backward(Backward(), t.number)
            t.ours.step()


JOINS = trains(
    *(
        row
        for mode in ("sharded", "under DDP")
        for row in (
            Row(f"{mode}, in Join: broadcast_buffers", in_join(lambda t: t.ours.optimizer.broadcast_buffers(
                t.ours.model)), RuntimeError, "broadcast_buffers expects all ranks|before or after",
                replace(PAIR, mode=mode)),
            Row(f"{mode}, in Join: torch's clip_grad_norm_", in_join(lambda t: clip_grad_norm_(
                t.ours.model.parameters(), 1.0)), RuntimeError, "is not available in a Join context|clip_grad_norm_",
                replace(PAIR, mode=mode)),
            Row(f"{mode}, in Join: a gradient that is scaled", in_join(
                lambda t: t.ours.model.before.weight.grad.mul_(2)), RuntimeError,
                "changing a sharded gradient in place is not available in a Join context",
                replace(PAIR, mode=mode)),
        )),
)  # fmt: skip
JOINS += [
    Row("under DDP, in Join: no_sync", in_join(lambda t: t.ours.backward(Backward(sync=False), t.number)), RuntimeError,
        "Do not accumulate gradients|this one is in no_sync", UNDER, OVER),
    *(Row(f"{mode}: Join that throws", early, RuntimeError, "exhausted", replace(PAIR, mode=mode), OVER)
      for mode in ("default", "sharded")),
]  # fmt: skip

# --- checkpoints --------------------------------------------------------------------------------------------------


@operation
def save(t: Trial, to: Any = "c", model: Any = True, **options: Any) -> Any:
    """Nothing may be left of it."""
    path = to if "://" in to else t.folder / to
    try:
        checkpoint.save(path, t.ours.optimizer, t.ours.model if model else None, **options)
    finally:
        dist.barrier(t.ranks)
        assert not [*t.folder.glob("c*"), *t.folder.glob(".c*")], f"written: {list(t.folder.iterdir())}"


def saved(t: Trial, model: bool = True) -> Path:
    """A good checkpoint of the trial."""
    path = t.folder / "good"
    t.folder.mkdir(parents=True, exist_ok=True)
    checkpoint.save(path, t.ours.optimizer, t.ours.model if model else None)
    return path


@operation
def load_into(t: Trial, make: Callable[[Trial], Any], call: Any = checkpoint.load) -> None:
    """Load a good checkpoint into another optimizer (and model). If that fails nothing is changed."""
    made = make(t)
    models = [one for one in made if isinstance(one, nn.Module) and not next(one.parameters()).is_meta]
    before = copy.deepcopy([one.state_dict() for one in models])
    try:
        call(saved(t), *made)
    finally:
        assert not (found := difference([one.state_dict() for one in models], before, None)), f"the model{found}"


def stiff() -> nn.Module:
    """A layer whose memory cannot be written to: its elements share it."""
    layer = nn.Linear(6, 6).double()
    layer.bias.data = torch.zeros(1, dtype=torch.float64).expand(6)
    return layer


def another(t: Trial, kind: Any = AdamW, names: bool = True, together: bool = False, **parts: Any) -> tuple[Any, Any]:
    """An optimizer with the same groups over a model like the trial's, but for some parts, and that model."""
    model = net()
    for name, part in parts.items():
        setattr(model, name, part)
    found = model.trained()
    wide, narrow = [one for one in found if one[1].dim() > 1], [one for one in found if one[1].dim() <= 1]
    groups = [wide + narrow] if together else [wide, narrow]
    return zero(t, [{"params": one if names else [param for _, param in one]} for one in groups], kind), model


def misspelt(t: Trial) -> Any:
    form = t.ours.optimizer.sharded_state_dict(t.ours.model)
    if t.rank == ODD:
        form["param_groups"][0]["params"][0] = "misspelt"
    return form


@operation
def second_saver(t: Trial, via: str) -> None:
    """The last one stays. ``via``: how the rank that comes late calls the same directory."""
    plain, path = SGD([weight()], lr=0.1), t.folder / "jobs" / "plain"
    if t.rank != ODD:
        (t.folder / "jobs").mkdir(parents=True, exist_ok=True)
        (t.folder / "link").unlink(missing_ok=True)
        (t.folder / "link").symlink_to(t.folder / "jobs")
        checkpoint.save(path, plain)
    dist.barrier(t.ranks)
    if t.rank == ODD:
        plain.param_groups[0]["lr"] = 7.0
        checkpoint.save(t.folder / via / "plain", plain)
    dist.barrier(t.ranks)
    checkpoint.load(path, found := SGD([weight()], lr=0.1))
    assert found.param_groups[0]["lr"] == 7.0, found.param_groups


def beside_a_slow_save(t: Trial) -> None:
    """The disk of one rank is slow. What ranks compare meanwhile does not wait for it.

    What is hidden in the folder meanwhile would be left by a rank that is killed: a later save clears it away.
    """
    real, model, folder = os.fsync, net(), t.folder / "slow"
    optimizer = zero(t, model.named_parameters())
    os.fsync = lambda file: time.sleep(3 if t.rank == ODD else 0) or real(file)
    try:
        handle = checkpoint.save(folder / "a", optimizer, model, asynchronous=True)
        model.after.bias.requires_grad_(False)
        started = time.monotonic()
        iterate(t, model, optimizer)
        assert time.monotonic() - started < 2.5, "a step has waited for the save"
        hidden = [(path, path.is_dir()) for path in folder.glob(".*")]
        handle.wait()
    finally:
        os.fsync = real
    for path, is_folder in hidden:
        path.mkdir(exist_ok=True) if is_folder else path.touch()
        os.utime(path, (0, 0))
    dist.barrier(t.ranks)
    checkpoint.save(folder / "b", optimizer, model, keep=2)
    dist.barrier(t.ranks)
    assert hidden, "nothing was hidden"
    assert not (left := [*folder.glob(".*")]), f"left behind: {left}"


def of_a_later_torch(t: Trial) -> None:
    """Which adds the strides to what it saves of a tensor."""
    path, (get, put) = t.folder / "later", (TensorProperties.__getstate__, TensorProperties.__setstate__)
    TensorProperties.__getstate__ = lambda self: (*get(self), (1,))
    TensorProperties.__setstate__ = lambda self, state: put(self, state[:-1])  # between ranks
    try:
        checkpoint.save(path, t.ours.optimizer, t.ours.model)
    finally:
        TensorProperties.__getstate__, TensorProperties.__setstate__ = get, put
    checkpoint.load(path, t.ours.optimizer, t.ours.model)


def to_file(t: Trial) -> None:
    t.folder.mkdir(parents=True, exist_ok=True)
    (t.folder / "file").write_text("no checkpoint")
    checkpoint.save(t.folder / "file", t.ours.optimizer)


WRAPPER = "Around|ZeroRedundancyOptimizer inside (.inner)|Pass that one"
FITS = "does not match"
CHECKPOINTS = trains(
    *(Row(f"save: {what}", save(**options), error, words) for what, options, error, words in (
        ("keep=0", {"keep": 0}, ValueError, "keep expects a number from 1 on, or None to delete nothing, but got 0"),
        ("keep that is text", {"keep": "all"}, ValueError, "keep expects a number|'all'"),
        ("extra that is a list", {"extra": [1]}, TypeError, "extra expects a dict but got list"),
        ("extra with numbers as keys", {"extra": {1: 2}}, TypeError, "extra expects strings as keys but got [1]"),
        ("extra that is code", {"extra": {"f": open}}, EITHER + (TypeError,), "cannot be loaded without running code"),
        ("keep=0 in the background", {"keep": 0, "asynchronous": True}, ValueError, "keep expects a number"),
        ("an address", {"to": "s3://c"}, ValueError, "directory expects a path|'s3://c'|dcp.save"),
        ("ranks differ in directory", {"to": Odd("c1", "c0")}, RuntimeError, "directory is|on rank 1"),
        ("ranks differ in keep", {"keep": Odd(2, 3)}, RuntimeError, like("keep is 3 / 2", "rank 0")),
        ("ranks differ in asynchronous", {"asynchronous": Odd(True, False)}, RuntimeError,
         like("asynchronous is False / True", "rank 0")),
        ("ranks differ in model", {"model": Odd(False, True)}, RuntimeError, "model|on rank 1"),
        ("keep=0 on one rank", {"keep": Odd(0, 3)}, told(ValueError), "keep"),
        ("extra on one rank", {"extra": Odd([1], {})}, told(TypeError), "extra"),
    )),
    *(Row(f"{call.__name__} of {what}", lambda t, call=call, make=make: call(t.folder / "c", make(t.ours.optimizer)),
          TypeError, words)
      for call in (checkpoint.save, checkpoint.load, checkpoint.resume)
      for what, make, words in (
          ("an unknown wrapper", Around, WRAPPER),
          ("an empty list", lambda optimizer: [], "optimizer expects|list"),
          ("a state dict", lambda optimizer: {}, "optimizer expects|dict"))),
    Row("save over a file", to_file, EITHER + (FileExistsError,), "directory expects a new path|Choose another"),
    Row("load of nothing", lambda t: checkpoint.load(t.folder / "c", t.ours.optimizer), checkpoint.CheckpointError,
        "expects a directory that all ranks see|does not exist"),
    Row("resume from one of them", lambda t: checkpoint.resume(saved(t), t.ours.optimizer), ValueError,
        "expects the directory that holds the checkpoints|is one of them"),
)  # fmt: skip
CHECKPOINTS += [
    *(Row(f"load into {what}", load_into(make), error, words) for what, make, error, words in (
        ("another class", lambda t: another(t, kind=SGD), ValueError, "Was another class saved?|load_model"),
        ("more parameters", lambda t: another(t, more=weight(3)), ValueError,
         f"{FITS}|missing in the checkpoint|more|strict=False",),
        ("other shapes", lambda t: another(t, after=nn.Linear(8, 7).double()), ValueError,
         f"{FITS}|wrongly shaped|after.weight"),
        ("a buffer more on one rank", lambda t: another(t, **mine(t, Odd({"more": nn.Buffer(weight(3))}, {}))),
         told(ValueError),
         "does not match: missing|more of the model"),
        ("one group instead of two", lambda t: another(t, together=True), ValueError,
         "parameter group 0 expects options that were saved together|strict=False"),
        ("positions", lambda t: another(t, names=False)[:1], ValueError,
         "has parameter names|has positions|Pass model=..."),
        ("memory that cannot be written to", lambda t: another(t, late=stiff()), RuntimeError, "memory"),
        ("a model of somebody else", lambda t: (another(t, names=False)[0], net()), ValueError,
         "model expects to have all parameters of the optimizer"),
    )),
    *(Row(f"load_model {what}", load_into(make, checkpoint.load_model), error, words) for what, make, error, words in (
        ("into no module", lambda t: [net().state_dict()], TypeError, "expects a torch.nn.Module but got OrderedDict"),
        ("without memory", lambda t: [net().to("meta")], ValueError, "Call to_empty first"),
        ("of other shapes", lambda t: [another(t, after=nn.Linear(8, 7).double())[1]], ValueError,
         "after.weight of the model|strict=False"),
    )),
    Row("save under a long name", lambda t: checkpoint.load(checkpoint.save(t.folder / ("long" * 57),
        t.ours.optimizer).directory, t.ours.optimizer), None, ""),
    Row("a checkpoint of a later torch", of_a_later_torch, None, ""),
    Row("a step beside a slow save", beside_a_slow_save, None, ""),
    Row("load_model where there is none", lambda t: checkpoint.load_model(saved(t, model=False), net()), ValueError,
        "was saved without a model|Save with model="),
    Row("load_sharded_state_dict of more", lambda t: t.ours.optimizer.load_sharded_state_dict(
        (other := another(t, more=weight(3)))[0].sharded_state_dict(other[1]), t.ours.model), ValueError,
        "expects the names of this optimizer|more", after=TRAINS),
    Row("load_sharded_state_dict that is misspelt on one rank", lambda t: t.ours.optimizer.load_sharded_state_dict(
        misspelt(t), t.ours.model), told(ValueError), "misspelt", after=TRAINS),
    *(Row(f"a second rank saves a plain optimizer, by {via}", second_saver(via), None, "")
      for via in ("jobs", "link", "jobs/../jobs")),
]  # fmt: skip
CHECKPOINTS = [replace(row, config=PAIR) for row in CHECKPOINTS]

# --- what else a user may do --------------------------------------------------------------------------------------


@operation
def stepped(t: Trial, params: Any, change: Callable[[list[Any]], Any], **options: Any) -> Any:
    """An optimizer that has stepped once; then ``change(params)``, and another step."""
    found = params()
    optimizer = zero(t, found, **options)
    set_ones(found)
    optimizer.step()
    optimizer.zero_grad()
    change(found)
    optimizer.step()


def sparse_grad(params: list[Any]) -> None:
    params[1].grad = torch.ones_like(params[1]).to_sparse()


@operation
def unscaled(t: Trial, call: Callable[[Any, Any], Any], masters: Any) -> Any:
    params = half("float16", "float16")()
    both = zip(params, (torch.float32, masters), strict=True)
    optimizer = zero(t, [{"params": [param], "master_weights": mode} for param, mode in both])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale((params[0] + params[1]).float().sum() * 2.0**-26).backward()
    call(scaler, optimizer)


def not_averaged(t: Trial) -> None:
    """A forgotten DDP: the second step warns, on every rank that differs from the first."""
    model = net()
    optimizer = zero(t, model.parameters())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            iterate(t, model, optimizer)
    told = [one.message for one in found if "averaged" in str(one.message)]
    if told:
        raise told[0]


def infinite(t: Trial) -> None:
    t.ours.backward(Backward(bad=0), t.number)
    t.ours.optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


def written(t: Trial) -> None:
    model = net()
    optimizer = zero(t, model.parameters(), shard="tensor")
    for param in model.parameters():
        optimizer.state[param] = {"momentum_buffer": torch.ones_like(param)}


@operation
def forms(t: Trial, code: str) -> Any:
    """A tensor of a sharded state dict, as if it were whole."""
    entries = t.ours.optimizer.sharded_state_dict(t.ours.model)["state"].values()
    eval(code, globals(), {"found": next(entry["exp_avg"] for entry in entries if "exp_avg" in entry)})


def asks_otherwise(t: Trial) -> None:
    """At the same moment one rank asks for the norm of one gradient, and the others clip."""
    before_step(t)
    if t.rank == ODD:
        t.ours.model.before.weight.grad.norm()
    else:
        t.ours.optimizer.clip_grad_norm_(1.0)


def large(t: Trial) -> None:
    """A step of many elements; then replicas that differ in one of them."""
    param = weight(2**22 + 3, dtype=torch.bfloat16)
    optimizer = zero(t, [param], master_weights=torch.float32)
    set_ones([param])
    optimizer.step()
    t._same("the parameter", param.detach(), torch.full_like(param, 0.9).detach())
    for place in (-1, 2**22):
        with torch.no_grad():
            param[place] += 1 if t.rank == ODD else 0
            found, text = outcome(optimizer.check_replicas)
            param[place] = 0.9
        assert found is not None, f"element {place} differs, and nobody has noticed"
    raise found(text)


OTHERS = [
    Row("a large parameter that differs in one element", large, RuntimeError, "differs between"),
    Row("a sparse gradient, default mode", stepped(lambda: [weight(), weight(40, 3)], sparse_grad, shard="element"),
        RuntimeError, "step expects dense gradients"),
    Row("a sparse gradient of masters", stepped(half("bfloat16", "bfloat16"), sparse_grad, master_weights=torch.float32,
        shard="tensor"), RuntimeError, "step expects dense gradients"),
    Row("another dtype after building", stepped(lambda: [weight(), weight()], lambda params: setattr(params[0], "data",
        params[0].data.float())), RuntimeError,
        "parameter 0 expects to stay as it was|float64|float32"),
    Row("another shape after building", stepped(lambda: [weight(), weight()], lambda params: setattr(params[0], "data",
        torch.ones(9, 9, dtype=torch.float64))), RuntimeError,
        "parameter 0 expects to stay as it was|(3, 2)|(9, 9)"),
    Row("float16 with and without masters", unscaled(lambda scaler, optimizer: scaler.step(optimizer), None),
        ValueError,
        "parameter 1 has none|Set master_weights for its group, too"),
    Row("unscale_ of float16", unscaled(lambda scaler, optimizer: scaler.unscale_(optimizer), torch.float32),
        ValueError,
        "Attempting to unscale FP16 gradients"),
    *(Row(f"gradients that nobody averages, time {time}", not_averaged, Odd(UserWarning, None),
          "on rank 1. Wrap the model in DistributedDataParallel, or pass shard_gradients=True") for time in range(4)),
    Row("an entry of a parameter of another rank", written, KeyError, "expects a parameter that this rank owns"),
    *trains(
        Row("no_sync in the default mode", enter(lambda t: t.ours.optimizer.no_sync()), RuntimeError,
            "no_sync expects|shard_gradients=True, or no_sync of DDP"),
        Row("a norm that is infinite", infinite, RuntimeError, "clip_grad_norm_ expects a finite norm"),
        Row("clip by order -1", method("clip_grad_norm_", 1.0, -1), ValueError, "expects a number above 0, or inf"),
        Row("train() of an optimizer without", lambda t: t.ours.optimizer.train(), AttributeError, "train"),
        Row("count_lost_updates", lambda t: t.ours.optimizer.count_lost_updates(), AttributeError,
            "count_lost_updates is gone|docs/precision.md"),
        *(Row(f"a sharded state: {code}", forms(code), RuntimeError, "shard")
          for code in ("found + 1", "found.numpy()", "found.tolist()", "found.sum()")),
    ),
]  # fmt: skip
OTHERS = [replace(row, config=PAIR) for row in OTHERS]


@operation
def unused(t: Trial, *skips: tuple[int, ...]) -> None:
    """Backwards that leave parts of the model out, and a step."""
    t.ours.zero_grad()
    for skip in skips:
        t.ours.backward(Backward(skip=skip), t.number)
    t.ours.step()


OTHERS += [
    Row("ranks ask for different things", asks_otherwise, RuntimeError, "clip_grad_norm_|norm",
        replace(SHARDED, ranks=3), OVER),
]  # fmt: skip


@operation
def fails_in_backward(t: Trial, inner: Any) -> None:
    """The second bucket's step, while the first one's is under way. Parameters can be read afterwards."""
    model = net().to(t.config.device)
    ddp, optimizer = wrap(t, model), zero(t, model.parameters(), Breaks, overlap_with_ddp=True, bucket_cap_mb=0.0005)
    ddp.register_comm_hook(t.ranks, shardstep.hook_with_zero_step_interleaved(inner, ddp, optimizer))
    for _ in range(3):
        backward(t, ddp)
    Breaks.calls_left = 2
    found, text = outcome(lambda: backward(t, ddp))
    Breaks.calls_left = 0
    assert all(param.isfinite().all() for param in model.cpu().parameters())
    raise found(text)


class Recomputed(nn.Module):
    """A layer that is used several times, and in backward inside of another backward."""

    def __init__(self, again: bool = True) -> None:
        super().__init__()
        generator, self.again = torch.Generator().manual_seed(3), again
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)).double()
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64) / 3

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            call = nn.Sequential(layer, nn.Tanh(), self.layers[3], nn.Tanh())
            value = recompute(call, value.requires_grad_(), use_reentrant=True) if self.again else call(value)
        return value


ON_DEVICE = [
    *(Row(f"on a device, a parameter without gradient, {len(skips)} backwards", unused(*skips), RuntimeError,
          "shard_gradients expects a gradient for every parameter that requires one|find_unused_parameters=True",
          Configuration(mode="sharded", names=True, device="sim", ranks=3), OVER)
      for skips in (((1,),), ((), (1,)), ((), (), (0,)))),
    *(Row(f"on a device, a step fails in backward, {inner.__name__}", fails_in_backward(inner), ArithmeticError,
          "broken on purpose", replace(PAIR, device="sim"), OVER)
      for inner in (allreduce_hook, shardstep.reduce_scatter_hook)),
    *(Row(f"{device}: a shared layer is recomputed", as_plain(sharded, make=Recomputed,
          expected=lambda: Recomputed(False)), None, "", replace(PAIR, device=device)) for device in ("cpu", "sim")),
]  # fmt: skip


# --- without a process group, in a process of its own ---------------------------------------------------------------


def launched(t: Any) -> None:
    os.environ["WORLD_SIZE"] = "4"
    ZeroRedundancyOptimizer(few(), SGD)


ALONE = [
    Row("several processes without a group", launched, ValueError,
        "4 processes were launched|Call torch.distributed.init_process_group"),
    Row("Join without a group", lambda t: Join([ZeroRedundancyOptimizer(few(), SGD)]), RuntimeError,
        "Join expects a process group"),
    Row("a bad argument without a group", lambda t: ZeroRedundancyOptimizer(few(), SGD, shard="rows"), ValueError,
        "shard|'rows'"),
]  # fmt: skip

ROWS = [*BUILDING, *UNLIKE, *ADDING, *STATES, *SHARDING, *HOOKED, *STEPS, *MEMORY, *PATIENCE, *ABSENT, *MESHES, *JOINS,
        *CHECKPOINTS, *OTHERS, *ON_DEVICE]  # fmt: skip
TABLE = {row.what: row for row in ROWS}
