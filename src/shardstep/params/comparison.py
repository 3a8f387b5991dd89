"""Whether two values are the same, bit for bit, and values as short texts for messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardstep.comm.byte_views import bytes_of
from shardstep.state.subclasses import is_subclass

MISSING = object()  # stands for a value that one side does not have
_SHORT = 60


def equal(a: Any, b: Any) -> bool:
    """Bit-equal, through dicts, lists, tuples and tensors that are made of others.

    Unknown objects count as equal if their types are.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if is_subclass(a) or is_subclass(b):
            return type(a) is type(b) and a.shape == b.shape and equal(_parts(a), _parts(b))
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    known = isinstance(a, (int, float, str, set, frozenset, torch.dtype, torch.device))
    return type(a) is type(b) and (not known or a == b or a != a)


def close(a: Any, b: Any) -> bool:
    """``equal``, but for a few roundings in tensors of floating point numbers."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or is_subclass(a) or is_subclass(b):
        return equal(a, b)
    if a.dtype != b.dtype or a.shape != b.shape or not (a.is_floating_point() or a.is_complex()):
        return equal(a, b)
    few = min(256 * torch.finfo(a.dtype).eps, 1 / 64)
    return torch.allclose(a, b, rtol=few, atol=few, equal_nan=True)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Through dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def leaves(values: Mapping[Any, Any], *above: Any) -> dict[tuple, Any]:
    """What dicts within dicts hold, by the keys on the way there."""
    found: dict[tuple, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= leaves(value, *above, key)
        else:
            found[(*above, key)] = value
    return found


def gap(a: Tensor, b: Tensor) -> float:
    """How far two tensors of one shape are apart."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    return (a.detach().to(wide) - b.detach().to(wide)).abs().max().item()


def difference_of_tensors(a: Sequence[Tensor], b: Sequence[Tensor]) -> str:
    """How far tensors are apart, or nothing."""
    apart = [gap(one, other) for one, other in zip(a, b, strict=True) if not equal(one, other)]
    return f"the parameter differs by up to {max(apart):.2g}" if apart else ""


def unlike(a: dict, b: dict) -> Iterator[tuple[tuple, Any, Any]]:
    """What differs between two dicts that may hold dicts: the keys on the way there, and both values."""
    if equal(a, b):
        return
    one, other = leaves(a), leaves(b)
    for key in one | other:
        left, right = one.get(key, MISSING), other.get(key, MISSING)
        if not equal(left, right):
            yield key, left, right


def path_text(key: tuple) -> str:
    """The keys on the way to a value, as one writes them in Python."""
    first, *rest = key
    return f"{first!r}{''.join(f'[{part!r}]' for part in rest)}"


def short_text(value: Any) -> str:
    """A value in a few words."""
    if value is MISSING:
        return "missing"
    if isinstance(value, Tensor) and (value.numel() != 1 or is_subclass(value)):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    text = repr(value.item() if isinstance(value, Tensor) else value)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."


def _parts(tensor: Tensor) -> tuple[dict[str, Any], Any]:
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(tensor, name) for name in names}, context


def _bits(tensor: Tensor) -> Tensor:
    """As bytes, so that NaN equals NaN."""
    return bytes_of(tensor.detach().reshape(-1).contiguous())
