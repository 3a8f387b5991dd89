"""Tensors sorted for calls over lists, of which one call takes tensors of one device and dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor


def by_kind(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """The places of tensors that go into one call. Sparse ones and subclasses (DTensors) are alone."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
            kinds.setdefault((tensor.device, tensor.dtype), []).append(place)
        else:
            yield [place]
    yield from kinds.values()


def stacked(numbers: Sequence[Tensor], device: torch.device) -> Tensor:
    """0-dim tensors as one tensor on ``device``, in their order: one copy from every device that they are on."""
    if all(number.device == device for number in numbers):
        return torch.stack(list(numbers))
    found: dict[int, Tensor] = {}
    for places in _by_device(numbers):
        moved = torch.stack([numbers[place] for place in places]).to(device, non_blocking=device.type != "cpu")
        found.update(zip(places, moved.unbind(), strict=True))
    return torch.stack([found[place] for place in range(len(numbers))])


def _by_device(numbers: Iterable[Tensor]) -> Iterable[list[int]]:
    places: dict[torch.device, list[int]] = {}
    for place, number in enumerate(numbers):
        places.setdefault(number.device, []).append(place)
    return places.values()
