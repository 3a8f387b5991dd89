"""Running the local optimizer: the user's class over this rank's pieces, all of them or a part."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

# What a group of the local optimizer has for itself; all its other keys are options, the same on both sides.
_OWN_KEYS = ("params", "param_names")


def copy_options(
    source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]], without: Container[str] = ()
) -> None:
    """Copy every option but those ``without`` from the groups of ``source`` to those of ``target``. Deletes nothing."""
    for from_group, to_group in zip(source, target, strict=True):
        for key, value in from_group.items():
            if key not in _OWN_KEYS and key not in without:
                to_group[key] = value


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group: everything but its parameters and their names."""
    return {key: value for key, value in group.items() if key not in _OWN_KEYS}


def unhooked_step(optimizer: Optimizer) -> Callable[..., Any]:
    """The optimizer's step without torch's profiling and hook wrapper.

    The sharded optimizer's own step is wrapped already: through it the hooks that are registered for all
    optimizers fire once a step, not once for it and again for every part of the local step.
    """
    if "step" in vars(optimizer):  # somebody patched this instance: that is the step they want
        return optimizer.step
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = inspect.getattr_static(step, "__wrapped__", step)
    return step.__get__(optimizer)


def fire_pre_hooks(optimizer: Optimizer, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Call the step hooks that were registered on the local optimizer itself; return the arguments they leave."""
    args: Any = (optimizer,)
    for hook in optimizer._optimizer_step_pre_hooks.values():
        changed = hook(optimizer, args, kwargs)
        if changed is not None:
            args, kwargs = changed
    return kwargs


def fire_post_hooks(optimizer: Optimizer, kwargs: dict[str, Any]) -> None:
    """The counterpart of ``fire_pre_hooks``."""
    for hook in optimizer._optimizer_step_post_hooks.values():
        hook(optimizer, (optimizer,), kwargs)


def run_step(optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
    """Step without a closure if the optimizer allows it, else with ``closure``."""
    step = unhooked_step(optimizer)
    parameter = inspect.signature(step).parameters.get("closure")
    if parameter is not None and parameter.default is inspect.Parameter.empty:
        return step(closure)
    return step()


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """For trying out an optimizer: it draws none of the program's random numbers, compiles nothing, warns nobody.

    Optimizers that compile their steps would do so for every shape that is tried, which takes minutes.
    """
    devices = [device] if device.type != "cpu" else []
    device_type = device.type if devices else "cuda"
    random = torch.random.fork_rng(devices, device_type=device_type)
    with torch.compiler.set_stance("force_eager"), random, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def step_subset(optimizer: Optimizer, subset: Mapping[int, dict[str, list]]) -> Iterator[None]:
    """Within this context the optimizer has only the groups in ``subset``, by position, with only what is in there.

    That is the parameters to step and, if the group has names, their names.
    """
    groups = optimizer.param_groups
    whole = {position: {key: groups[position][key] for key in part} for position, part in subset.items()}
    try:
        for position, part in subset.items():
            groups[position].update(part)
        optimizer.param_groups = [groups[position] for position in subset]
        yield
    finally:
        optimizer.param_groups = groups
        for position, part in whole.items():
            groups[position].update(part)


def inner_optimizers(thing: Any) -> Iterator[tuple[str, Optimizer]]:
    """The optimizers among the attributes of an object, also in lists and dicts, with the attributes' names."""
    for name, value in getattr(thing, "__dict__", {}).items():
        values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        for found in values:
            if isinstance(found, Optimizer):
                yield name, found
