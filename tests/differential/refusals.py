"""What is not allowed together: one table. Wrong use is an outcome like any other.

A row is a configuration, something to do in it, the error that it must end with on every rank, and words that the
message must have. Many rows run one after the other in the same processes, between steps of a training that is
compared with DDP (``trial.py``): what a row must not change would show there.
"""

from __future__ import annotations

import copy
import io
import pickle
import time
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import LBFGS, SGD, Adafactor, Adam, AdamW

import shardstep
from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.differential import leftovers
from tests.differential.configurations import Configuration, Tempered
from tests.differential.models import Expected, Net, batch
from tests.differential.programs import Backward, Program, Raise, Step, ZeroGrad
from tests.differential.trial import Trial

ODD = 1  # the rank that does something else than the others, where one does
SOON = 8.0  # seconds: far below any process group's time-out, and enough for a machine that is busy
BRIEF = 1.5  # the time-out of a process group that is made to be waited for
START: Program = (Backward(), Step(), ZeroGrad())
GO_ON: Program = (ZeroGrad(), Backward(), Step(), ZeroGrad())


class Odd(NamedTuple):
    """What rank ``ODD`` has, and what the others have."""

    here: Any
    elsewhere: Any


def told(error: type[BaseException]) -> Odd:
    """Rank ``ODD`` raises it, and the others are told: their message has its number, and the same words."""
    return Odd(error, RuntimeError)


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
    config: Configuration = Configuration(names=True, ranks=3)  # noqa: RUF009
    after: str = BESIDE
    changes: int | None = None


def mine(t: Trial, value: Any) -> Any:
    return (value.here if t.rank == ODD else value.elsewhere) if isinstance(value, Odd) else value


# --- how a row is checked -----------------------------------------------------------------------------------------


def outcome(call: Callable[[], Any]) -> tuple[type[BaseException] | None, str]:
    """Class and text of what it raises; nothing of the exception is kept, which would keep optimizers alive."""
    try:
        call()
    except Exception as error:
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
        assert found is not None, f"expected {expected.__name__}, but {row.what!r} raised nothing (rank {t.rank})"
        assert issubclass(found, expected), f"expected {expected.__name__}, but {shown}"
        missing = [word for word in words if word not in text]
        assert not missing, f"expected the words {missing}, but {shown}"
    assert took < SOON, f"{row.what!r} took {took:.1f} s (rank {t.rank})"
    if row.after == TRAINS:
        for op in GO_ON:
            t._do(op)
    elif row.after == REFUSES:
        for call in (t.ours.step, t.ours.optimizer.check_replicas, t.ours.optimizer.consolidate_state_dict):
            found, text = outcome(call)
            assert found is not None, f"after {row.what!r} {call.__name__} raised nothing (rank {t.rank})"
            assert AGAIN in text, f"after {row.what!r}: {call.__name__} ended with {text} (rank {t.rank})"


AGAIN = "Start the processes again, from a checkpoint"


def run(config: Configuration, names: Iterable[str], folder: Path, table: dict[str, Row] | None = None) -> Counter[str]:
    """Rows of one configuration. Collective over all processes; of two ranks there are two groups at a time."""
    before, counts = leftovers.Before(), Counter[str]()
    groups = ("first", "last") if config.ranks == 2 and not config.mesh else (config.group,)
    queue, trials = [(table or TABLE)[name] for name in names], list[Trial]()
    for first in range(0, len(queue), len(groups)):
        rows = queue[first : first + len(groups)]
        if not trials:
            trials = [Trial(replace(config, group=group), folder / f"{first} {group}") for group in groups]
            for t in trials:
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
    t = trials = None  # type: ignore[assignment]
    before.check()
    return counts


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
    model(batch(0, t.rank, torch.float64)).square().mean().backward()


