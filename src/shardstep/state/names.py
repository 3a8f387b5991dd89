"""What parameters are called in a checkpoint.

By the model's names if it is given, else by the names that the optimizer was built with, else by position. Wrappers
leave no trace: the name is that of the plain module, as torch's own checkpoint functions have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

# Modules that torch puts around others (torch.compile, activation checkpointing), as parts of a name.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def unwrapped(model: Module) -> Module:
    """The module inside DistributedDataParallel and torch.compile, in any order."""
    while True:
        compiled = dict(model.named_children()).get("_orig_mod")
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif compiled is not None:
            model = compiled
        else:
            return model


def clean(name: str) -> str:
    """A parameter's name without the wrappers'."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def names_in(model: Module) -> dict[Tensor, str]:
    """The parameters of a model and their names; one that is used twice has its first."""
    return {param: clean(name) for name, param in unwrapped(model).named_parameters()}


def names_of(param_groups: Sequence[Mapping[str, Any]], model: Module | None) -> dict[Tensor, str]:
    """The names of all parameters of an optimizer. ValueError if the model does not have them all."""
    params = dict.fromkeys(param for group in param_groups for param in group["params"])
    if model is not None:
        known = names_in(model)
        strange = [position for position, param in enumerate(params) if param not in known]
        if strange:
            raise ValueError(
                f"model expects to have all parameters of the optimizer, but {len(strange)} of {len(params)} are not "
                f"in it (the first is parameter {strange[0]}). Pass the model that the optimizer was built for."
            )
        return {param: known[param] for param in params}
    names: dict[Tensor, str] = {}
    for group in param_groups:
        for param, name in zip(group["params"], group.get("param_names") or (), strict=False):
            names.setdefault(param, clean(name.removeprefix("module.")))
    if names.keys() == params.keys() and len(set(names.values())) == len(names):
        return names
    return positions_of(param_groups)


def positions_of(param_groups: Sequence[Mapping[str, Any]]) -> dict[Tensor, str]:
    """Positions over all groups, for parameters without names."""
    params = dict.fromkeys(param for group in param_groups for param in group["params"])
    return {param: str(position) for position, param in enumerate(params)}


def are_positions(names: Iterable[str]) -> bool:
    """Whether these are positions and not names."""
    return all(name.isdecimal() for name in names)
