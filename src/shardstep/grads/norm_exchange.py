"""The norms of all sharded gradients of an optimizer, exchanged at once.

torch's clipping asks every ``param.grad`` for its norm, one after the other. The first one that is asked for brings all
of them, in one collective; they hold until the gradients change.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from shardstep.comm.checked_gather import CheckedGather
from shardstep.grads.norms import norms_of
from shardstep.layout.specs import Layout

Local = Callable[[int], Tensor | None]  # this rank's piece of a parameter's gradient, if it has one


class NormExchange:
    """The norms of whole gradients, by parameter."""

    def __init__(self, ranks: CheckedGather) -> None:
        self._ranks = ranks
        self._state: Hashable = None  # of the gradients, when they were exchanged
        self._norms: dict[tuple[float, torch.dtype], Tensor] = {}  # by order and dtype: of all parameters
        self._layout: Layout | None = None
        self._longest = 0  # how many pieces the rank with the most of them has
        self._mine: list[int] = []  # the parameters of this rank's pieces
        self._line_of: dict[int, int] = {}  # of the table, by parameter
        self._table = torch.empty(0, dtype=torch.int64)  # where in all ranks' rows the norms of its pieces are

    def known(self, state: Hashable, index: int, order: float, wide: torch.dtype) -> Tensor | None:
        """The norm of one parameter's gradient, 0-dim; None if it has to be exchanged first."""
        norms = self._norms.get((order, wide)) if state == self._state else None
        return None if norms is None else norms[self._line_of[index]]

    def exchange(self, what: str, state: Hashable, layout: Layout, local: Local, order: float, like: Tensor) -> None:
        """Collective. Make all norms of this order known, added up in the dtype of ``like``, on its device.

        They have the same bits on every rank. ``what``: what is asked for, the same on every rank. ``state``: of the
        gradients; when it is another one, nothing is known any more.
        """
        if state != self._state:
            self._state, self._norms = state, {}
        if layout is not self._layout:
            self._plan(layout)
        if self._table.device != like.device:
            self._table = self._table.to(like.device)
        rows = self._ranks.gather_rows(what, self._row(local, order, like))
        parts = torch.cat([rows.reshape(-1), rows.new_zeros(1)])  # the zero: for what has fewer pieces than others
        self._norms[order, like.dtype] = torch.linalg.vector_norm(parts[self._table], order, dim=1)

    def _row(self, local: Local, order: float, like: Tensor) -> Tensor:
        """The norms of this rank's pieces, in the order of the layout."""
        gradients = [local(index) for index in self._mine]
        there = [gradient for gradient in gradients if gradient is not None]
        row = like.new_zeros(self._longest)
        if not there:
            return row
        norms = norms_of(there, order, like.device, like.dtype)
        if len(there) == len(gradients):
            return torch.cat([norms, row[len(gradients) :]])
        found = iter(norms.unbind())
        values = [row[0] if gradient is None else next(found) for gradient in gradients]  # (it is zero)
        return torch.cat([torch.stack(values), row[len(values) :]])

    def _plan(self, layout: Layout) -> None:
        """Read off the layout what every rank's row holds."""
        owned = [layout.pieces(rank) for rank in range(layout.world_size)]
        self._mine = [piece.param for piece in owned[self._ranks.rank]]
        self._longest = max(1, *map(len, owned))
        places: dict[int, list[int]] = {spec.index: [] for spec in layout.specs}
        for rank, pieces in enumerate(owned):
            for slot, piece in enumerate(pieces):
                places[piece.param].append(rank * self._longest + slot)
        width, nothing = max(map(len, places.values()), default=0), layout.world_size * self._longest
        padded = [place + [nothing] * (width - len(place)) for place in places.values()]
        self._table = torch.tensor(padded, dtype=torch.int64).view(len(places), width)
        self._line_of = {index: line for line, index in enumerate(places)}
        self._layout = layout
