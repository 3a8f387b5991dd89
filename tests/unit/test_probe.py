"""What the probe says about optimizers: how they may be sharded, and which cannot be."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import bitsandbytes
import pytest
import pytorch_optimizer
import schedulefree
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardstep.probe import Verdict, examine

Builder = Callable[..., Optimizer]
FLOATS = [torch.float32, torch.float64, torch.bfloat16]


def verdict_on(optimizer_class: Builder, dtype: torch.dtype = torch.float32, **defaults: Any) -> Verdict:
    return examine(optimizer_class, defaults, {}, torch.zeros(3, dtype=dtype))


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are tiny, and threads of several test processes wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- every class of torch.optim ---------------------------------------------------------------------------------------

CLASSES = {
    name: value
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
}
ELEMENTWISE = [
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]
WHOLE = {
    "Adafactor": "the updated parameter differs between whole and in pieces",  # factored second moment, update RMS
    "Muon": "only supports 2D parameters",
}
REFUSED = {
    "LBFGS": "the update of one parameter depends on the others",
    "SparseAdam": "SparseAdam does not support dense gradients",
}
MORE_OPTIONS = {
    "SGD": [{"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    "Adam": [{"amsgrad": True}, {"weight_decay": 0.1}],
    "AdamW": [{"amsgrad": True}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RMSprop": [{"centered": True, "momentum": 0.9}],
    "ASGD": [{"t0": 1}],
}


def variants(name: str) -> list[dict]:
    accepted = inspect.signature(CLASSES[name]).parameters
    switches = [{"foreach": True}, {"foreach": False}, {"fused": True}, {"maximize": True}]
    return [{}, *(s for s in switches if s.keys() <= accepted.keys()), *MORE_OPTIONS.get(name, [])]


def test_every_class_of_torch_optim_has_an_expected_verdict():
    assert sorted(CLASSES) == sorted([*ELEMENTWISE, *WHOLE, *REFUSED])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_may_be_cut_and_split_in_every_variant(name, dtype):
    for options in variants(name):
        assert verdict_on(CLASSES[name], dtype, **options)[:3] == (True, True, ""), options


def test_fused_variants_are_among_those_tried():
    assert {name for name in CLASSES if {"fused": True} in variants(name)} == {"Adagrad", "Adam", "AdamW", "SGD"}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_that_need_whole_tensors_say_why_and_may_be_split(name, dtype):
    for options in variants(name):
        verdict = verdict_on(CLASSES[name], dtype, **options)
        assert not verdict.elementwise
        assert verdict.splittable
        assert WHOLE[name] in verdict.reason, options


@pytest.mark.parametrize("vouched", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_lbfgs_is_refused_by_name_with_the_reason_even_if_vouched_for(dtype, vouched):
    with pytest.raises(ValueError, match=f"^LBFGS cannot be sharded: {REFUSED['LBFGS']}"):
        examine(torch.optim.LBFGS, {}, {}, torch.zeros(3, dtype=dtype), vouched=vouched)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sparse_adam_is_refused_by_name_with_the_reason(dtype):
    with pytest.raises(ValueError, match=f"^SparseAdam cannot be sharded: .*{REFUSED['SparseAdam']}"):
        verdict_on(torch.optim.SparseAdam, dtype)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad", "RMSprop"])
def test_complex_parameters_may_be_cut(name):
    assert verdict_on(CLASSES[name], torch.complex64)[:2] == (True, True)


# --- optimizers of others ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"])
def test_schedule_free_optimizers_may_be_cut_but_not_split(name, dtype):
    assert verdict_on(getattr(schedulefree, name), dtype)[:3] == (True, False, "")


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "PagedAdamW8bit"])
def test_8_bit_optimizers_need_whole_tensors(name):
    """They quantize in blocks: a block that is cut has another scale."""
    verdict = verdict_on(getattr(bitsandbytes.optim, name))
    assert not verdict.elementwise
    assert verdict.reason


# pytorch_optimizer counts steps on the group, so none of these may be split. Name -> why it may not be cut.
THIRD_PARTY = {
    "Lion": "",
    "AdaBelief": "",
    "Adan": "",
    "ADOPT": "",
    "ScheduleFreeAdamW": "",
    "Lamb": "parameter differs",  # norm of the whole tensor
    "LARS": "parameter differs",
    "StableAdamW": "parameter differs",  # clips the mean over the tensor
    "AdaShift": "'grad_queue' is an object",  # and takes the maximum over the tensor, from the tenth step on
    "AdamP": "parameter differs",  # projects gradients that are orthogonal to the parameter
    "SGDP": "parameter differs",
    "SOAP": "parameter differs",
    "ScalableShampoo": "'pre_conditioner' is an object",
    "AdaNorm": "'exp_grad_norm' has another shape",
}
COUPLED = ["Prodigy", "DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD", "AvaGrad", "AdamS"]


@pytest.mark.parametrize("name", THIRD_PARTY)
def test_third_party_optimizers_get_the_verdict_that_their_update_rule_deserves(name):
    verdict = verdict_on(getattr(pytorch_optimizer, name))
    assert verdict[:2] == (not THIRD_PARTY[name], False)
    assert THIRD_PARTY[name] in verdict.reason


def train(optimizer_class: Builder, values: Tensor, gradients: Tensor) -> Tensor:
    param = torch.nn.Parameter(values.clone())
    optimizer = optimizer_class([param])
    getattr(optimizer, "train", lambda: None)()
    for gradient in gradients:
        param.grad = gradient.clone()
        optimizer.step()
    return param.detach().view(-1)


def equal_in_pieces(optimizer_class: Builder, steps: int = 20) -> bool:
    """Whether training with random gradients ends the same whole and in three pieces."""
    torch.manual_seed(0)
    values, gradients = torch.randn(33, 50), torch.randn(steps, 33, 50)
    whole = train(optimizer_class, values, gradients)
    pieces = [
        train(optimizer_class, values.view(-1)[low:high], gradients.view(steps, -1)[:, low:high])
        for low, high in ((0, 64), (64, 640), (640, 1650))
    ]
    return torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("name", [name for name, reason in THIRD_PARTY.items() if not reason])
def test_what_the_probe_calls_elementwise_trains_bit_equal_in_pieces(name):
    assert equal_in_pieces(getattr(pytorch_optimizer, name))


@pytest.mark.parametrize("name", ["Lamb", "LARS", "StableAdamW", "AdaShift", "SOAP"])
def test_what_the_probe_calls_whole_would_train_wrong_in_pieces(name):
    assert not equal_in_pieces(getattr(pytorch_optimizer, name))


@pytest.mark.parametrize("name", COUPLED)
def test_optimizers_that_estimate_one_number_from_all_parameters_are_refused(name):
    with pytest.raises(ValueError, match=f"^{name} cannot be sharded: the update of one parameter depends"):
        verdict_on(getattr(pytorch_optimizer, name))


# --- optimizers made for the purpose ----------------------------------------------------------------------------------


class Rule(Optimizer):
    """Steps each parameter by itself with ``update``; plain gradient descent unless overridden."""

    def __init__(self, params, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        self.before(self.param_groups)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(self.update(param, group), alpha=-float(group["lr"]))

    def before(self, groups: list[dict]) -> None: ...

    def update(self, param: Tensor, group: dict) -> Tensor:
        return param.grad


def test_the_plain_rule_may_be_cut_and_split():
    assert verdict_on(Rule)[:3] == (True, True, "")


class CountsOnGroup(Rule):
    def before(self, groups):
        for group in groups:
            group["k"] = group.get("k", 0) + 1


class CountsOnGroupInATensor(Rule):
    def before(self, groups):
        for group in groups:
            group["k"] = group.get("k", torch.zeros(())) + 1


class CountsOnItself(Rule):
    k = 0

    def before(self, groups):
        self.k += 1


class CountsOnItselfInATensor(Rule):
    def before(self, groups):
        self.k = getattr(self, "k", torch.zeros(())) + 1


class CountsInTheState(Rule):
    def before(self, groups):
        self.state["global"]["k"] = self.state["global"].get("k", 0) + 1


class CountsAndActs(CountsOnItself):
    """Warms up by its own counter: the count is visible in the parameters, too."""

    def update(self, param, group):
        return param.grad * min(1.0, self.k / 5)


@pytest.mark.parametrize(
    "rule",
    [CountsOnGroup, CountsOnGroupInATensor, CountsOnItself, CountsOnItselfInATensor, CountsInTheState, CountsAndActs],
)
def test_a_counter_outside_the_parameters_is_not_splittable(rule):
    assert verdict_on(rule)[:3] == (True, False, "")


class CountsPerParameter(Rule):
    def update(self, param, group):
        self.state[param]["k"] = self.state[param].get("k", 0) + 1
        return param.grad / self.state[param]["k"]


def test_a_counter_per_parameter_is_splittable():
    assert verdict_on(CountsPerParameter)[:3] == (True, True, "")


class DrawsNoise(Rule):
    def update(self, param, group):
        return param.grad + torch.randn_like(param)


def test_an_optimizer_that_draws_random_numbers_needs_whole_tensors_and_one_step():
    verdict = verdict_on(DrawsNoise)
    assert verdict[:2] == (False, False)
    assert "random" in verdict.reason


class ClipsGlobalNorm(Rule):
    def before(self, groups):
        norms = [p.grad.norm() for group in groups for p in group["params"] if p.grad is not None]
        self._scale = 1 / max(float(torch.stack(norms).norm()), 1e-3)

    def update(self, param, group):
        return param.grad * self._scale


class SumsOnGroup(Rule):
    """Estimates something from all parameters that starts to act much later."""

    def update(self, param, group):
        group["estimate"] = group.get("estimate", 0.0) + float(param.grad.abs().sum())
        return param.grad


class FollowsTheParameterBefore(Rule):
    def before(self, groups):
        self._seen = 0.0

    def update(self, param, group):
        scale = 1 + self._seen
        self._seen += float(param.grad.norm())
        return param.grad * scale


def refused_as_coupled(rule: type[Rule], **kwargs) -> None:
    for vouched in (False, True):
        with pytest.raises(ValueError, match=rf"^{rule.__name__} cannot be sharded: .*depends on the others"):
            examine(rule, {}, {}, torch.zeros(2), vouched=vouched)


def test_a_global_gradient_norm_inside_step_is_refused():
    refused_as_coupled(ClipsGlobalNorm)


def test_a_sum_over_parameters_on_the_group_is_refused():
    refused_as_coupled(SumsOnGroup)


def test_coupling_with_earlier_parameters_is_refused():
    refused_as_coupled(FollowsTheParameterBefore)


class TrustRatio(Rule):
    """LAMB and LARS: the step is scaled by the norms of the whole tensor."""

    def update(self, param, group):
        return param.grad * (param.norm() / param.grad.norm())


class BlockwiseState(Rule):
    """One second moment per block of 256 elements, as 8-bit and memory-saving optimizers have."""

    def update(self, param, group):
        flat = param.grad.reshape(-1)
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % 256)).view(-1, 256)
        self.state[param]["v"] = padded.square().mean(dim=1)
        scaled = padded / (self.state[param]["v"].sqrt()[:, None] + 1e-8)
        return scaled.view(-1)[: flat.numel()].view_as(param)


class RowState(Rule):
    """A state with one number per row that does not change the update at all."""

    def update(self, param, group):
        self.state[param]["rows"] = torch.zeros(param.shape[0])
        return param.grad


class OneNumber(Rule):
    """A 0-dim state that depends on the whole tensor and does not change the update."""

    def update(self, param, group):
        self.state[param]["norm"] = param.grad.norm()
        return param.grad


class Unknown:
    def __init__(self, shape) -> None:
        self.shape = shape


class ObjectState(Rule):
    def update(self, param, group):
        self.state[param].setdefault("preconditioner", Unknown(param.shape))
        return param.grad


class ChangesByShape(Rule):
    """Matrices are treated otherwise than vectors, as Muon with a fallback does."""

    def update(self, param, group):
        return param.grad.sign() if param.dim() == 2 else param.grad


class Late(Rule):
    """A whole-tensor maximum that acts from the eleventh step on."""

    def update(self, param, group):
        state = self.state[param]
        state["k"] = state.get("k", 0) + 1
        return param.grad / param.grad.abs().max() * param.norm() if state["k"] > 10 else param.grad


class ProjectsOrthogonal(Rule):
    """AdamP: removes the radial part of the update if the gradient is orthogonal to the whole tensor."""

    def update(self, param, group):
        cosine = (param * param.grad).sum() / (param.norm() * param.grad.norm())
        if param.dim() == 2 and cosine.abs() < 0.1 / param.numel() ** 0.5:
            return param.grad.sign()
        return param.grad


WHOLE_ONLY = {
    TrustRatio: "parameter differs",
    BlockwiseState: "parameter differs",
    RowState: "'rows' has another shape",
    OneNumber: "'norm' differs",
    ObjectState: "'preconditioner' is an object",
    ChangesByShape: "parameter differs",
    Late: "parameter differs",
    ProjectsOrthogonal: "parameter differs",
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rule", WHOLE_ONLY, ids=lambda rule: rule.__name__)
def test_what_looks_at_more_than_one_element_needs_whole_tensors_and_says_what_differs(rule, dtype):
    verdict = verdict_on(rule, dtype)
    assert verdict[:2] == (False, True)
    assert WHOLE_ONLY[rule] in verdict.reason


@pytest.mark.parametrize("lr", [0.0, 0, 1e-30, 1e-12, 1e-6, 1e-3, 1.0, 10.0], ids=repr)
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_small_learning_rate_hides_nothing(dtype, as_tensor, lr):
    """A warmup starts at 0; what is built then trains with other rates later."""
    rate = torch.tensor(float(lr)) if as_tensor else lr
    like = torch.zeros(3, dtype=dtype)
    for verdict in (examine(TrustRatio, {"lr": rate}, {}, like), examine(TrustRatio, {}, {"lr": rate}, like)):
        assert verdict[:2] == (False, True)


# --- what a probe must not do -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [torch.optim.AdamW, DrawsNoise, torch.optim.Muon])
def test_a_probe_leaves_the_random_numbers_as_they_were(rule):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    verdict_on(rule)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_probe_that_raises_leaves_the_random_numbers_as_they_were():
    class DrawsAndCouples(ClipsGlobalNorm):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            torch.rand(3)

    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="DrawsAndCouples cannot be sharded"):
        verdict_on(DrawsAndCouples)
    assert torch.equal(torch.get_rng_state(), before)


class ChangesItsOptions(Rule):
    def before(self, groups):
        for group in groups:
            group["schedule"].append(1)
            group["nested"]["k"] += 1
            group["rate"].mul_(2)
            group["lr"] *= 0.5


def test_the_options_given_are_not_changed():
    def make():
        return {"schedule": [1, 2], "nested": {"k": 3}, "rate": torch.tensor(0.5), "lr": 0.1}

    defaults, options = make(), make()
    rate = options["rate"]
    examine(ChangesItsOptions, defaults, options, torch.zeros(3))
    examine(ChangesItsOptions, {}, options, torch.zeros(3))
    assert repr(defaults) == repr(options) == repr(make())
    assert options["rate"] is rate


def test_a_learning_rate_in_a_tensor_is_not_changed():
    rate = torch.tensor(0.001)
    verdict_on(partial(torch.optim.Adam, lr=rate))
    examine(torch.optim.Adam, {"lr": rate}, {"lr": rate}, torch.zeros(3))
    assert rate.item() == torch.tensor(0.001).item()


def test_the_parameter_that_stands_for_its_group_is_not_touched():
    like = torch.nn.Parameter(torch.randn(4, 4))
    like.grad = torch.randn(4, 4)
    values, gradient = like.detach().clone(), like.grad.clone()
    examine(torch.optim.AdamW, {}, {}, like)
    assert torch.equal(like, values)
    assert torch.equal(like.grad, gradient)


def test_step_hooks_for_all_optimizers_do_not_fire():
    fired = []
    handles = [
        register_optimizer_step_pre_hook(lambda *args: fired.append("pre")),
        register_optimizer_step_post_hook(lambda *args: fired.append("post")),
    ]
    try:
        verdict_on(torch.optim.AdamW)
        verdict_on(Rule)
    finally:
        for handle in handles:
            handle.remove()
    assert fired == []


def test_a_probe_warns_of_nothing():
    class Warns(Rule):
        def before(self, groups):
            warnings.warn("a step without lr_scheduler", stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verdict_on(Warns).elementwise


numbers = st.floats(0, 1, exclude_max=True, allow_subnormal=False)


@settings(deadline=None, max_examples=25)
@given(
    lr=st.one_of(st.floats(0, 100), st.floats(0, 100, width=32).map(torch.tensor), st.integers(0, 3)),
    betas=st.tuples(numbers, numbers),
    eps=st.floats(1e-12, 1),
    weight_decay=numbers,
    fused=st.booleans(),
)
def test_numbers_do_not_change_the_verdict_on_adamw(lr, betas, eps, weight_decay, fused):
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    assert examine(torch.optim.AdamW, {"fused": fused}, options, torch.zeros(3))[:3] == (True, True, "")


@settings(deadline=None, max_examples=25)
@given(lr=st.floats(0, 100) | st.floats(0, 100, width=32).map(torch.tensor), momentum=numbers, weight_decay=numbers)
def test_numbers_do_not_change_the_verdict_on_sgd(lr, momentum, weight_decay):
    options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    assert examine(torch.optim.SGD, options, {}, torch.zeros(3))[:3] == (True, True, "")


def test_the_probe_sees_the_options_of_the_group_and_not_only_the_defaults():
    class Switch(Rule):
        def update(self, param, group):
            return TrustRatio.update(self, param, group) if group["adapt"] else param.grad

    like = torch.zeros(3)
    assert examine(Switch, {"adapt": True}, {"adapt": False}, like).elementwise
    assert not examine(Switch, {"adapt": False}, {"adapt": True}, like).elementwise


# --- what cannot be probed --------------------------------------------------------------------------------------------


def test_an_optimizer_that_cannot_step_the_probe_is_refused_unless_vouched_for():
    class NeedsData(Rule):
        def update(self, param, group):
            raise LookupError("no statistics for this layer")

    with pytest.raises(ValueError, match=r"^NeedsData cannot be sharded.*LookupError.*no statistics.*shard='tensor'"):
        verdict_on(NeedsData)
    verdict = examine(NeedsData, {}, {}, torch.zeros(3), vouched=True)
    assert verdict[:2] == (False, False)
    assert "no statistics" in verdict.reason


def test_an_optimizer_that_cannot_be_built_over_the_probe_is_left_to_the_real_parameters():
    """Wrong options raise again over the real ones; wrong shapes do not."""

    class OnlyVectors(Rule):
        def __init__(self, params, **options) -> None:
            super().__init__(params, **options)
            if any(p.dim() != 1 for group in self.param_groups for p in group["params"]):
                raise ValueError("vectors only")

    verdict = verdict_on(OnlyVectors)
    assert verdict[:2] == (False, False)
    assert "vectors only" in verdict.reason


def test_an_optimizer_that_demands_a_closure_gets_one():
    class Demands(Rule):
        def step(self, closure):
            closure()
            super().step()

    assert verdict_on(Demands)[:2] == (True, True)


def test_an_optimizer_whose_step_takes_no_closure_is_probed():
    class Refuses(Rule):
        def step(self):
            super().step()

    assert verdict_on(Refuses)[:2] == (True, True)


def test_the_verdict_says_whether_state_exists_before_the_first_step():
    class Eager(Rule):
        def __init__(self, params, **options) -> None:
            super().__init__(params, **options)
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param]["sum"] = torch.zeros_like(param)

    assert verdict_on(Eager).eager
    assert verdict_on(torch.optim.Adagrad).eager
    assert not verdict_on(torch.optim.AdamW).eager


def test_a_probe_can_be_repeated_with_the_same_answer():
    for rule in (torch.optim.AdamW, TrustRatio, CountsOnGroup):
        assert verdict_on(rule) == verdict_on(copy.copy(rule))
