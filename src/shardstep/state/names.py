"""State by name: what parameters are called in a checkpoint, and what of a checkpoint fits an optimizer.

Parameters have the model's names if it is given, else those that the optimizer was built with, else their positions.
Wrappers leave no trace: the name is that in the plain module, as in torch's own checkpoint functions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardstep.params.local_optimizer import options_of
from shardstep.params.option_facts import option_texts
from shardstep.params.sharded_parameters import ShardedParameters
from shardstep.state.shards import filled, local_part, sharded_states, unkeyed

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


# --- state by name --------------------------------------------------------------------------------------------------


def named_form(
    param_groups: Sequence[Mapping[str, Any]],
    names: Mapping[Tensor, str],
    held: ShardedParameters,
    optimizer: Optimizer,
    *,
    blanks: bool = True,
) -> dict[str, Any]:
    """The state of an optimizer by name. A parameter of which this rank has no piece gets an empty entry."""
    entries = sharded_states(held, optimizer, blanks=blanks)
    state: dict[str, Any] = {names[param]: entries.get(index, {}) for index, param in held.given.items()}
    state.update((str(key), value) for key, value in unkeyed(optimizer.state).items())
    return {"state": state, "param_groups": named_groups(param_groups, names)}


def named_groups(param_groups: Sequence[Mapping[str, Any]], names: Mapping[Tensor, str]) -> list[dict[str, Any]]:
    """The groups, with copies of their options and names for parameters."""
    return [
        {**copy.deepcopy(options_of(dict(group))), "params": [names[param] for param in group["params"]]}
        for group in param_groups
    ]


class Differences(NamedTuple):
    """How a checkpoint and an optimizer (or model) differ."""

    missing: list[str]  # not in the checkpoint
    unexpected: list[str]  # only in the checkpoint
    misshapen: list[str]  # with what was expected and found

    def __bool__(self) -> bool:
        return any(self)

    def __str__(self) -> str:
        parts = [f"{kind}: {_shortened(names)}" for kind, names in zip(_KINDS, self, strict=True) if names]
        return "; ".join(parts)


REMEDY = "Pass strict=False to load what fits; the rest starts empty."
_KINDS = ("missing in the checkpoint", "unexpected", "wrongly shaped")


def _shortened(names: list[str], most: int = 20) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def compare_names(saved_groups: Sequence[Mapping[str, Any]], names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Which names are missing in the saved groups, and which are unexpected."""
    saved = dict.fromkeys(name for group in saved_groups for name in group["params"])
    mine = dict.fromkeys(names)
    return [name for name in mine if name not in saved], [name for name in saved if name not in mine]


def check_named_alike(saved_groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """ValueError if one side has names and the other positions: then nothing can be compared."""
    saved = [str(name) for group in saved_groups for name in group["params"]]
    if saved and names and are_positions(saved) != are_positions(names):
        has, lacks = ("checkpoint", "optimizer") if are_positions(names) else ("optimizer", "checkpoint")
        raise ValueError(
            f"the {has} has parameter names ({(names if lacks == 'checkpoint' else saved)[0]!r}, ...) but the {lacks} "
            "has positions. Pass model=... when saving and when loading."
        )


def options_by_name(
    saved_groups: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], strict: bool
) -> list[dict[str, Any]]:
    """The options of each of ``groups`` (with names as parameters) as they were saved with its parameters.

    A group of new parameters keeps its own. One that joins parameters whose options differ keeps its own, too, unless
    ``strict``: then ValueError.
    """
    group_of = {name: position for position, saved in enumerate(saved_groups) for name in saved["params"]}
    chosen = []
    for position, group in enumerate(groups):
        sources = list(dict.fromkeys(group_of[name] for name in group["params"] if name in group_of))
        if not group["params"] and position < len(saved_groups) and not saved_groups[position]["params"]:
            sources = [position]
        wanted = [options_of(dict(saved_groups[source])) for source in sources]
        if any(option_texts(options) != option_texts(wanted[0]) for options in wanted[1:]):
            if strict:
                raise ValueError(
                    f"parameter group {position} expects options that were saved together, but its parameters come "
                    f"from the saved groups {sources}, whose options differ. Pass strict=False to keep its own."
                )
            wanted = []
        chosen.append(copy.deepcopy(wanted[0]) if wanted else options_of(dict(group)))
    return chosen


class Loadable(NamedTuple):
    """State to load, in the terms of one optimizer on this rank."""

    entries: dict[int, Any]  # of this rank's pieces, by parameter index
    others: dict[Any, Any]  # state that belongs to no parameter
    options: list[dict[str, Any]]  # of each group; with "param_names" if they are loaded too


def from_named(
    form: Mapping[str, Any],
    param_groups: Sequence[Mapping[str, Any]],
    names: Mapping[Tensor, str],
    held: ShardedParameters,
    strict: bool,
) -> Loadable:
    """This rank's pieces of a state dict by name. ValueError if it does not fit and ``strict``."""
    there = [str(name) for group in form["param_groups"] for name in group["params"]]
    new = {found: name for name, found in saved_names(names.values(), there).items()}
    saved_groups = [{**group, "params": [new.get(n, n) for n in group["params"]]} for group in form["param_groups"]]
    state = {new.get(name, name): value for name, value in form["state"].items()}
    check_named_alike(saved_groups, list(names.values()))
    differences = Differences(*compare_names(saved_groups, names.values()), [])
    if strict and differences:
        raise ValueError(f"the sharded state dict expects the names of this optimizer, but {differences}. {REMEDY}")
    entries = {}
    for index, piece in held.pieces.pieces.items():
        entry, spec = filled(state.get(names[held.given[index]])), held.layout.spec_of[index]
        if entry:
            find_class = partial(held.find_state_class, index)
            entries[index] = local_part(entry, spec, piece, find_class, "of the loaded form", keep=True)
    known = {*names.values(), *(name for group in saved_groups for name in group["params"])}
    others = {key: value for key, value in state.items() if key not in known}
    return Loadable(entries, others, options_by_name(saved_groups, named_groups(param_groups, names), strict))
