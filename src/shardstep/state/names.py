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

# Modules that torch (torch.compile, activation checkpointing) and Fabric put around others, as parts of a name.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_forward_module")
# Fabric's wrapper, by name: the package is not imported here. It has the user's module as ``.module``, as DDP has.
_FABRIC = (("lightning.fabric.wrappers", "_FabricModule"), ("lightning_fabric.wrappers", "_FabricModule"))


def unwrapped(model: Any) -> Module:
    """The module inside DistributedDataParallel, torch.compile and Fabric's wrapper, in any order."""
    while True:
        compiled = dict(model.named_children()).get("_orig_mod")
        if isinstance(model, DistributedDataParallel) or _is_fabrics(model):
            model = model.module
        elif compiled is not None:
            model = compiled
        else:
            return model


def _is_fabrics(model: Module) -> bool:
    return any((kind.__module__, kind.__name__) in _FABRIC for kind in type(model).__mro__)


def clean(name: str) -> str:
    """A parameter's name without the wrappers'."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def bare(name: str) -> str:
    """A parameter's name without the wrappers', and without DDP's, which a module of the user may have, too."""
    return clean(name).removeprefix("module.")


def saved_names(names: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
    """Under which of the ``saved`` names each of ``names`` is found: the same one, or one with wrappers' prefixes.

    Such are in checkpoints of older versions, and in those that somebody saved from a wrapped model. A name of which
    there are two such is not found.
    """
    mine, there = set(names), set(saved)
    found = {name: name for name in mine & there}
    wrapped: dict[str, list[str]] = {}
    for name in there - mine:
        for inner in {clean(name), bare(name)} & (mine - there):
            wrapped.setdefault(inner, []).append(name)
    found.update((inner, outer[0]) for inner, outer in wrapped.items() if len(outer) == 1)
    return found


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
            names.setdefault(param, bare(name))
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
