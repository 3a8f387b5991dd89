"""The masters of one bucket beside the memory of their parameters, in blocks that are worked on one after the other.

A block is as much as a core's cache holds; on an accelerator as much as is worth a launch. Parameters that fill half a
block or more are read and written where they lie. Smaller ones are copied side by side first, many in one call, and
back afterwards. All views are made once, so an update has Python work per block, and none per parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardstep.comm.byte_views import flat_memory

_ON_CPU, _ELSEWHERE = 1 << 17, 1 << 22  # elements
_ALIGNMENT = 64  # elements: blocks begin where kernels like it


class Place(NamedTuple):
    """Where a parameter's elements are among the masters, and in its own memory."""

    start: int
    stop: int
    memory: Tensor  # of the parameter, in any shape


class Run(NamedTuple):
    """A range of the masters: of one parameter, in its own memory, or of several, for which they are copied."""

    start: int
    stop: int
    places: list[Place]
    memory: Tensor | None  # None: they are copied


class Copies(NamedTuple):
    """Small parameters, side by side as their masters are."""

    narrow: Tensor
    sources: list[Tensor]  # what is read: the parameters, and zeros between them
    are_flat: bool  # whether all of these are 1D
    targets: list[Tensor]  # what is written: the parameters
    parts: list[Tensor]  # of ``narrow``, by parameter

    def read(self) -> None:
        sources = self.sources if self.are_flat else [source.reshape(-1) for source in self.sources]
        torch.cat(sources, out=self.narrow)

    def write(self) -> None:
        torch._foreach_copy_(self.targets, self.parts)


class Block(NamedTuple):
    """What is worked on at once."""

    where: slice  # of the bucket's masters
    values: Tensor  # float32
    narrow: Tensor  # the parameters, 16 bits
    kept: Tensor | None  # remainders
    scratch: Tensor | None  # int32


def block_size(device: torch.device) -> int:
    """Elements."""
    return _ON_CPU if device.type == "cpu" else _ELSEWHERE


def runs_of(places: Sequence[Place], device: torch.device, as_they_lie: bool = True) -> list[Run]:
    """Which parameters are worked on where they lie, and which are copied together.

    ``as_they_lie``: the masters lie in the order of the parameters' memory, not in that of their elements.
    """
    runs: list[Run] = []
    for place in places:
        memory = flat_memory(place.memory) if as_they_lie or place.memory.is_contiguous() else None
        if memory is not None:
            place = place._replace(memory=memory)
        if memory is not None and 2 * memory.numel() >= block_size(device):
            runs.append(Run(place.start, place.stop, [place], memory))
        elif runs and runs[-1].memory is None:
            runs[-1] = Run(runs[-1].start, place.stop, [*runs[-1].places, place], None)
        else:
            runs.append(Run(place.start, place.stop, [place], None))
    return runs


def copied_numel(runs: Sequence[Run]) -> int:
    """How many elements the copies of small parameters have."""
    return sum(_aligned(run.stop - run.start) for run in runs if run.memory is None)


class Blocks:
    """The blocks of one bucket, over memory that is lent to it."""

    def __init__(
        self, runs: Sequence[Run], values: Tensor, kept: Tensor | None, narrow: Tensor, scratch: Tensor | None
    ) -> None:
        """``narrow``: for copies, see ``copied_numel``. ``scratch``: int32, a block's worth."""
        self._copies: list[Copies] = []
        self._blocks: list[Block] = []
        filled = 0
        for run in runs:
            memory, count = run.memory, run.stop - run.start
            if memory is None:
                memory = narrow[filled : filled + count]
                self._copies.append(_copies(run, memory))
                filled += _aligned(count)
            for low, high in _cut(count, block_size(values.device)):
                where = slice(run.start + low, run.start + high)
                row = None if scratch is None else scratch[: high - low]
                rest = None if kept is None else kept[where]
                self._blocks.append(Block(where, values[where], memory[low:high], rest, row))

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    @torch.no_grad()
    def read(self) -> None:
        """Have the parameters in the blocks."""
        for copies in self._copies:
            copies.read()

    @torch.no_grad()
    def write(self) -> None:
        """Have the parameters as they are in the blocks."""
        for copies in self._copies:
            copies.write()


def _copies(run: Run, narrow: Tensor) -> Copies:
    sources, targets, parts, end = [], [], [], run.start
    for start, stop, memory in run.places:
        part = narrow[start - run.start : stop - run.start]
        if start > end:
            sources.append(narrow.new_zeros(1).expand(start - end))
        sources.append(memory)
        targets.append(memory)
        parts.append(part.view(memory.shape))
        end = stop
    return Copies(narrow, sources, all(source.dim() == 1 for source in sources), targets, parts)


def _cut(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Ranges of about one size, none above ``size``."""
    step = _aligned(-(-count // -(-count // size))) if count else 1
    return ((low, min(low + step, count)) for low in range(0, count, step))


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
