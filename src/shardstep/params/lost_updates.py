"""How many updates are lost to rounding: counted where the update is made, summed over the ranks at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.params.pieces import span_of
from shardstep.params.sharded_parameters import ShardedParameters


class LostUpdates:
    """What ``count_lost_updates`` found, when its context is left.

    Attributes:
        by_group: for each parameter group, of the elements that were updated in all steps together, the share that did
            not change. With masters: whose master changed and whose 16-bit parameter did not. Without: whose gradient
            was not zero and whose bits did not change.
    """

    by_group: list[float]

    def __init__(self) -> None:
        self.by_group = []


class _Before(NamedTuple):
    """A piece before its update."""

    narrow: Tensor  # a copy of the parameter's elements
    wide: Tensor | None  # a copy of the master, if one is kept


class UpdateCounter:
    """Counts on this rank's pieces. Without reading anything on the host until the end."""

    def __init__(self, sharded: ShardedParameters) -> None:
        self._sharded = sharded
        self._lost: dict[tuple[int, torch.device], Tensor] = {}  # by group and device
        self._updated: dict[int, int] = {}  # elements, by group
        self._before: dict[int, _Before] = {}  # by parameter
        self._has_gradient: dict[int, Tensor] = {}  # of those with a gradient: where it is not zero

    def before(self, positions: Sequence[int]) -> None:
        """These buckets are about to be updated, with the gradients that are on the pieces' tensors."""
        sharded, pieces = self._sharded, self._sharded.pieces
        chosen = set(positions)
        self._before, self._has_gradient = {}, {}
        for index, piece in pieces.pieces.items():
            if piece.bucket in chosen:
                wide = pieces.tensors[index].detach().clone() if sharded.masters.keeps(index) else None
                self._before[index] = _Before(self._narrow(index).clone(), wide)
        self.take_gradients()

    def take_gradients(self) -> None:
        """The gradients on the pieces' tensors are those of the update: at its beginning, and after a closure."""
        self._has_gradient = {}
        for index in self._before:
            gradient = self._sharded.pieces.tensors[index].grad
            if gradient is not None:
                dense = gradient.detach() if gradient.layout is torch.strided else gradient.detach().to_dense()
                self._has_gradient[index] = dense != 0

    def after(self) -> None:
        """They were updated, and rounded."""
        with torch.no_grad():
            for index, has_gradient in self._has_gradient.items():
                narrow, wide = self._before[index]
                tensor = self._sharded.pieces.tensors[index].detach()
                stayed = _bits_equal(narrow, self._narrow(index))
                moved = ~_bits_equal(wide, tensor) if wide is not None else has_gradient
                place = self._sharded.layout.spec_of[index].group, tensor.device
                lost = (stayed & moved.view(stayed.shape)).sum()
                self._lost[place] = self._lost[place] + lost if place in self._lost else lost
                self._updated[place[0]] = self._updated.get(place[0], 0) + tensor.numel()
        self._before, self._has_gradient = {}, {}

    def _narrow(self, index: int) -> Tensor:
        """This rank's piece of the parameter itself."""
        piece = self._sharded.pieces.pieces[index]
        return span_of(self._sharded.params[index], None if piece.whole else slice(piece.start, piece.stop))

    def shares(self) -> list[float]:
        """Collective. By group, the share of updated elements that was lost; 0 if none was updated."""
        count = len(self._sharded.indices)
        lost, updated = [0] * count, [self._updated.get(position, 0) for position in range(count)]
        for (position, _), value in self._lost.items():
            lost[position] += int(value)
        rows = collectives.all_gather_ints(self._sharded.group, lost + updated)
        totals = [sum(column) for column in zip(*rows, strict=True)]
        return [totals[i] / totals[count + i] if totals[count + i] else 0.0 for i in range(count)]


def _bits_equal(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors of one dtype and shape have the same bits, or are the same number."""
    return (a == b) | (a.isnan() & b.isnan())
