"""The state of an optimizer by name, in pieces: what sharded checkpoints are written from and read into.

The form is the one that torch's own checkpoint functions use, ``{"state": {name: {...}}, "param_groups": [...]}`` with
names for parameters, so that everything which reads theirs reads ours. Its tensors are ``StateShard``s.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from shardstep.layout.specs import ParamSpec, Piece
from shardstep.params.local_optimizer import options_of
from shardstep.params.option_facts import option_texts
from shardstep.params.tensor_subclasses import opened
from shardstep.state.cutting import check_cut_with, local_part
from shardstep.state.held import HeldParameters
from shardstep.state.master_weights import with_masters, without_old_master
from shardstep.state.names import are_positions, saved_names
from shardstep.state.shard import filled, shard_of_range, shard_of_whole


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """A tree of dicts, lists and tuples with every leaf changed. Tuples become lists: DCP looks into those only."""
    if isinstance(value, Mapping):
        return {key: map_leaves(item, change) for key, item in value.items()}
    if isinstance(value, list) or (isinstance(value, tuple) and any(isinstance(item, Tensor) for item in value)):
        return [map_leaves(item, change) for item in value]
    return change(value)


def sharded_entry(entry: Mapping[str, Any], spec: ParamSpec, piece: Piece, *, blank: bool = False) -> dict[str, Any]:
    """The state of this rank's piece of a parameter, with its tensors as ``StateShard``s of the whole."""

    def shard(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.dim() == 0 or piece.whole:
            return shard_of_whole(leaf, writes=piece.start == 0, blank=blank)
        check_cut_with(leaf, spec, piece)
        return shard_of_range(spec.shape, piece.start, piece.stop, leaf.reshape(-1), blank=blank)

    return map_leaves(opened(entry), shard)


def sharded_states(
    held: HeldParameters, optimizer: Optimizer, *, blanks: bool, shards: bool = True
) -> dict[int, dict[str, Any]]:
    """This rank's state by parameter index.

    ``blanks``: also places to load into, for parameters without any. ``shards``: False leaves what is there plain.
    """
    entries: dict[int, dict[str, Any]] = {}
    state = with_masters(held, optimizer.state)
    for index, piece in sorted(held.pieces.pieces.items()):
        spec, entry = held.layout.spec_of[index], state.get(held.pieces.tensors[index])
        if entry:
            entries[index] = sharded_entry(entry, spec, piece) if shards else dict(entry)
        elif blanks and held.given[index].requires_grad:
            # (DCP would step the optimizer itself with zero gradients, which changes counters and moments.)
            blank = held.blank_state(index, optimizer.param_groups)
            entries[index] = sharded_entry(blank, spec, piece, blank=True)
    return entries


def named_form(
    param_groups: Sequence[Mapping[str, Any]],
    names: Mapping[Tensor, str],
    held: HeldParameters,
    optimizer: Optimizer,
    *,
    blanks: bool,
) -> dict[str, Any]:
    """The whole form of an optimizer. A parameter of which this rank has no piece gets an empty entry."""
    entries = sharded_states(held, optimizer, blanks=blanks)
    state: dict[str, Any] = {names[param]: entries.get(index, {}) for index, param in held.given.items()}
    state.update((str(key), value) for key, value in optimizer.state.items() if not isinstance(key, Tensor))
    return {"state": state, "param_groups": named_groups(param_groups, names)}


def named_groups(param_groups: Sequence[Mapping[str, Any]], names: Mapping[Tensor, str]) -> list[dict[str, Any]]:
    """The groups, with copies of their options and names for parameters."""
    return [
        {**copy.deepcopy(options_of(dict(group))), "params": [names[param] for param in group["params"]]}
        for group in param_groups
    ]


def renamed(form: Mapping[str, Any], new: Mapping[str, str]) -> dict[str, Any]:
    """A form with other names for parameters; what ``new`` lacks keeps its name."""
    groups = [{**group, "params": [new.get(name, name) for name in group["params"]]} for group in form["param_groups"]]
    return {"state": {new.get(name, name): value for name, value in form["state"].items()}, "param_groups": groups}


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
    """A form that fits an optimizer, in the optimizer's terms."""

    entries: dict[int, dict[str, Any]]  # of this rank's pieces, by parameter index
    others: dict[str, Any]  # state that belongs to no parameter
    options: list[dict[str, Any]]  # of each group


def loadable(
    form: Mapping[str, Any],
    param_groups: Sequence[Mapping[str, Any]],
    names: Mapping[Tensor, str],
    held: HeldParameters,
    strict: bool,
) -> Loadable:
    """Take a form apart. ValueError if it does not fit and ``strict``, or if names and positions are mixed."""
    saved = [str(name) for group in form["param_groups"] for name in group["params"]]
    form = renamed(form, {there: name for name, there in saved_names(names.values(), saved).items()})
    saved_groups, state = form["param_groups"], form["state"]
    check_named_alike(saved_groups, list(names.values()))
    differences = Differences(*compare_names(saved_groups, names.values()), [])
    if strict and differences:
        raise ValueError(f"the sharded state dict expects the names of this optimizer, but {differences}. {REMEDY}")
    options = options_by_name(saved_groups, named_groups(param_groups, names), strict)
    entries = {}
    for index, piece in held.pieces.pieces.items():
        entry = state.get(names[held.given[index]])
        if entry:
            spec, find_class = held.layout.spec_of[index], partial(held.find_state_class, index)
            entries[index] = local_part(
                without_old_master(filled(entry)), spec, piece, find_class, "of the loaded form"
            )
    known = {*names.values(), *(name for group in saved_groups for name in group["params"])}
    return Loadable(entries, {key: value for key, value in state.items() if key not in known}, options)
