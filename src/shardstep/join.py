"""Uneven inputs (torch's Join): a rank that has run out of batches still owns a share of the optimizer.

It takes part in every step of the others. It has no gradients of its own by then, and stale ones in ``.grad``, so a
rank that is still active lends it the gradients of its pieces, and the options, which a scheduler may have changed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.comm.codec import decode, dtype_name, dtype_of, encode
from shardstep.comm.collectives import Group
from shardstep.layout.specs import Layout
from shardstep.params.local_optimizer import options_of

# What a rank does now: nothing of its own, a step, a round of reductions, clipping, unscaling.
JOINED, STEP, ROUND, CLIP, UNSCALE = range(5)


class Call(NamedTuple):
    """What one rank does now, as whole numbers."""

    kind: int
    epoch: int = 0  # of a round, see rounds.py
    given_up: int = 0
    sent: int = 0
    first: int = 0  # arguments, as the bits of floats
    second: int = 0

    @classmethod
    def of(cls, kind: int, first: float, second: float) -> Call:
        return cls(kind, 0, 0, 0, *struct.unpack("qq", struct.pack("dd", first, second)))

    @property
    def arguments(self) -> tuple[float, float]:
        return struct.unpack("dd", struct.pack("qq", self.first, self.second))  # type: ignore[return-value]


def meet(group: Group, call: Call) -> list[Call]:
    """Collective: call on every rank of the group. What everybody does now, by rank."""
    return [Call(*row) for row in collectives.all_gather_ints(group, call)]


class Lending(tuple):
    """(lender, borrower) pairs of one step: who gives gradients to whom. Empty while nobody has joined."""

    @classmethod
    def among(cls, everyone: Sequence[Call]) -> Lending:
        """Who lends to whom, if this is what the ranks do."""
        lenders = [rank for rank, call in enumerate(everyone) if call.kind != JOINED]
        borrowers = [rank for rank, call in enumerate(everyone) if call.kind == JOINED]
        return cls((lenders[i % len(lenders)], borrower) for i, borrower in enumerate(borrowers) if lenders)


def lend(
    group: Group,
    lending: Lending,
    layout: Layout,
    params: Mapping[int, Tensor],
    groups: Sequence[dict[str, Any]],
    gradients: bool,
) -> dict[int, Tensor] | None:
    """Give or take what the lending says. Return the gradients this rank borrowed, by parameter index; None if none.

    Borrowed options are written into ``groups``. ``gradients``: False if every rank has those of its pieces itself.
    """
    borrowed = None
    for lender, borrower in lending:
        if group.rank == lender:
            _give(group, borrower, layout, params if gradients else {}, groups)
        elif group.rank == borrower:
            borrowed = _take(group, lender, layout, params if gradients else {}, groups)
    return borrowed if gradients else None


def _give(
    group: Group, borrower: int, layout: Layout, params: Mapping[int, Tensor], groups: Sequence[dict[str, Any]]
) -> None:
    pieces = layout.pieces(borrower) if params else []
    has_gradient = [params[piece.param].grad is not None for piece in pieces]
    tensors: list[Tensor] = []

    def lift(tensor: Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    options = [encode(_sendable(group), lift) for group in groups]
    values = [[dtype_name(tensor.dtype), tensor.tolist()] for tensor in tensors]
    message = {"has_gradient": has_gradient, "options": options, "values": values}
    collectives.move_json(group, message, group.rank, borrower)
    for piece, present in zip(pieces, has_gradient, strict=True):
        gradient = params[piece.param].grad
        if present and gradient is not None:
            span = gradient.detach().reshape(-1)[piece.start : piece.stop]
            collectives.move(group, span.contiguous().view(torch.uint8), group.rank, borrower)


def _take(
    group: Group, lender: int, layout: Layout, params: Mapping[int, Tensor], groups: Sequence[dict[str, Any]]
) -> dict[int, Tensor]:
    message = collectives.move_json(group, None, lender, group.rank)
    values = [torch.tensor(value, dtype=dtype_of(dtype)) for dtype, value in message["values"]]
    for own, options in zip(groups, message["options"], strict=True):
        _adopt(own, decode(options, values))
    borrowed = {}
    pieces = layout.pieces(group.rank) if params else []
    for piece, present in zip(pieces, message["has_gradient"], strict=True):
        if present:
            param = params[piece.param]
            span = torch.empty(piece.numel, dtype=param.dtype, device=param.device)
            collectives.move(group, span.view(torch.uint8), lender, group.rank)
            borrowed[piece.param] = span.view(param.shape) if piece.whole else span
    return borrowed


def _sendable(group: dict[str, Any]) -> dict[str, Any]:
    """The options that can differ from step to step: numbers, texts, tensors and lists of them."""
    plain = (bool, int, float, str, Tensor, list, tuple)
    return {key: value for key, value in options_of(group).items() if isinstance(value, plain)}


def _adopt(group: dict[str, Any], options: dict[str, Any]) -> None:
    for key, value in options.items():
        own = group.get(key)
        if isinstance(own, Tensor) and isinstance(value, Tensor):
            own.copy_(value)  # the tensor may be shared with a scheduler or a captured graph
        else:
            group[key] = value


@contextmanager
def borrowed_gradients(tensors: Mapping[int, Tensor], borrowed: Mapping[int, Tensor]) -> Iterator[None]:
    """Within this context the pieces have the borrowed gradients; afterwards their own again."""
    own = {index: tensor.grad for index, tensor in tensors.items()}
    try:
        for index, tensor in tensors.items():
            tensor.grad = borrowed.get(index)
        yield
    finally:
        for index, tensor in tensors.items():
            tensor.grad = own[index]
