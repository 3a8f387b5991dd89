"""Tensors sorted for calls over lists, of which one call takes tensors of one device and dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

import torch
from torch import Tensor

_PLAIN = {Tensor, torch.nn.Parameter}
_device = attrgetter("device")
_kind = attrgetter("device", "dtype")
_layout = attrgetter("layout")


def by_kind(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """The places of tensors that go into one call. Sparse ones and subclasses (DTensors) are alone."""
    places = list(range(len(tensors)))
    if not (set(map(type, tensors)) <= _PLAIN and set(map(_layout, tensors)) <= {torch.strided}):
        is_plain = [type(tensor) in _PLAIN and tensor.layout is torch.strided for tensor in tensors]
        yield from ([place] for place in places if not is_plain[place])
        places = [place for place in places if is_plain[place]]
    yield from _grouped(places, list(map(_kind, map(tensors.__getitem__, places))))


def stacked(numbers: Sequence[Tensor], device: torch.device) -> Tensor:
    """0-dim tensors as one tensor on ``device``, in their order: one copy from every device that they are on."""
    if set(map(_device, numbers)) == {device}:
        return torch.stack(list(numbers))
    found: dict[int, Tensor] = {}
    for places in _grouped(range(len(numbers)), list(map(_device, numbers))):
        moved = torch.stack([numbers[place] for place in places]).to(device, non_blocking=device.type != "cpu")
        found.update(zip(places, moved.unbind(), strict=True))
    return torch.stack([found[place] for place in range(len(numbers))])


def _grouped(places: Sequence[int], keys: Sequence[object]) -> Iterable[list[int]]:
    """The places with equal keys, in their order. Passes in C, one for every different key: there are few."""
    return [[place for place, key in zip(places, keys, strict=True) if key == one] for one in dict.fromkeys(keys)]
