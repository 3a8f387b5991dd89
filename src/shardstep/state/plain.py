"""State dicts in torch's plain form: making one, and loading one completely or not at all."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from shardstep.comm.codec import live_option, option_text
from shardstep.params.local_optimizer import options_of
from shardstep.params.option_facts import option_facts
from shardstep.state.cutting import local_part
from shardstep.state.held import HeldParameters
from shardstep.state.master_weights import LoadedMasters, take_masters, without_old_master
from shardstep.state.named import map_leaves
from shardstep.state.shard import StateShard, filled, is_sharded


class StateDict(dict[str, Any]):
    """A state dict that lacks state of other ranks, or has blanks: not to be written to a file as it is.

    What is inside is plain. ``lacks`` says what is missing and what to do; pickling raises it. Without it the dict
    is pickled as the empty form: no rank has state yet.
    """

    lacks = ""
    is_elsewhere = False  # other ranks have all of it

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        if self.lacks:
            raise RuntimeError(self.lacks)
        entries = {key: filled(entry) for key, entry in self["state"].items()}
        state = {key: entry for key, entry in entries.items() if entry}
        # An OrderedDict, because torch.load(weights_only=True) makes no other dict by its class.
        return OrderedDict, (), None, None, iter({**self, "state": state}.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> StateDict:
        return self._twin({key: copy.deepcopy(value, memo) for key, value in self.items()})

    def __copy__(self) -> StateDict:
        return self._twin(self)

    copy = __copy__  # type: ignore[assignment]

    def _twin(self, items: Mapping[str, Any]) -> StateDict:
        twin = StateDict(items)
        twin.lacks, twin.is_elsewhere = self.lacks, self.is_elsewhere
        return twin


# To another process of this rank, as dcp.async_save with AsyncCheckpointerType.PROCESS sends it. (See StateShard.)
ForkingPickler.register(StateDict, lambda state_dict: (dict, (dict(state_dict),)))


def plain_form(param_groups: Sequence[dict[str, Any]], states: Mapping[Any, Any]) -> dict[str, Any]:
    """``{"state": ..., "param_groups": ...}`` with parameters as indices."""
    numbers: dict[int, int] = {}
    packed, start = [], 0
    for group in param_groups:
        for position, param in enumerate(group["params"], start):
            numbers.setdefault(id(param), position)
        start += len(group["params"])
        packed.append(
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [numbers[id(param)] for param in group["params"]]}
        )
    return {"state": {key: outer_copy(value) for key, value in states.items()}, "param_groups": packed}


def outer_copy(value: Any) -> Any:
    """A copy of the outer dict, for a caller that may edit it."""
    return dict(value) if isinstance(value, dict) else value


class Loaded(NamedTuple):
    """What was loaded into a local optimizer."""

    undo: Callable[[], None]
    found: bool  # whether there was any state for this rank
    masters: LoadedMasters  # that came with it


def load_local(
    state_dict: Mapping[str, Any],
    param_groups: Sequence[dict[str, Any]],
    held: HeldParameters,
    optimizer: Optimizer,
) -> Loaded:
    """Load this rank's part into the local optimizer, by its own rules. Masters are left to the caller.

    If it raises, the optimizer is as it was.
    """
    _check_form(state_dict, param_groups)
    return _load_undoably(_local_form(state_dict, held, optimizer), held, optimizer)


def load_pieces(
    entries: Mapping[int, Mapping[str, Any]],
    others: Mapping[Any, Any],
    options: Sequence[dict[str, Any]],
    held: HeldParameters,
    optimizer: Optimizer,
) -> Loaded:
    """``load_local`` for state that is in pieces already.

    Args:
        entries: by parameter index, the state of this rank's piece.
        others: state that belongs to no parameter, by key.
        options: of each group.
    """
    local: dict[str, Any] = {"state": copy.deepcopy(dict(others)), "param_groups": []}
    number = 0
    for group, chosen, indices in zip(optimizer.param_groups, options, held.indices, strict=True):
        live = options_of(group)
        kept = {key: live_option(value, live.get(key)) for key, value in chosen.items()}
        form = {**kept, "params": list(range(number, number + len(indices)))}
        if "param_names" in group:
            form["param_names"] = list(group["param_names"])
        local["param_groups"].append(form)
        local["state"].update((number + i, entries[index]) for i, index in enumerate(indices) if entries.get(index))
        number += len(indices)
    return _load_undoably(local, held, optimizer)


def _load_undoably(local: dict[str, Any], held: HeldParameters, optimizer: Optimizer) -> Loaded:
    found = bool(local["state"])
    masters = take_masters(local, held)
    before = optimizer.state, optimizer.param_groups
    attributes = dict(vars(optimizer))

    def undo() -> None:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        optimizer.state, optimizer.param_groups = before

    try:
        optimizer.load_state_dict(local)
        _complete(optimizer, held)
    except BaseException:
        undo()
        raise
    return Loaded(undo, found, masters)


def _check_form(state_dict: Any, param_groups: Sequence[dict[str, Any]]) -> None:
    """Check that it is a full state dict for these groups, before anything is changed."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"load_state_dict expects a dict but got {_text(state_dict)}. {_REMEDY}")
    if isinstance(state_dict, StateDict) and state_dict.is_elsewhere:
        raise ValueError(f"load_state_dict expects the full state on every rank. {state_dict.lacks}")
    if OLD_MARK in state_dict:
        raise ValueError(
            "load_state_dict expects the full state, but this dict was taken on a rank that did not receive it. "
            f"Load the one of rank {state_dict[OLD_MARK]}, to which the state was consolidated."
        )
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            "load_state_dict expects a dict with 'state' and 'param_groups' but got the keys "
            f"{sorted(map(str, state_dict))}. {_REMEDY}"
        )
    states, saved = state_dict["state"], state_dict["param_groups"]
    if not isinstance(states, Mapping):
        raise ValueError(f"load_state_dict expects a dict under 'state' but got {_text(states)}. {_REMEDY}")
    if not isinstance(saved, (list, tuple)) or not all(isinstance(g, Mapping) and "params" in g for g in saved):
        raise ValueError(
            "load_state_dict expects a list of dicts with the key 'params' under 'param_groups' but got "
            f"{_text(saved)}. {_REMEDY}"
        )
    if len(saved) != len(param_groups):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: expects {len(param_groups)} but got "
            f"{len(saved)}. Build the optimizer with the same groups as the one that was saved."
        )
    for position, (group, saved_group) in enumerate(zip(param_groups, saved, strict=True)):
        if len(group["params"]) != len(saved_group["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: group "
                f"{position} expects {len(group['params'])} parameters but got {len(saved_group['params'])}. Build the "
                "optimizer with the same groups as the one that was saved."
            )
        for index in saved_group["params"]:
            if not isinstance(states.get(index, {}), Mapping):
                raise ValueError(
                    f"load_state_dict expects a dict as the state of parameter {index} but got {_text(states[index])}. "
                    f"{_REMEDY}"
                )


_REMEDY = "Pass what state_dict() returned."
OLD_MARK = "shardstep_full_state_at_rank"  # in dicts that 0.2 returned on ranks without the full state


def _text(value: Any) -> str:
    return f"a {type(value).__qualname__} ({str(value)[:60]})"


def _local_form(state_dict: Mapping[str, Any], held: HeldParameters, optimizer: Optimizer) -> dict[str, Any]:
    """The dict as the local optimizer would have saved it: its pieces of the state, numbered in its order."""
    saved_groups = state_dict["param_groups"]
    saved_ids = [saved_id for group in saved_groups for saved_id in group["params"]]
    states = state_dict["state"]
    local_state = {key: copy.deepcopy(value) for key, value in states.items() if key not in set(saved_ids)}
    local_groups, number = [], 0
    start = 0
    for saved, indices in zip(saved_groups, held.indices, strict=True):
        local = {**options_of(saved), "params": list(range(number, number + len(indices)))}
        if "param_names" in saved:
            local["param_names"] = [saved["param_names"][index - start] for index in indices]
        local_groups.append(local)
        for index in indices:
            entry = without_old_master(filled(states.get(saved_ids[index])))
            spec, piece = held.layout.spec_of[index], held.pieces.pieces[index]
            if entry:
                find_class = partial(held.find_state_class, index)
                entry = map_leaves(entry, _own_memory)
                local_state[number] = local_part(entry, spec, piece, find_class, "of the loaded dict")
            elif entry is not None and held.blank_state(index, optimizer.param_groups):
                raise ValueError(_EMPTY.format(spec.label))
            number += 1
        start += len(saved["params"])
    return {"state": local_state, "param_groups": local_groups}


def _own_memory(leaf: Any) -> Any:
    """A dict that state_dict returned has the live memory; what is loaded has its own."""
    return copy.deepcopy(leaf) if isinstance(leaf, StateShard) else leaf


_EMPTY = (
    "load_state_dict expects the state of {}, but its entry is empty, although the optimizer makes state for it. Was "
    "the dict consolidated to another rank, or given to set_optimizer_state_dict in flattened form before the first "
    "step? Use the dict of the rank that has the state; or a dict that is not flattened; or shardstep.checkpoint."
)


def _complete(optimizer: Optimizer, held: HeldParameters) -> None:
    """A parameter without state in the dict starts as in a new optimizer (Adagrad makes state when it is built)."""
    missing = [tensor for tensor in held.pieces.tensors.values() if not optimizer.state.get(tensor)]
    if missing and held.builder.has_eager_state:
        fresh = held.builder.fresh_optimizer(optimizer.param_groups)
        for tensor in missing:
            optimizer.state[tensor] = fresh.state[tensor]


def load_options(
    saved_groups: Sequence[Mapping[str, Any]],
    param_groups: Sequence[dict[str, Any]],
    local_groups: Sequence[dict[str, Any]],
) -> None:
    """Set options (and names, if saved) as loaded. As in torch, an option that was not saved is removed."""
    for group, saved, local in zip(param_groups, saved_groups, local_groups, strict=True):
        names = saved.get("param_names", group.get("param_names"))
        params = group["params"]
        group.clear()
        group.update(options_of(local), params=params)
        if names is not None:
            group["param_names"] = list(names)


def facts_of(state_dict: Mapping[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """What must be the same on every rank that loads: it is the same checkpoint, as far as its plain values show."""
    facts = option_facts(state_dict["param_groups"])
    for key, entry in state_dict["state"].items():
        if isinstance(entry, dict) and not is_sharded(entry):
            facts.append((f"state of parameter {key}", {name: _summary(value) for name, value in entry.items()}))
    return facts


def _summary(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}" if value.dim() else f"{value.item()}"
    return option_text(value)
