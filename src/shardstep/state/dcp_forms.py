"""State dicts for torch's ``get_optimizer_state_dict`` and ``set_optimizer_state_dict``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.comm.codec import decode, dtype_name, dtype_of, encode
from shardstep.comm.process_group import Group
from shardstep.state.dcp_caller import Request, flat_dict

_DEVICE = "shardstep_device"  # a key that no optimizer has


def template(group: Group, wanted: Request, device: torch.device) -> dict[int, dict[str, Any]]:
    """Stand-ins, without memory, for the state that DCP is about to load, by position. DCP replaces them one by one.

    Collective if only rank 0 has the dict.
    """
    described = _describe(wanted.loading or {})
    if wanted.broadcast:
        described = collectives.move_json(group, described, 0, None)
    states: dict[int, dict[str, Any]] = {}
    for position, tree, metas in described:
        tensors = [torch.empty((), dtype=dtype_of(dtype), device=device).expand(shape) for dtype, shape in metas]
        states[position] = decode(tree, tensors)
    if not any(len(shape) for _, _, metas in described for _, shape in metas):
        states.setdefault(0, {})[_DEVICE] = torch.empty(1, device=device)  # DCP asks for the device of any tensor
    return states


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
