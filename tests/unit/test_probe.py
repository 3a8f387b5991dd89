"""What becomes of an optimizer class: it is cut, kept whole, or refused, and the error says why.

Asked for through the constructor: ``shard="element"`` says of a class that cannot be cut what differed; with
``shard="tensor"`` the user vouches that every tensor is updated by itself.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import parameters
from tests.twins import Twins

DIFFERS = "the updated parameter differs between whole and in pieces"
LOW_BIT = ("Adam8bit", "AdamW4bit", "AdamWFp8")  # from 4096 elements on, if they are a multiple of a block


# --- optimizers made for the purpose ----------------------------------------------------------------------------------


class Rule(Optimizer):
    """Steps each parameter by itself with ``update``; plain gradient descent unless overridden."""

    def __init__(self, params: Any, lr: Any = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.before(self.param_groups)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(self.update(param, group), alpha=-float(group["lr"]))

    def before(self, groups: list[dict]) -> None: ...

    def update(self, param: Tensor, group: dict) -> Tensor:
        return param.grad


class CountsOnGroup(Rule):
    def before(self, groups):
        for group in groups:
            group["k"] = group.get("k", 0) + 1

    def update(self, param, group):
        return param.grad / group["k"]


class CountsOnItself(Rule):
    k = 0

    def before(self, groups):
        self.k += 1

    def update(self, param, group):
        return param.grad * min(1.0, self.k / 5)


class ClockWithTheFirst(Rule):
    """Counts steps with the first parameter of the group, as heavyball does."""

    def before(self, groups):
        for group in (group for group in groups if group["params"]):
            state = self.state[group["params"][0]]
            state["step"] = state.get("step", 0) + 1


class TrustRatio(Rule):
    """As LAMB and LARS: scaled by the norms of the whole tensor."""

    def update(self, param, group):
        return param.grad * (param.norm() / param.grad.norm().clamp(min=1e-9))


class ListOfTensors(Rule):
    def update(self, param, group):
        self.state[param]["history"] = [param.grad.clone()]
        return param.grad


class Late(Rule):
    """A maximum of the whole tensor that acts from the eleventh step on."""

    def update(self, param, group):
        state = self.state[param]
        state["k"] = state.get("k", 0) + 1
        return param.grad / param.grad.abs().max() * param.norm() if state["k"] > 10 else param.grad


class RoundsInBlocks(Rule):
    """Only tensors of a multiple of the block, and not small ones."""

    def __init__(self, params, block=256, least=4096, **options):
        super().__init__(params, block=block, least=least, **options)

    def update(self, param, group):
        flat = param.grad.reshape(-1)
        if flat.numel() < group["least"] or flat.numel() % group["block"]:
            return param.grad
        blocks = flat.view(-1, group["block"])
        scale = blocks.abs().amax(dim=1, keepdim=True)
        return ((blocks / scale).mul(15).round().div(15) * scale).view_as(param)


class SumsOnGroup(Rule):
    """An estimate from all parameters that acts much later, if at all."""

    def update(self, param, group):
        group["estimate"] = group.get("estimate", 0.0) + float(param.grad.abs().sum())
        return param.grad


class StacksEqualShapes(Rule):
    def before(self, groups):
        self._norms = {}
        for param in (p for group in groups for p in group["params"]):
            self._norms[param.shape] = self._norms.get(param.shape, 1.0) + float(param.grad.norm())

    def update(self, param, group):
        return param.grad / self._norms[param.shape]


# --- the table --------------------------------------------------------------------------------------------------------

COUPLED = "the update of one parameter depends on the others .*"
RANDOM = "its steps draw random numbers .*"
WHOLE_STATE = ".*, which is carried whole"
# Class, options, verdict, and words of the reason. "doubted": refused unless the user vouches with shard="tensor".
# (Classes of torch.optim in all of their variants: tests/contract.)
VERDICTS: list[tuple[Any, dict[str, Any], str, str]] = [
    *((rule, {}, "cut", "") for rule in (Rule, CountsOnGroup, CountsOnItself, ClockWithTheFirst)),
    *((TrustRatio, {"lr": lr}, "whole", DIFFERS) for lr in (0.1, 0.0, 1e-12, torch.tensor(0.0))),  # a warmup is at 0
    (ListOfTensors, {}, "whole", f"state 'history' is a list with tensors in it{WHOLE_STATE}"),
    (Late, {}, "whole", DIFFERS),
    *((RoundsInBlocks, {"block": size, "least": 4096}, "whole", DIFFERS) for size in (256, 1024, 4096)),
    (RoundsInBlocks, {"block": 16, "least": 16}, "whole", DIFFERS),  # blocks within every aligned cut
    (SumsOnGroup, {}, "refused", rf"{COUPLED}option 'estimate' of the group is [\d.]+ alone and [\d.]+ with them"),
    (StacksEqualShapes, {}, "refused", rf"{COUPLED}the parameter differs by up to \d"),
    ("torch.optim.Adafactor", {}, "whole", DIFFERS),
    ("torch.optim.LBFGS", {}, "refused", COUPLED),
    ("torch.optim.SparseAdam", {}, "doubted", ".*SparseAdam does not support dense gradients"),
    ("schedulefree.AdamWScheduleFree", {}, "cut", ""),
    ("bitsandbytes.optim.AdamW8bit", {}, "whole", ""),
    *((f"torchao.optim.{name}", {}, "whole", f"state 'exp_avg' is a OptimState{WHOLE_STATE}") for name in LOW_BIT),
    *((f"pytorch_optimizer.{name}", {}, "cut", "") for name in ("Lion", "AdaBelief", "ADOPT")),
    *((f"pytorch_optimizer.{name}", {}, "whole", DIFFERS) for name in ("Lamb", "AdamP", "SGDP")),
    ("pytorch_optimizer.AdaNorm", {}, "whole", "state 'exp_grad_norm' has another shape"),
    ("pytorch_optimizer.Prodigy", {}, "refused", f"{COUPLED}the parameter differs by up to"),
    ("pytorch_optimizer.DAdaptAdaGrad", {}, "refused", f"{COUPLED}option 'gsq_weighted' of the group is"),
    ("pytorch_optimizer.AdaShift", {}, "refused", "its state 'grad_queue' .* got deque"),
    ("pytorch_optimizer.StableSPAM", {}, "refused", "its state dict keeps 'total_step' beside state and param_groups"),
    ("pytorch_optimizer.DASH", {}, "doubted", RANDOM),
]


def build(kind: Any, shard: str, dtype: torch.dtype = torch.float32, **options: Any) -> ZeroRedundancyOptimizer:
    """In this process alone, without a process group."""
    return ZeroRedundancyOptimizer([Parameter(torch.zeros(4, 3, dtype=dtype))], kind, shard=shard, **options)


def verdict_on(kind: Any, dtype: torch.dtype, options: dict[str, Any]) -> tuple[str, str]:
    """The verdict, and what the error says."""
    reason, found = "", {}
    for shard in ("element", "auto", "tensor"):
        try:
            found[shard] = build(kind, shard, dtype, **options).layout.specs[0].granularity
        except ValueError as error:
            reason, found[shard] = reason or str(error), "refused"
    names = {
        ("element", "element", "tensor"): "cut",
        ("refused", "tensor", "tensor"): "whole",
        ("refused", "refused", "tensor"): "doubted",
        ("refused", "refused", "refused"): "refused",
    }
    return names[tuple(found.values())], reason


def check(kind: Any, options: dict[str, Any], verdict: str, words: str, dtype: torch.dtype = torch.float32) -> None:
    if isinstance(kind, str):
        package, _, name = kind.rpartition(".")
        kind = getattr(pytest.importorskip(package), name)
    found, reason = verdict_on(kind, dtype, options)
    assert found == verdict, reason
    told = "shard='element' expects .* for NAME .*" if verdict == "whole" else "NAME cannot be sharded: .*"
    assert verdict == "cut" or re.match(told.replace("NAME", kind.__name__) + words, reason), reason
    assert verdict != "doubted" or "shard='tensor'" in reason, reason


@pytest.mark.parametrize(("kind", "options", "verdict", "words"), VERDICTS, ids=lambda v: getattr(v, "__name__", None))
def test_a_class_is_cut_kept_whole_or_refused_as_its_rule_deserves_and_the_reason_is_told(
    kind, options, verdict, words
):
    check(kind, options, verdict, words)


@pytest.mark.parametrize(("kind", "options", "verdict", "words"), [row for row in VERDICTS if row[0] in (Rule, Late)])
def test_the_same_in_bfloat16(kind, options, verdict, words):
    check(kind, options, verdict, words, torch.bfloat16)


@pytest.mark.xfail(strict=True, reason="in bfloat16 the probe misses what they do to whole tensors: they are cut")
@pytest.mark.parametrize(
    ("kind", "options"), [(RoundsInBlocks, {"block": 256, "least": 4096}), ("pytorch_optimizer.SGDP", {})]
)
def test_what_is_kept_whole_in_float32_is_kept_whole_in_bfloat16(kind, options):
    check(kind, options, "whole", DIFFERS, torch.bfloat16)


def train_in_many_buckets(rank: int, world_size: int) -> None:
    shapes = [(5, 7), (4,), (5, 7), (3, 2)]
    for kind in (CountsOnGroup, CountsOnItself, ClockWithTheFirst, TrustRatio):
        twins = Twins(lambda: parameters(shapes), kind, sharded={"bucket_cap_mb": 0.0001})
        twins.step(4)
        twins.check_weights()


def test_what_is_taken_trains_as_the_plain_one_whichever_way_its_step_is_split_into_buckets():
    """A count outside of the parameters must not advance with every bucket."""
    run_ranks(train_in_many_buckets, 2)


# --- how a class is asked ---------------------------------------------------------------------------------------------


class Switch(TrustRatio):
    def update(self, param, group):
        return super().update(param, group) if group["adapt"] else param.grad


def test_each_group_is_judged_by_its_own_options():
    groups = [{"params": [Parameter(torch.zeros(4, 3))], "adapt": adapt} for adapt in (False, True)]
    layout = ZeroRedundancyOptimizer(groups, Switch, adapt=True).layout
    assert [spec.granularity for spec in layout.specs] == ["element", "tensor"]


class OnlyVectors(Rule):
    def __init__(self, params, **options):
        super().__init__(params, **options)
        assert all(p.dim() == 1 for group in self.param_groups for p in group["params"]), "vectors only"


class DemandsAClosure(Rule):
    def step(self, closure):
        closure()
        super().step()


class TakesNoClosure(Rule):
    def step(self):
        super().step()


def test_a_step_of_another_form_and_a_class_for_some_shapes_only_are_taken():
    build(DemandsAClosure, "element")
    build(TakesNoClosure, "element")
    layout = ZeroRedundancyOptimizer([Parameter(torch.zeros(4))], OnlyVectors).layout
    assert layout.specs[0].granularity == "tensor"


class Disturbs(Rule):
    def before(self, groups):
        torch.rand(3)
        warnings.warn("a step without lr_scheduler", stacklevel=1)
        for group in groups:
            group["schedule"].append(1)
            group["lr"].mul_(2)


@pytest.mark.parametrize("kind", [Disturbs, pytest.param(type("Refused", (Disturbs, SumsOnGroup), {}), id="Refused")])
def test_asking_disturbs_nothing(kind):
    """Random numbers, options, parameters, gradients, hooks for all optimizers, warnings: all as they were."""
    param, rate, fired = Parameter(torch.randn(4, 3)), torch.tensor(0.1), []
    param.grad = torch.randn(4, 3)
    before = [tensor.clone() for tensor in (param.detach(), param.grad, rate, torch.get_rng_state())]
    schedule = [1, 2]
    handle = register_optimizer_step_pre_hook(lambda *args: fired.append(args))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ZeroRedundancyOptimizer([param], kind, lr=rate, schedule=schedule)
    except ValueError as error:
        assert kind.__name__ == "Refused" and "depends on the others" in str(error)  # noqa: PT017, PT018
    finally:
        handle.remove()
    after = param.detach(), param.grad, rate, torch.get_rng_state()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert (schedule, fired) == ([1, 2], [])
