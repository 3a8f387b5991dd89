"""Noticing that parameters have other memory than before. Passes in C: it runs in every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter

import torch
from torch import Tensor

_device = attrgetter("device")


class MemoryWatch:
    """Where parameters lay when they were placed, and when they were last bound."""

    def __init__(self) -> None:
        self._orders: dict[int, tuple[int, ...] | None] = {}  # when they were placed
        self._matrices: list[Tensor] = []  # parameters of which the strides can change
        self._pointers: list[int] = []
        self._devices: list[torch.device] = []
        self._strides: list[tuple[int, ...]] = []

    def place(self, params: Mapping[int, Tensor]) -> None:
        """Remember the order of memory of new parameters."""
        self._orders.update((index, _order_of(param)) for index, param in params.items())

    def forget(self, index: int) -> None:
        self._orders.pop(index)

    def bind(self, params: Iterable[Tensor]) -> None:
        """Remember where the parameters are now."""
        params = list(params)
        self._pointers = list(map(Tensor.data_ptr, params))
        self._devices = list(map(_device, params))
        self._matrices = [param for param in params if param.dim() > 1]
        self._strides = list(map(Tensor.stride, self._matrices))

    def release(self) -> None:
        """Hold on to no parameter: for a copy."""
        self._matrices = []

    def moved(self, params: Iterable[Tensor]) -> bool:
        """Whether one has other memory than at the last ``bind``, or lies otherwise in it."""
        return list(map(Tensor.data_ptr, params)) != self._pointers or (
            list(map(Tensor.stride, self._matrices)) != self._strides
        )

    def changed_device(self, params: Iterable[Tensor]) -> bool:
        """Whether one is on another device than at the last ``bind``."""
        return list(map(_device, params)) != self._devices

    def lies_as_placed(self, params: Mapping[int, Tensor]) -> bool:
        """Whether all lie in memory in the order in which they did when they were placed."""
        if all(map(Tensor.is_contiguous, params.values())) and not any(self._orders.values()):
            return True
        return all(_order_of(param) == self._orders[index] for index, param in params.items())


def _order_of(param: Tensor) -> tuple[int, ...] | None:
    """How the elements of a parameter lie in memory; None: in their own order."""
    if param.is_contiguous():
        return None
    return tuple(stride for stride, size in zip(param.stride(), param.shape, strict=True) if size > 1)
