"""Ask an optimizer how it may be sharded, by stepping tiny tensors. A probe decides, not a list of names.

1. Can its state be carried from rank to rank and into files? What cannot is refused now, not at the first save.
2. Are its steps repeatable? Those that draw random numbers are not what the plain optimizer does on a part of its
   parameters: only for a user who vouches for them.
3. Are its parameters independent? Step tensors together, and each alone. LBFGS fails: no shard of it is right.
4. Is it element-wise? Step a tensor whole, and the same tensor in pieces. Bit-equal parameters and states:
   parameters may be cut anywhere.
5. May its step be split? Step tensors together, and one after the other. Schedule-free optimizers, and all
   that keep state on the group, fail: they step once.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from shardstep.params import refusals
from shardstep.params.comparison import equal
from shardstep.params.elementwise import LARGE_SHAPE, PHASE, why_not_elementwise
from shardstep.params.local_optimizer import undisturbed, unhooked_step
from shardstep.params.trials import (
    EARLY,
    Subject,
    Trial,
    begin,
    first_difference,
    gradients,
    loss_of,
    run_trial,
    scattered,
    seed,
)
from shardstep.state.subclasses import classes_in

# Two of them alike: some optimizers stack tensors of one shape.
_SMALL_SHAPES = ((24, 16), (8, 40), (24, 16))


class Verdict(NamedTuple):
    """How an optimizer may be sharded, and why not otherwise."""

    elementwise: bool
    splittable: bool
    reason: str  # what differed; empty if element-wise
    eager: bool = False  # makes state when it is built, before any step
    consumes: bool = False  # its step sets the gradients to None
    subclasses: tuple[type, ...] = ()  # of tensors made of other tensors, that its states are
    notes: tuple[str, ...] = ()  # options in which it notes which parameters there are
    moves_first: bool = False  # its step moves the parameters before it calls the closure, or may do so
    unseen: bool = False  # its step cannot be tried: nobody knows whether it updates every tensor by itself


def examine(
    optimizer_class: Callable[..., Optimizer],
    defaults: dict[str, Any],
    options: dict[str, Any],
    like: Tensor,
    vouched: bool = False,
) -> Verdict:
    """Probe ``optimizer_class`` with the options of one group, on tensors with the device and dtype of ``like``.

    ValueError if it couples its parameters or keeps what cannot be carried; and, unless the user vouched for it, if
    nothing can be seen of that: it cannot step the probe, or its steps are random. One whose step wants an argument
    cannot be tried at all: it is kept whole.
    """

    def build(tensors: Sequence[Tensor]) -> Optimizer:
        group = {"params": list(tensors), **copy.deepcopy(options)}
        return optimizer_class([group], **copy.deepcopy(defaults))

    name = getattr(optimizer_class, "__name__", repr(optimizer_class))
    with undisturbed(like.device):
        seed(like.device)
        tensors = [scattered(shape, like, phase) for phase, shape in enumerate(_SMALL_SHAPES)]
        return _examine(Subject(name, build, tensors), like, vouched)


def _examine(subject: Subject, like: Tensor, vouched: bool) -> Verdict:
    name, build, tensors = subject
    try:
        fresh = build(tensors)
        eager, form = bool(fresh.state), fresh.state_dict()
    except Exception as error:  # the real tensors decide: they raise the same, or the probe's shape is to blame
        return Verdict(False, False, f"it cannot be built over the probe ({error})", moves_first=True)
    refusals.refuse_other_forms(name, form)
    refusals.refuse_communicating(subject)
    try:
        together = run_trial(build, tensors, gradients())
        large = run_trial(build, [scattered(LARGE_SHAPE, like, PHASE)], gradients(), steps=1)
    except Exception as error:
        wanted = _wanted_arguments(fresh, error)
        if wanted:
            reason = f"its step wants an argument ({wanted}), which a probe does not have"
            return Verdict(False, False, reason, eager, moves_first=True, unseen=True)
        if not vouched:
            refusals.refuse_unsteppable(name, error)
        return Verdict(False, False, f"it cannot step the probe ({error})", eager, moves_first=True)
    states = together.states + large.states
    refusals.refuse_uncarriable(name, states)
    refusals.refuse_kept_elsewhere(subject, form)
    found = Verdict(False, False, "", eager, together.consumes, tuple(dict.fromkeys(classes_in(states))))
    difference = first_difference(together, run_trial(build, tensors, gradients()))
    if not difference:
        return _decide(subject, like, together, found)
    if not vouched:
        refusals.refuse_random(name, difference)
    return found._replace(reason=f"its steps are random ({difference})", moves_first=True)


def _wanted_arguments(optimizer: Optimizer, error: Exception) -> str:
    """The names of the arguments of step, besides a closure, for lack of which it may have failed; or nothing.

    An argument with a default may be wanted all the same (``kwarg=None``, and then ``kwarg.append``). What torch itself
    raises, a RuntimeError, is about tensors.
    """
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(unhooked_step(optimizer)).parameters.values()
    others = [parameter for parameter in parameters if parameter.name != "closure" and parameter.kind in named]
    needed = [parameter for parameter in others if parameter.default is inspect.Parameter.empty]
    if not needed and isinstance(error, RuntimeError):
        return ""
    return ", ".join(parameter.name for parameter in needed or others)


def _decide(subject: Subject, like: Tensor, together: Trial, found: Verdict) -> Verdict:
    """The verdict on an optimizer whose steps are repeatable."""
    notes = refusals.refuse_coupled(subject, together)
    reason = why_not_elementwise(subject.build, like)
    one_by_one = run_trial(subject.build, subject.tensors, gradients(), one_by_one=True)
    return found._replace(
        elementwise=not reason,
        splittable=not first_difference(together, one_by_one),
        reason=reason,
        notes=notes,
        moves_first=_moves_first(subject),
    )


def _moves_first(subject: Subject) -> bool:
    """Whether the parameters are others when the closure is called than when the step began."""
    optimizer, params = begin(subject.build, subject.tensors)
    step = unhooked_step(optimizer)
    if "closure" not in inspect.signature(step).parameters:
        return False
    moved = False
    for number in range(EARLY):
        before = [param.detach().clone() for param in params]

        def set_gradients(number: int) -> None:
            for position, param in enumerate(params):
                param.grad = gradients()(number, position, param)

        def closure(number: int = number, before: list[Tensor] = before) -> Tensor:
            nonlocal moved
            moved = moved or not equal(before, [param.detach() for param in params])
            return loss_of(params, set_gradients, number)

        set_gradients(number)
        try:
            step(closure)
        except Exception:  # it wants another kind of closure: nobody can use it with an ordinary one
            return False
    return moved
