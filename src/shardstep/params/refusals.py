"""What makes an optimizer one that cannot be sharded. Each function raises a ValueError that says why, or returns."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardstep.comm.codec import encode
from shardstep.params.comparison import (
    MISSING,
    difference_of_tensors,
    equal,
    leaves,
    path_text,
    short_text,
    tensors_in,
    unlike,
)
from shardstep.params.trials import EARLY, STEPS, Subject, Trial, begin, go_on, gradients, run_trial, scattered, seed
from shardstep.state.subclasses import is_subclass, opened

_CARRIED = ("state", "param_groups")  # of a state dict
_OTHER_NUMBERS = 1000  # a phase that no other tensor has


class _Communicates(Exception):
    pass


class _Listening(TorchDispatchMode):
    """Raises when somebody sends something."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise _Communicates
        return func(*args, **(kwargs or {}))


def refuse_communicating(subject: Subject) -> None:
    """An optimizer whose step communicates expects all parameters on every rank."""
    try:
        with _Listening():
            run_trial(subject.build, subject.tensors, gradients(), steps=1)
    except _Communicates:
        raise ValueError(
            f"{subject.name} cannot be sharded: its step sends something to other ranks by itself, for all parameters, "
            "of which a rank has a part. Use an optimizer that only updates."
        ) from None
    except Exception:  # what else may be wrong shows when nobody listens
        return


def refuse_other_forms(name: str, form: dict[str, Any]) -> None:
    """A state dict has to have states and groups."""
    if not form.keys() >= set(_CARRIED):
        raise ValueError(
            f"{name} cannot be sharded: what it keeps cannot be carried to other ranks or into a checkpoint. A state "
            f"dict expects {' and '.join(_CARRIED)} but it has {', '.join(map(repr, form))}. Use the optimizers that "
            "it is made of."
        )


def refuse_unsteppable(name: str, error: Exception) -> NoReturn:
    """Nothing can be seen of an optimizer that cannot step the probe."""
    raise ValueError(
        f"{name} cannot be sharded: stepping a dense 2D tensor with it failed "
        f"({type(error).__name__}: {error}). Use another optimizer, or pass shard='tensor' if you know "
        "that it updates every tensor by itself."
    ) from error


def refuse_uncarriable(name: str, states: Sequence[dict]) -> None:
    """State has to be plain data and tensors."""
    for key, value in (item for state in states for item in state.items()):
        reason = _why_uncarriable(key, value)
        if reason:
            raise ValueError(
                f"{name} cannot be sharded: its state {key!r} cannot be carried to other ranks or into a checkpoint: "
                f"it {reason}"
            )


def _why_uncarriable(key: Any, value: Any) -> str:
    try:
        encode(opened({key: value}), lift=lambda tensor: 0)
    except TypeError as error:
        return str(error)
    for tensor in tensors_in(value):
        if type(tensor) not in (Tensor, torch.nn.Parameter) and not is_subclass(tensor):
            return (
                f"holds a {type(tensor).__qualname__}, which is a tensor that does not say what it is made of "
                "(__tensor_flatten__, __tensor_unflatten__)."
            )
    return ""


def refuse_kept_elsewhere(subject: Subject, form: dict[str, Any]) -> None:
    """What a state dict has beside states and groups is not carried: a new optimizer must go on the same without it."""
    beside = [key for key in form if key not in _CARRIED]
    if not beside:
        return
    optimizer, params = begin(subject.build, subject.tensors)
    go_on(optimizer, params, gradients(), range(EARLY))
    saved = copy.deepcopy(optimizer.state_dict())
    ends = []
    for keys in (saved.keys(), _CARRIED):
        seed(params[0].device)
        loaded, copies = begin(subject.build, [param.detach() for param in params])
        loaded.load_state_dict(copy.deepcopy({key: saved[key] for key in keys}))
        go_on(loaded, copies, gradients(), range(EARLY, STEPS))
        ends.append([param.detach() for param in copies])
    difference = difference_of_tensors(*ends)
    if difference:
        raise ValueError(
            f"{subject.name} cannot be sharded: its state dict keeps {', '.join(map(repr, beside))} beside state and "
            f"param_groups, which is not carried to other ranks or into a checkpoint, and without which it goes on "
            f"otherwise ({difference})."
        )


def refuse_random(name: str, difference: str) -> NoReturn:
    """Random steps on a part of the parameters are not those of the plain optimizer."""
    raise ValueError(
        f"{name} cannot be sharded: its steps draw random numbers (between two runs of the same steps "
        f"{difference}). A rank that steps a part of the parameters draws other numbers for them than the plain "
        "optimizer would, so the weights would not be the same. Pass shard='tensor' if you know that it updates "
        "every tensor by itself and other random numbers will do."
    )


def refuse_coupled(subject: Subject, together: Trial) -> tuple[str, ...]:
    """What is on the group may count steps, and may tell which parameters there are, but not what they did.

    Returns the options that tell which there are.
    """

    @cache
    def elsewhere() -> dict[tuple, Any]:
        """The options with other numbers in the same shapes, after a while."""
        others = [scattered(tensor.shape, tensor, _OTHER_NUMBERS + i) for i, tensor in enumerate(subject.tensors)]
        return leaves(run_trial(subject.build, others, gradients(_OTHER_NUMBERS), steps=EARLY).options)

    notes: dict[str, None] = {}
    for position, tensor in enumerate(subject.tensors):
        alone = run_trial(subject.build, [tensor], gradients(position))
        here = slice(position, position + 1)
        difference = difference_of_tensors(together.early[here] + together.params[here], alone.early + alone.params)
        difference = difference or _difference_of_states(alone.states[0], together, position)
        if difference:
            raise _coupled(subject.name, difference)
        for key, ours, theirs in unlike(alone.options, together.options):
            if not equal(elsewhere().get(key, MISSING), theirs):
                values = f"{short_text(ours)} alone and {short_text(theirs)} with them"
                raise _coupled(subject.name, f"option {path_text(key)} of the group is {values}")
            notes[key[0]] = None  # it does nothing: the parameters are the same
    return tuple(notes)


def _difference_of_states(alone: dict, together: Trial, position: int) -> str:
    for key, ours, theirs in unlike(alone, together.states[position]):
        if theirs is MISSING and any(equal(leaves(state).get(key, MISSING), ours) for state in together.states):
            continue  # a clock of the group, kept with its first parameter
        return f"state {path_text(key)} is {short_text(ours)} alone and {short_text(theirs)} with them"
    return ""


def _coupled(name: str, difference: str) -> ValueError:
    return ValueError(
        f"{name} cannot be sharded: the update of one parameter depends on the others (stepped alone and with others, "
        f"{difference}). Use an optimizer that updates each parameter by itself."
    )
