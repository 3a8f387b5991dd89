"""What torch's ``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` ask of an optimizer.

Both call ``optimizer.state_dict()`` without saying what for: the user's options (full or sharded), and the dict that is
about to be loaded, stay in their own variables. There is no hook for a sharded optimizer that is no DTensor, so this
file looks at the caller's variables. If a later torch has them no more, nothing is found and the ordinary contract of
``state_dict`` applies: an error that asks for ``consolidate_state_dict``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.comm.codec import decode, dtype_name, dtype_of, encode
from shardstep.comm.process_group import Group

_MODULE = "torch.distributed.checkpoint.state_dict"
_DEVICE = "shardstep_device"  # a key that no optimizer has
_DEPTH = 24  # how far up the caller may be: decorators lie between


class Request(NamedTuple):
    """What DCP wants of ``state_dict``."""

    full: bool
    offload: bool  # full, and on rank 0 only
    broadcast: bool
    loading: Mapping[str, Any] | None  # the full dict that is to be loaded, if that is what for


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return
        if frame.f_globals.get("__name__") == _MODULE:
            yield frame
        frame = frame.f_back


def request() -> Request | None:
    """What DCP wants, if it is DCP that calls ``state_dict``."""
    getter = loader = None
    for frame in _frames():
        if getter is None and frame.f_code.co_name == "_get_optim_state_dict":
            getter = frame.f_locals.get("info")
        if loader is None and frame.f_code.co_name == "_load_optim_state_dict":
            loader = frame.f_locals
    if getter is None or not hasattr(getter, "full_state_dict"):
        return None
    loading = loader.get("optim_state_dict") if loader is not None else None
    return Request(bool(getter.full_state_dict), bool(getter.cpu_offload), bool(getter.broadcast_from_rank0), loading)


def template(group: Group, wanted: Request, device: torch.device) -> dict[int, dict[str, Any]]:
    """Stand-ins for the state that is to be loaded, by position: DCP replaces them one by one. They have no memory.

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
    """The dict that DCP gives to ``load_state_dict``, with the state that it leaves out, and without our stand-in.

    From a flattened dict it takes only what the optimizer has state for, which is nothing in a new one.
    """
    states = form.get("state") if isinstance(form, Mapping) else None
    if not isinstance(states, Mapping):
        return form
    for key, entry in states.items():
        if isinstance(entry, Mapping) and _DEVICE in entry:
            rest = {name: value for name, value in entry.items() if name != _DEVICE}
            return {**form, "state": {**states, key: rest}}
    flat = next(
        (frame.f_locals.get("state_dict") for frame in _frames() if frame.f_code.co_name == "_load_optim_state_dict"),
        None,
    )
    if not isinstance(flat, Mapping) or not flat or "state" in flat:
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
