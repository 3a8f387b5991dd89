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

from shardstep.params.probe import Verdict, examine
from tests.versions import Muon, needs_muon, with_muon_if_there

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
    missing = set() if Muon is not None else {"Muon"}
    assert set(CLASSES) == {*ELEMENTWISE, *WHOLE, *REFUSED} - missing


@pytest.mark.extended
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_may_be_cut_and_split_in_every_variant(name, dtype):
    for options in variants(name):
        if (name, dtype, options) != ("SGD", torch.bfloat16, {"fused": True}):  # see the test after this one
            assert verdict_on(CLASSES[name], dtype, **options)[:3] == (True, True, ""), options


def test_fused_sgd_in_bfloat16_that_updates_only_the_end_of_a_tensor_is_not_cut():
    """A bug of torch 2.13 on the CPU: what a vector register holds stays as it was. A piece has another end."""
    param = torch.nn.Parameter(torch.zeros(42, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    torch.optim.SGD([param], lr=0.5, fused=True).step()
    if param.detach().eq(-0.5).all():
        pytest.skip("this torch updates all of it")
    verdict = verdict_on(torch.optim.SGD, torch.bfloat16, fused=True)
    assert verdict[:3] == (False, True, "the updated parameter differs between whole and in pieces")


def test_fused_variants_are_among_those_tried():
    assert {name for name in CLASSES if {"fused": True} in variants(name)} == {"Adagrad", "Adam", "AdamW", "SGD"}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", with_muon_if_there(WHOLE))
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
    "AdamP": "parameter differs",  # projects gradients that are orthogonal to the parameter
    "SGDP": "parameter differs",
    "SOAP": "parameter differs",
    "AdaNorm": "'exp_grad_norm' has another shape",
}
# Name -> what differs between alone and together.
COUPLED = {
    "Prodigy": "the parameter differs by up to",
    "DAdaptAdaGrad": r"option 'gsq_weighted' of the group is [\d.e-]+ alone and [\d.e-]+ with them",
    "DAdaptAdam": "the parameter differs by up to",
    "DAdaptAdan": r"option 'gsq_weighted' of the group is [\d.e-]+ alone",
    "DAdaptLion": r"option 'numerator_weighted' of the group is [\d.e-]+ alone",
    "DAdaptSGD": "the parameter differs by up to",
    "AvaGrad": "the parameter differs by up to",
    "AdamS": "the parameter differs by up to",
}
# Name -> what of it cannot be carried.
UNCARRIABLE = {
    "AdaShift": "state 'grad_queue' .* got deque",
    "Conda": "state 'projector' .* got GaLoreProjector",
    "ScalableShampoo": "state 'pre_conditioner' .* got PreConditioner",
    "StableSPAM": "state dict keeps 'total_step' beside state and param_groups",
}


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
    told = f"^{name} cannot be sharded: the update of one parameter depends on the others .*{COUPLED[name]}"
    with pytest.raises(ValueError, match=told):
        verdict_on(getattr(pytorch_optimizer, name))


@pytest.mark.parametrize("vouched", [False, True])
@pytest.mark.parametrize("name", UNCARRIABLE)
def test_what_cannot_be_carried_is_refused_when_it_is_built(name, vouched):
    with pytest.raises(ValueError, match=f"^{name} cannot be sharded: its {UNCARRIABLE[name]}"):
        examine(getattr(pytorch_optimizer, name), {}, {}, torch.zeros(3), vouched=vouched)


@pytest.mark.parametrize("name", [pytest.param("Kron", marks=pytest.mark.optimizers), "DASH"])  # (Kron: a minute)
def test_optimizers_that_draw_random_numbers_are_refused_unless_vouched_for(name):
    rule = getattr(pytorch_optimizer, name)
    with pytest.raises(ValueError, match=rf"^{name} cannot be sharded: its steps draw random .* shard='tensor'"):
        verdict_on(rule)
    assert examine(rule, {}, {}, torch.zeros(3), vouched=True)[:2] == (False, False)


LOW_BIT = {"Adam8bit": "8bit", "AdamW8bit": "8bit", "Adam4bit": "4bit", "AdamW4bit": "4bit", "AdamFp8": "Fp8"}
LOW_BIT |= {"AdamWFp8": "Fp8"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOW_BIT)
def test_low_bit_states_that_exist_only_at_multiples_of_a_block_are_found(name, dtype):
    """torchao quantizes from 4096 elements on, if they are a multiple of 256 (or 128): not the first probes."""
    torchao = pytest.importorskip("torchao.optim")
    verdict = verdict_on(getattr(torchao, name), dtype)
    assert verdict[:2] == (False, True)
    assert verdict.reason == f"state 'exp_avg' is a OptimState{LOW_BIT[name]}, which is carried whole"
    assert [kind.__name__ for kind in verdict.subclasses] == [f"OptimState{LOW_BIT[name]}"]


# heavyball keeps the state of a parameter in a dict within its state, counts steps on the group and consumes gradients.
# Name -> why it is not cut.
NESTED = "state 0 is a dict with tensors in it, which is carried whole"
DIFFERS = "the updated parameter differs between whole and in pieces"
HEAVYBALL = dict.fromkeys(
    ["SGD", "AdamW", "NAdam", "AdEMAMix", "AdamC", "RMSprop", "SFAdamW", "ADOPT", "LaProp"], NESTED
)
HEAVYBALL |= dict.fromkeys(["SUDSAdamW", "HyperBallAdamW", "MSAMLaProp", "SignLaProp", "OrthoLaProp"], DIFFERS)
# Name -> what the refusal says.
HEAVYBALL_REFUSED = dict.fromkeys(["Muon", "MuonAdamW", "MuonLaProp", "Scion", "QSGD"], "steps draw random numbers")
HEAVYBALL_REFUSED |= dict.fromkeys(["PSGDKron", "PSGDPRO", "LATHER"], "steps draw random numbers")
HEAVYBALL_REFUSED |= dict.fromkeys(["SOAP", "KLSOAP", "KLShampoo", "SOLP"], "state dict keeps 'heavyball' beside state")
HEAVYBALL_REFUSED["SAMWrapper"] = "what it keeps cannot be carried .* it has 'wrapped', 'ball'"


@pytest.mark.optimizers
@pytest.mark.parametrize("name", HEAVYBALL)
def test_a_count_of_elements_on_the_group_and_a_clock_with_the_first_parameter_do_not_couple_heavyball(name):
    verdict = verdict_on(getattr(pytest.importorskip("heavyball"), name))
    assert verdict[:3] == (False, False, HEAVYBALL[name])
    assert verdict.consumes
    assert verdict.notes == ("param_count",)


@pytest.mark.optimizers
@pytest.mark.parametrize("name", HEAVYBALL_REFUSED)
def test_heavyball_is_refused_where_its_result_would_be_another_and_says_why(name):
    with pytest.raises(ValueError, match=f"^{name} cannot be sharded: .*{HEAVYBALL_REFUSED[name]}"):
        verdict_on(getattr(pytest.importorskip("heavyball"), name))


@pytest.mark.optimizers
def test_heavyballs_muon_is_refused_for_its_random_rounding_and_for_nothing_else():
    heavyball = pytest.importorskip("heavyball")
    assert verdict_on(heavyball.Muon, torch.float64)[:3] == (False, False, DIFFERS)  # there it rounds nothing
    assert "random" in examine(heavyball.Muon, {}, {}, torch.zeros(3), vouched=True).reason


@pytest.mark.optimizers
def test_heavyballs_scion_that_initializes_by_position_is_refused():
    told = "^Scion cannot be sharded: the update of one parameter depends on the others"
    with pytest.raises(ValueError, match=told):  # in float64, where it rounds nothing at random
        verdict_on(pytest.importorskip("heavyball").Scion, torch.float64)


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


def test_random_steps_are_refused_unless_vouched_for_and_then_need_whole_tensors_and_one_step():
    """A rank draws other numbers for its parameters than the plain optimizer would."""
    with pytest.raises(ValueError, match=r"^DrawsNoise cannot be sharded: .*random numbers .*differs by up to \d"):
        verdict_on(DrawsNoise)
    verdict = examine(DrawsNoise, {}, {}, torch.zeros(3), vouched=True)
    assert verdict[:2] == (False, False)
    assert "random" in verdict.reason


class DrawsInVain(Rule):
    """Draws random numbers, but nothing depends on them."""

    def update(self, param, group):
        torch.rand(3)
        return param.grad


def test_random_numbers_that_do_nothing_are_no_reason():
    assert verdict_on(DrawsInVain)[:3] == (True, True, "")


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


class StacksEqualShapes(Rule):
    """Steps matrices of one shape together, and scales them together."""

    def before(self, groups):
        self._norms = {}
        for param in (p for group in groups for p in group["params"]):
            self._norms[param.shape] = self._norms.get(param.shape, 1.0) + float(param.grad.norm())

    def update(self, param, group):
        return param.grad / self._norms[param.shape]


class CountsParameters(Rule):
    """A counter that advances with every parameter, not with every step. (It does nothing yet.)"""

    def update(self, param, group):
        group["k"] = group.get("k", 0) + 1
        return param.grad


class RemembersTheFirstNorm(Rule):
    """Something of all gradients that is never written again. (It does nothing yet.)"""

    def before(self, groups):
        for group in groups:
            group.setdefault("first", float(sum(p.grad.norm() for p in group["params"])))


class CountsElsewhere(Rule):
    """Notes in the state of every parameter how many there are. (It does nothing.)"""

    def before(self, groups):
        self._count = sum(len(group["params"]) for group in groups)

    def update(self, param, group):
        self.state[param]["count"] = self._count
        return param.grad


# What is refused, and what the message names.
COUPLED_RULES = {
    ClipsGlobalNorm: r"the parameter differs by up to \d",
    SumsOnGroup: r"option 'estimate' of the group is [\d.]+ alone and [\d.]+ with them",
    FollowsTheParameterBefore: r"the parameter differs by up to \d",
    StacksEqualShapes: r"the parameter differs by up to \d",
    CountsParameters: r"option 'k' of the group is 12 alone and 36 with them",
    RemembersTheFirstNorm: r"option 'first' of the group is [\d.]+ alone and [\d.]+ with them",
    CountsElsewhere: r"state 'count' is 1 alone and 3 with them",
}


@pytest.mark.parametrize("vouched", [False, True])
@pytest.mark.parametrize("rule", COUPLED_RULES, ids=lambda rule: rule.__name__)
def test_parameters_that_depend_on_each_other_are_refused_by_name_and_what_differed_is_told(rule, vouched):
    told = rf"^{rule.__name__} cannot be sharded: .*depends on the others .*{COUPLED_RULES[rule]}"
    with pytest.raises(ValueError, match=told):
        examine(rule, {}, {}, torch.zeros(2), vouched=vouched)


class NotesTheSize(Rule):
    """Notes on the group what there is in it, once, and never uses it, like heavyball's param_count."""

    def before(self, groups):
        for group in groups:
            group.setdefault("count", sum(p.numel() for p in group["params"]))
            group.setdefault("nested", {"shapes": [tuple(p.shape) for p in group["params"]]})


class ClockWithTheFirst(Rule):
    """Counts steps with the first parameter of the group, like heavyball's step."""

    def before(self, groups):
        for group in groups:
            state = self.state[group["params"][0]]
            state["step"] = state.get("step", 0) + 1


@pytest.mark.parametrize("rule", [NotesTheSize, ClockWithTheFirst])
def test_bookkeeping_that_does_nothing_does_not_couple(rule):
    verdict = verdict_on(rule)
    assert verdict[:3] == (True, False, "")
    assert verdict.notes == (("count", "nested") if rule is NotesTheSize else ())


class ActsOnTheSize(NotesTheSize):
    def update(self, param, group):
        return param.grad / group["count"]


class AveragesWithTheFirst(ClockWithTheFirst):
    """A value that is kept with the first parameter, but is no clock."""

    def before(self, groups):
        for group in groups:
            self.state[group["params"][0]]["norm"] = float(group["params"][0].grad.norm())


@pytest.mark.parametrize(
    ("rule", "told"), [(ActsOnTheSize, "the parameter"), (AveragesWithTheFirst, "state 'norm' is")]
)
def test_bookkeeping_that_does_something_couples(rule, told):
    with pytest.raises(ValueError, match=rf"^{rule.__name__} cannot be sharded: .*depends on the others .*{told}"):
        verdict_on(rule)


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


class RoundsAtMultiples(Rule):
    """Rounds in blocks, but only tensors of at least 4096 elements that are a multiple of the block."""

    block = 256
    least = 4096

    def update(self, param, group):
        flat = param.grad.reshape(-1)
        if flat.numel() < self.least or flat.numel() % self.block:
            return param.grad
        blocks = flat.view(-1, self.block)
        scale = blocks.abs().amax(dim=1, keepdim=True)
        return ((blocks / scale).mul(15).round().div(15) * scale).view_as(param)


class RoundsAt1024(RoundsAtMultiples):
    block = 1024


class RoundsAt4096(RoundsAtMultiples):
    block = 4096


class RoundsSmallBlocks(RoundsAtMultiples):
    """Blocks that lie within every aligned cut, but not within cuts anywhere."""

    block = 16
    least = 16


class ListOfTensors(Rule):
    def update(self, param, group):
        self.state[param]["history"] = [param.grad.clone()]
        return param.grad


WHOLE_ONLY = {
    TrustRatio: "parameter differs",
    BlockwiseState: "parameter differs",
    RowState: "'rows' has another shape",
    OneNumber: "'norm' differs",
    ListOfTensors: "'history' is a list with tensors in it, which is carried whole",
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


@pytest.mark.parametrize("rule", [RoundsAtMultiples, RoundsAt1024, RoundsAt4096, RoundsSmallBlocks])
def test_what_rounds_in_blocks_only_at_some_sizes_needs_whole_tensors(rule):
    assert verdict_on(rule)[:3] == (False, True, "the updated parameter differs between whole and in pieces")


class Codes(Tensor):
    """A tensor that is made of two others."""

    def __new__(cls, codes, scale):
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


class CodedState(Rule):
    def update(self, param, group):
        state = self.state[param].setdefault("coded", [Codes(torch.zeros_like(param), torch.zeros(()))])
        state[0].codes.add_(param.grad)
        state[0].scale.add_(1)
        return param.grad


def test_states_made_of_several_tensors_are_compared_by_their_parts_and_carried_whole():
    verdict = verdict_on(CodedState)
    assert verdict[:2] == (False, True)
    assert verdict.reason == "state 'coded' is a list with tensors in it, which is carried whole"
    assert verdict.subclasses == (Codes,)
    assert verdict_on(Rule).subclasses == ()


class Labelled(Tensor):
    pass


class LabelledState(Rule):
    def update(self, param, group):
        self.state[param]["nested"] = {"sum": param.grad.clone().as_subclass(Labelled)}
        return param.grad


class SetOfObjects(Rule):
    def update(self, param, group):
        self.state[param]["seen"] = {"of": [{Unknown}]}
        return param.grad


CANNOT_BE_CARRIED = {
    ObjectState: "state 'preconditioner' .* got Unknown",
    SetOfObjects: "state 'seen' .* got type",
    LabelledState: "state 'nested' .* holds a Labelled",
}


@pytest.mark.parametrize("vouched", [False, True])
@pytest.mark.parametrize("rule", CANNOT_BE_CARRIED, ids=lambda rule: rule.__name__)
def test_a_state_that_cannot_be_carried_is_refused_by_the_names_of_the_optimizer_and_the_state(rule, vouched):
    with pytest.raises(ValueError, match=rf"^{rule.__name__} cannot be sharded: its {CANNOT_BE_CARRIED[rule]}"):
        examine(rule, {}, {}, torch.zeros(3), vouched=vouched)


class SetInState(Rule):
    def update(self, param, group):
        self.state[param].setdefault("done", set()).add("init")
        return param.grad


def test_a_set_of_plain_data_can_be_carried():
    assert verdict_on(SetInState)[:3] == (True, True, "")


class KeepsBeside(Rule):
    """Warms up by a counter that its state dict has beside state and groups."""

    k, acts = 0, True

    def before(self, groups):
        self.k += 1

    def update(self, param, group):
        return param.grad * min(1.0, self.k / 10) if self.acts else param.grad

    def state_dict(self):
        return {**super().state_dict(), "clock": self.k}

    def load_state_dict(self, state_dict):
        self.k = state_dict.get("clock", 0)
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


class KeepsNothingNeeded(KeepsBeside):
    acts = False


def test_what_a_state_dict_has_beside_state_and_groups_must_not_be_needed_to_go_on():
    told = r"^KeepsBeside cannot be sharded: its state dict keeps 'clock' beside .*differs by up to \d"
    with pytest.raises(ValueError, match=told):
        verdict_on(KeepsBeside)
    assert verdict_on(KeepsNothingNeeded)[:3] == (True, False, "")


class AnotherForm(Rule):
    def state_dict(self):
        return {"parts": [super().state_dict()]}


def test_a_state_dict_of_another_form_is_refused():
    with pytest.raises(ValueError, match=r"^AnotherForm cannot be sharded: .* it has 'parts'"):
        verdict_on(AnotherForm)


def test_the_verdict_says_whether_a_step_consumes_the_gradients():
    class Consumes(Rule):
        def step(self, closure=None):
            super().step()
            for group in self.param_groups:
                for param in group["params"]:
                    param.grad = None

    assert verdict_on(Consumes).consumes
    assert not verdict_on(Rule).consumes


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


@pytest.mark.parametrize("rule", [torch.optim.AdamW, DrawsNoise, pytest.param(Muon, marks=needs_muon)])
def test_a_probe_leaves_the_random_numbers_as_they_were(rule):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    examine(rule, {}, {}, torch.zeros(3), vouched=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_probe_does_not_depend_on_the_random_numbers():
    def reason(seed):
        torch.manual_seed(seed)
        return examine(DrawsNoise, {}, {}, torch.zeros(3), vouched=True).reason

    assert reason(1) == reason(2)


def test_a_probe_compiles_nothing_and_leaves_the_compiler_as_it_was():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    @torch.compile(backend=backend)
    def double(x):
        return x * 2

    class Compiles(Rule):
        def update(self, param, group):
            return double(param.grad)

    with torch.compiler.set_stance("default"):  # another test of this process may have switched compilers off
        assert verdict_on(Compiles)[:3] == (True, True, "")
        assert compiled == []
        double(torch.ones(3))
        assert len(compiled) == 1


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


def test_an_optimizer_whose_step_wants_an_argument_is_kept_whole():
    class Wants(Rule):
        def step(self, closure=None, *, loss):
            super().step()

    class WantsInSecret(Rule):
        def step(self, closure=None, losses=None):
            super().step()
            losses.append(5)

    for rule, name in ((Wants, "loss"), (WantsInSecret, "losses")):
        verdict = verdict_on(rule)
        assert verdict[:3] == (False, False, f"its step wants an argument ({name}), which a probe does not have")
        assert verdict.unseen


def test_an_optimizer_that_fails_for_another_reason_than_an_argument_is_refused():
    class Differentiates(Rule):  # as AdaHessian does
        def step(self, closure=None, hessian=None):
            torch.autograd.grad(self.param_groups[0]["params"][0].grad.sum(), self.param_groups[0]["params"])

    class Wrong(Rule):
        def step(self, closure=None):
            raise TypeError("no")

    for rule in (Differentiates, Wrong):
        with pytest.raises(ValueError, match="stepping a dense 2D tensor with it failed"):
            verdict_on(rule)


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
