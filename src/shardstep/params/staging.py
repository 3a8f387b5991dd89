"""Packing many small pieces into one buffer, and out of it, without Python work per piece."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, compress
from typing import NamedTuple

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors as _unflatten

# On the CPU a staging buffer of at most this size is kept from step to step; larger ones are made anew, to hold no
# memory between. Accelerators have allocators that give the same memory again.
KEPT_BYTES = 4 * 1024 * 1024
# Regions are padded to equal ones (for one native all-gather of equal parts) if that adds at most this much.
_MOST_PADDING = 0.05


class Arrival(NamedTuple):
    """What comes from ranks whose regions lie side by side in the staging buffer."""

    low: int
    high: int
    targets: list[Tensor]
    sizes: list[int]
    flat: bool  # whether all targets are 1D


class Staging:
    """The small pieces of a bucket (with shared memory: all of them), packed into one buffer, rank by rank.

    Packing and unpacking are a few calls each, by sizes: no Python work per piece, and no views of the buffer to keep.
    """

    def __init__(self, packed: Sequence[Sequence[Tensor]], rank: int, even: bool) -> None:
        sizes = [sum(tensor.numel() for tensor in tensors) for tensors in packed]
        self.even = even and max(sizes) * len(sizes) <= sum(sizes) * (1 + _MOST_PADDING)
        lengths = [max(sizes)] * len(sizes) if self.even else sizes
        ends = list(accumulate(lengths))
        self.regions = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        self._sources = list(packed[rank])
        self._flat_sources = _are_flat(self._sources)
        self._mine = self.regions[rank][0], self.regions[rank][0] + sizes[rank]
        self._arrivals = self._expect(packed, rank)
        self._scattered = _Scattered(self._arrivals, self.regions[-1][1]) if len(self._arrivals) > 2 else None
        self._kept: Tensor | None = None

    def _expect(self, packed: Sequence[Sequence[Tensor]], rank: int) -> list[Arrival]:
        """What comes from the other ranks. Without padding between regions that is two: before mine, and after."""
        arrivals: list[Arrival] = []
        for owner, tensors in enumerate(packed):
            if owner == rank or not tensors:
                continue
            low, targets = self.regions[owner][0], list(tensors)
            if arrivals and arrivals[-1].high == low:
                before = arrivals.pop()
                low, targets = before.low, before.targets + targets
            sizes = [target.numel() for target in targets]
            arrivals.append(Arrival(low, low + sum(sizes), targets, sizes, _are_flat(targets)))
        return arrivals

    def own_buffer(self, like: Tensor) -> Tensor:
        """A buffer that no other rank sees. A small one is kept from step to step."""
        if self._kept is not None:
            return self._kept
        with torch.inference_mode(False):  # it may be used again outside of it
            buffer = torch.empty(self.regions[-1][1], dtype=like.dtype, device=like.device)
        if like.device.type == "cpu" and buffer.nbytes <= KEPT_BYTES:
            self._kept = buffer
        return buffer

    def pack(self, buffer: Tensor) -> Tensor:
        """Copy this rank's pieces into the buffer and return it."""
        mine = buffer[slice(*self._mine)]
        with torch.no_grad():
            if self._sources and self._flat_sources:
                torch.cat(self._sources, out=mine)  # several times faster than a foreach copy on the CPU
            elif self._sources:
                torch._foreach_copy_(_unflatten(mine, self._sources), self._sources)
        return buffer

    def unpack(self, buffer: Tensor) -> None:
        """Copy what arrived to the parameters of the other ranks."""
        with torch.no_grad():
            if self._scattered is not None and self._scattered.flat:
                self._scattered.copy_from(buffer)
                return
            for low, high, targets, sizes, flat in self._arrivals:
                if flat:
                    torch.split_with_sizes_copy(buffer[low:high], sizes, out=targets)
                else:
                    torch._foreach_copy_(targets, _unflatten(buffer[low:high], targets))


class _Scattered:
    """Arrivals with gaps between them, as one call: the whole buffer is cut, and the gaps are left out."""

    def __init__(self, arrivals: Sequence[Arrival], length: int) -> None:
        self.flat = all(arrival.flat for arrival in arrivals)
        self._targets = [target for arrival in arrivals for target in arrival.targets]
        self._sizes: list[int] = []
        self._is_wanted: list[bool] = []
        end = 0
        for arrival in arrivals:
            self._sizes += [arrival.low - end, *arrival.sizes]
            self._is_wanted += [False, *(True for _ in arrival.sizes)]
            end = arrival.high
        self._sizes.append(length - end)
        self._is_wanted.append(False)

    def copy_from(self, buffer: Tensor) -> None:
        parts = torch.split_with_sizes(buffer, self._sizes)
        torch._foreach_copy_(self._targets, list(compress(parts, self._is_wanted)))


def _are_flat(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.dim() == 1 for tensor in tensors)