def iterate(t: Trial, model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    backward(t, model)
    optimizer.step()


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
    """SGD, and what the subclasses add."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, lr=lr, momentum=momentum)


class Talks(Habit):
    def step(self, closure: Any = None) -> Any:
        dist.all_reduce(self.param_groups[0]["params"][0].grad)
        return super().step(closure)


class HasInner(Habit):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base_optimizer = AdamW(self.param_groups)


class NoGroups(Habit):
    def __init__(self, params: Any) -> None:
        super().__init__([param.detach().requires_grad_() for param in params])


class Couples(Habit):
    """Clips all gradients together."""

    def step(self, closure: Any = None) -> Any:
        grads = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
        torch._foreach_mul_(grads, float((0.1 / torch.stack([grad.norm() for grad in grads]).norm()).clamp(max=1)))
        return super().step(closure)


class Random(Habit):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.add_(torch.randn_like(param.grad))
        return super().step(closure)


class Wants(Habit):
    def step(self, closure: Any = None, *, factor: float) -> Any:  # type: ignore[override]
        return super().step(closure)


class Keeps(Habit):
    """State that cannot be sent, or saved without code."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["helper"] = object()
        return result


def functional(params: Any = None) -> Any:
    from torch.distributed.optim.functional_adam import _FunctionalAdam

    return _FunctionalAdam


class Around(torch.optim.Optimizer):
    """A wrapper that nobody knows."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults


# --- building -----------------------------------------------------------------------------------------------------


def build(params: Any = few, kind: Any = SGD, over: Any = None, **options: Any) -> Callable[[Trial], Any]:
    """Build an optimizer over what ``params`` makes; each argument may be an ``Odd``."""

    def do(t: Trial) -> Any:
        chosen = {key: mine(t, value) for key, value in options.items()}
        ranks = t.ours.over if over is None else mine(t, over)(t)
        return ZeroRedundancyOptimizer(mine(t, params)(), mine(t, kind), ranks, **chosen)

    return do


def sparse() -> Tensor:
    return torch.ones(3, 2).to_sparse()


DENSE = "only supports using the same dense type"
BUILDING = [
    # What is wrong with params: as torch.optim says it, where torch.optim does.
    *(
        Row(f"params: {what}", build(params, Adam), error, words)
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
            ("over the same memory", lambda: shared(), ValueError, "share memory|0 and 1|one Parameter in both"),
        )
    ),
    # What is wrong with the class.
    Row("a required option is missing", build(kind=NeedsLr), TypeError, "lr"),
    Row("an unknown option", build(no_such_option=1), TypeError, "no_such_option"),
    Row("a bad option", build(lr=-1.0), ValueError, "Invalid learning rate"),
    Row("a functional class", lambda t: build(kind=functional())(t), ValueError, "_FunctionalAdam|ordinary class"),
    Row("a class of something else", build(kind=nn.Linear), ValueError, "optimizer_class|Linear"),
    Row("no class", build(kind=3), TypeError, "optimizer_class|3|torch.optim"),
    Row("an instance", lambda t: build(kind=SGD([weight()]))(t), TypeError, "optimizer_class|torch.optim"),
    Row("a factory of something else", build(kind=lambda params: 3), ValueError, "optimizer_class|int"),
    Row("LBFGS", build(kind=LBFGS), ValueError, "LBFGS cannot be sharded"),
    *(
        Row(f"{kind.__name__}, {shard}", build(kind=kind, shard=shard), ValueError, f"{kind.__name__}|{words}")
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
    Row("Wants cut", build(kind=Wants, shard="element"), ValueError, "shard='element' expects|its step wants an arg"),
    # What is wrong with our own arguments.
    *(
        Row(f"{name}={value!r}", build(**{name: value}), ValueError, f"{name}|{words}")
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
        )
    ),
    *(
        Row(f"{name}={value!r} with shard_gradients", build(shard_gradients=True, **{name: value}), ValueError, words)
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
        )
    ),
    *(
        Row(f"{name} that is no bool", build(**{name: value}), TypeError, f"{name} expects a bool but got {value!r}")
        for name, value in (
            ("shard_gradients", "yes"),
            ("overlap_with_ddp", 1),
            ("lazy_gather", None),
            ("parameters_as_bucket_view", "no"),
            ("broadcast_parameters", 0),
            ("overlap_backward", 1),
            ("find_unused_parameters", "auto"),
        )
    ),
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
    *(
        Row(f"masters: {what}", build(params, lr=1.0, **options), ValueError, words)
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
            ("a seed that is text", half(), {"master_weights": "stochastic", "rounding_seed": "x"}, "rounding_seed|'x'"),
            ("a seed that is a bool", half(), {"master_weights": "stochastic", "rounding_seed": True},
             "rounding_seed|True"),
        )
    ),
]  # fmt: skip


def shared() -> list[nn.Parameter]:
    first, second = weight(10), weight(10)
    second.data = first.data
    return [first, second]


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
    *(
        Row(f"ranks differ: {what}", do, RuntimeError, like(words))
        for what, do, words in (
            ("order", build(Odd(swapped, few)), "parameter 1 ('layer1') of group 0 / parameter 1 ('layer2') of group 0"),
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
        )
    ),
    Row("three opinions", lambda t: zero(t, few(), weight_decay=float(t.rank)), RuntimeError,
        "weight_decay is 0.0 on rank 0 but 1.0 on rank 1 but 2.0 on rank 2"),
    *(
        Row(f"one rank refuses: {what}", do, told(error), words)
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
        )
    ),
]  # fmt: skip


# --- groups that are added ----------------------------------------------------------------------------------------


def trains(*rows: Row) -> list[Row]:
    """They are about the trial's own optimizer, whose training goes on."""
    return [replace(row, after=TRAINS) for row in rows]


def add(group: Any) -> Callable[[Trial], Any]:
    return lambda t: t.ours.optimizer.add_param_group(mine(t, group)(t))


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

TABLE = {row.what: row for row in (*BUILDING, *UNLIKE, *ADDING)}
