"""From what a user passes as ``params`` to groups, specs and facts. The caller's objects are never changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from shardstep.comm.codec import dtype_name
from shardstep.layout.specs import ParamSpec
from shardstep.params.dtensors import check_replicated
from shardstep.params.master_modes import MasterMode, mode_of
from shardstep.params.option_facts import option_texts

Granularity = Literal["auto", "element", "tensor"]
GRANULARITIES = get_args(Granularity)


def normalize(params: Any) -> list[dict[str, Any]]:
    """Every form that torch.optim takes, as a list of new group dicts whose ``params`` are lists.

    An element of a list is a tensor or a (name, tensor) pair.
    """
    if isinstance(params, Tensor):
        raise TypeError(
            "params expects an iterable of Tensors or dicts, but got a single tensor of type "
            f"{torch.typename(params)}. Pass [tensor]."
        )
    _check_ordered(params)
    try:
        items = list(params)
    except TypeError as error:
        raise TypeError(
            f"params expects an iterable of Tensors or dicts, but got {torch.typename(params)}. "
            "Pass model.parameters()."
        ) from error
    if not items:
        raise ValueError(
            "params: the optimizer got an empty parameter list. Pass model.parameters() of a model that has some."
        )
    if all(isinstance(item, dict) for item in items):
        return [normalize_group(item) for item in items]
    if all(isinstance(item, Tensor) for item in items) or all(_is_named(item) for item in items):
        return [normalize_group({"params": items})]
    odd = next(item for item in items if not isinstance(item, type(items[0])) or not _is_element(item))
    raise TypeError(
        "params expects Tensors, or (name, Tensor) pairs, or dicts, all of one kind, but got "
        f"{torch.typename(items[0])} and {torch.typename(odd)}. Pass model.parameters()."
    )


def normalize_group(group: Any) -> dict[str, Any]:
    """A new dict for one group, with ``params`` as a list."""
    if not isinstance(group, dict):
        raise TypeError(f"a parameter group expects a dict but got {torch.typename(group)}. Pass {{'params': [...]}}.")
    if "params" not in group:
        raise ValueError(f"a parameter group expects the key 'params' but got {sorted(map(str, group))}. Add it.")
    group = dict(group)
    params = group["params"]
    _check_ordered(params)
    group["params"] = [params] if isinstance(params, Tensor) else list(params)
    for _, tensor in named(group["params"]):
        if isinstance(tensor, Tensor):  # anything else is refused by torch's own check
            _check_dense(tensor)
    return group


def _check_ordered(params: Any) -> None:
    if isinstance(params, (set, frozenset)):
        raise TypeError(
            "params expects an ordered collection but got a set, whose order differs between ranks. Pass a list."
        )


def _check_dense(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise ValueError(
            "ZeroRedundancyOptimizer only supports using the same dense type for all parameters: expects strided "
            f"tensors but got a tensor with layout {tensor.layout}. Use a dense parameter."
        )
    check_replicated(tensor, "ZeroRedundancyOptimizer")


def named(items: Iterable[Any]) -> list[tuple[str | None, Any]]:
    """Tensors, or (name, tensor) pairs, as pairs."""
    return [item if _is_named(item) else (None, item) for item in items]


def _is_named(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Tensor)


def _is_element(item: Any) -> bool:
    return isinstance(item, (Tensor, dict)) or _is_named(item)


def take_granularity(group: dict[str, Any], default: str) -> str:
    """Remove our own key from a group: it is no option of the optimizer, and state dicts must not carry it."""
    granularity = group.pop("shard", default)
    if granularity not in GRANULARITIES:
        raise ValueError(f"shard expects one of {GRANULARITIES} but got {granularity!r}. Use 'auto' if unsure.")
    return granularity


def refuse_arguments(groups: Sequence[dict[str, Any]], arguments: Sequence[str], first: int = 0) -> None:
    """ValueError if a group has an argument of the optimizer that counts for all groups: it would be ignored.

    ``first``: the position of the first of these groups. (What a group may choose was taken out, and ``rounding_seed``
    is noted in groups.)
    """
    for position, group in enumerate(groups, first):
        for key in (key for key in group if key in arguments and key not in ("params", "rounding_seed")):
            raise ValueError(
                f"parameter group {position} expects options of its optimizer, 'shard' or 'master_weights', but has "
                f"{key!r}, which is the same for all groups. Pass {key} to ZeroRedundancyOptimizer, or build another "
                "one for this group."
            )


def name_empty_groups(groups: Sequence[dict[str, Any]]) -> None:
    """torch wants names in all groups or in none: an empty group beside named ones has an empty list of names."""
    named = any("param_names" in group or any(map(_is_named, group["params"])) for group in groups)
    for group in groups:
        if named and not group["params"]:
            group.setdefault("param_names", [])


def first_floating(params: Iterable[Tensor]) -> Tensor | None:
    """The parameter that stands for its group in a probe."""
    return next((param for param in params if param.is_floating_point() or param.is_complex()), None)


def specs_of(
    groups: Sequence[Mapping[str, Any]],
    granularities: Sequence[str],
    known: Sequence[Tensor],
    modes: Sequence[MasterMode] = (),
) -> dict[int, tuple[ParamSpec, Tensor]]:
    """Specs of the parameters of ``groups`` that are not ``known`` yet, by index over all groups.

    A parameter that is listed twice has one spec, at its first place. ``modes``: what masters each group has.
    """
    found: dict[int, tuple[ParamSpec, Tensor]] = {}
    seen = set(map(id, known))
    slots = device_labels([*known, *(param for group in groups for param in group["params"])])
    index = -1
    for position, (group, granularity) in enumerate(zip(groups, granularities, strict=True)):
        names = group.get("param_names") or [None] * len(group["params"])
        for param, name in zip(group["params"], names, strict=True):
            index += 1
            if id(param) in seen:
                continue
            seen.add(id(param))
            spec = ParamSpec(
                index=index,
                shape=tuple(param.shape),
                numel=param.numel(),
                dtype=dtype_name(param.dtype),
                itemsize=param.element_size(),
                device=slots[param.device],
                trainable=param.requires_grad,
                # Only memory that lies in the order of the elements can be cut into ranges of them.
                granularity=granularity if param.is_contiguous() else "tensor",
                group=position,
                name=name,
                master=mode_of(param.dtype, modes[position]).value if modes else MasterMode.NONE.value,
            )
            found[index] = spec, param
    return found


def check_apart(params: Mapping[int, Tensor]) -> None:
    """ValueError if two parameters lie over the same memory: each would be updated and sent by an owner of its own."""
    spans = sorted(
        (str(param.device), param.data_ptr(), param.data_ptr() + param.nbytes, index)
        for index, param in params.items()
        if param.numel() and param.is_contiguous() and param.device.type != "meta"
    )
    for (device, _, end, first), (other, start, _, second) in pairwise(spans):
        if device == other and start < end:
            raise ValueError(
                f"params expects parameters that do not share memory, but parameters {first} and {second} of shapes "
                f"{tuple(params[first].shape)} and {tuple(params[second].shape)} do. Tie weights by using one "
                "Parameter in both places."
            )


def kind_error(specs: Iterable[ParamSpec], params: Mapping[int, Tensor]) -> RuntimeError | None:
    """What to raise if a parameter has another shape or dtype than its spec says."""
    for spec in specs:
        param = params[spec.index]
        now, then = (tuple(param.shape), dtype_name(param.dtype)), (spec.shape, spec.dtype)
        if now != then:
            return RuntimeError(
                f"{spec.label} expects to stay as it was when the optimizer was built (shape {then[0]}, {then[1]}), "
                f"but it is now (shape {now[0]}, {now[1]}). Convert the model first and build the optimizer "
                "afterwards. (It may be moved to another device at any time.)"
            )
    return None


def device_labels(params: Iterable[Tensor]) -> dict[torch.device, str]:
    """cuda:1 -> "cuda#0": by type and order of appearance, because the numbers differ between ranks."""
    labels: dict[torch.device, str] = {}
    for param in params:
        if param.device not in labels:
            count = sum(1 for device in labels if device.type == param.device.type)
            labels[param.device] = f"{param.device.type}#{count}"
    return labels


def facts_of(groups: Sequence[Mapping[str, Any]], specs: Iterable[ParamSpec]) -> list[tuple[str, dict[str, str]]]:
    """What must be the same on every rank: options per group, then parameters one by one."""
    facts = [
        (f"parameter group {position}", {"parameters": str(len(group["params"])), **option_texts(group)})
        for position, group in enumerate(groups)
    ]
    for spec in specs:
        fields = {
            "shape": str(list(spec.shape)),
            "dtype": spec.dtype,
            "requires_grad": str(spec.trainable),
            "device": spec.device,
            "granularity": spec.granularity,
            "master_weights": spec.master,
        }
        facts.append((f"{spec.label} of group {spec.group}", fields))
    return facts
