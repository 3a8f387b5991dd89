"""State dicts for torch's ``get_optimizer_state_dict`` and ``set_optimizer_state_dict``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.comm.codec import decode, dtype_name, dtype_of, encode
from shardstep.comm.process_group import Group
from shardstep.params.masters import ROUNDING
from shardstep.state.dcp_caller import Request, flat_dict

_DEVICE = "shardstep_device"  # a key that no optimizer has


class Template(NamedTuple):
    """What is like a dict that DCP is about to load."""

    states: dict[int, dict[str, Any]]  # by position: stand-ins without memory, which DCP replaces one by one
    rounding: list[list[str]]  # by group: the options of random rounding that it has

    def with_its_options(self, form: dict[str, Any]) -> dict[str, Any]:
        """``form`` with the options of random rounding that the dict has. (torch raises if the dict has more.)"""
        groups = [{key: value for key, value in group.items() if key not in ROUNDING} for group in form["param_groups"]]
        for group, names in zip(groups, self.rounding, strict=False):
            group.update(dict.fromkeys(names, 0))
        return {**form, "param_groups": groups}


def template(group: Group, wanted: Request, device: torch.device) -> Template:
    """A template of the dict that DCP is about to load. Collective if only rank 0 has the dict."""
    described, rounding = _describe(wanted.loading or {}), _rounding_in(wanted.loading or {})
    if wanted.broadcast:
        described, rounding = collectives.move_json(group, [described, rounding], 0, None)
    states: dict[int, dict[str, Any]] = {}
    for position, tree, metas in described:
        tensors = [torch.empty((), dtype=dtype_of(dtype), device=device).expand(shape) for dtype, shape in metas]
        states[position] = decode(tree, tensors)
    if not any(len(shape) for _, _, metas in described for _, shape in metas):
        states.setdefault(0, {})[_DEVICE] = torch.empty(
            1, dtype=torch.float32, device=device
        )  # DCP asks for the device of any tensor
    return Template(states, rounding)


def _rounding_in(form: Mapping[str, Any]) -> list[list[str]]:
    return [[key for key in ROUNDING if key in saved] for saved in form.get("param_groups", ())]


def _describe(form: Mapping[str, Any]) -> list[Any]:
    described = []
    names = [name for saved in form.get("param_groups", ()) for name in saved["params"]]
    for position, name in enumerate(names):
        entry = form["state"].get(name)
        if entry:
            leaves: list[Tensor] = []
            tree = encode(entry, lambda leaf, leaves=leaves: leaves.append(leaf) or len(leaves) - 1)
            described.append([position, tree, [[dtype_name(leaf.dtype), list(leaf.shape)] for leaf in leaves]])
    return described


def unflattened(form: dict[str, Any]) -> dict[str, Any]:
    """The dict that DCP passes to ``load_state_dict``, without our stand-in and with the state that DCP left out.

    From a flattened dict DCP takes only what the optimizer has state for. A new optimizer has none.
    """
    states = form.get("state") if isinstance(form, Mapping) else None
    if not isinstance(states, Mapping):
        return form
    for key, entry in states.items():
        if isinstance(entry, Mapping) and _DEVICE in entry:
            rest = {name: value for name, value in entry.items() if name != _DEVICE}
            return {**form, "state": {**states, key: rest}}
    flat = flat_dict()
    if flat is None:
        return form
    names = [name for group in form["param_groups"] for name in group["params"]]
    return {**form, "state": {**form["state"], **_grouped(flat, names)}}


def _grouped(flat: Mapping[str, Any], names: list[str]) -> dict[str, dict[str, Any]]:
    """``state.<name>.<key>`` by name and key; of two names that fit, the longer."""
    known, grouped = set(names), {}
    for key, value in flat.items():
        parts = key.split(".")
        ends = (end for end in range(len(parts) - 1, 1, -1) if ".".join(parts[1:end]) in known)
        end = next(ends, None) if parts[0] == "state" else None
        if end is None:
            continue
        entry: dict[str, Any] = grouped.setdefault(".".join(parts[1:end]), {})
        for part in parts[end:-1]:
            entry = entry.setdefault(part, {})
        entry[parts[-1]] = value
    return grouped
