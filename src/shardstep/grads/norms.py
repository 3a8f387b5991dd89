"""Norms of gradients that lie on one rank or on many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from shardstep.comm.checked_gather import CheckedGather
from shardstep.grads.kinds import by_kind, stacked

_dtype = attrgetter("dtype")


def norm_over_ranks(
    ranks: CheckedGather, what: str, tensors: Sequence[Tensor], order: float, device: torch.device, wide: torch.dtype
) -> Tensor:
    """The norm of everything that the ranks hold together, added up in ``wide``: 0-dim, the same bits on every rank.

    Collective. A rank may hold nothing. ``what``: what is asked for, the same on every rank.
    """
    norms = ranks.gather(what, local_norm(tensors, order, device, wide))
    return torch.linalg.vector_norm(norms, order)


def local_norm(tensors: Sequence[Tensor], order: float, device: torch.device, wide: torch.dtype) -> Tensor:
    """The norm of these tensors together, 0-dim. (``torch.nn.utils.get_total_norm`` adds half precision up in half.)"""
    if not tensors:
        return torch.zeros((), dtype=wide, device=device)
    return torch.linalg.vector_norm(norms_of(tensors, order, device, wide), order)


def norms_of(tensors: Sequence[Tensor], order: float, device: torch.device, wide: torch.dtype) -> Tensor:
    """The norm of each of these tensors, added up in ``wide``: one call per device and dtype."""
    norms: dict[int, Tensor] = {}
    for places in by_kind(tensors):
        dtype = _wider(tensors[places[0]].dtype, wide)
        if len(places) == 1:
            found = [torch.linalg.vector_norm(tensors[places[0]], order, dtype=dtype)]
        else:
            found = torch._foreach_norm([tensors[place] for place in places], order, dtype)
        norms.update(zip(places, found, strict=True))
    return stacked([norms[place] for place in range(len(tensors))], device).to(wide)


def wide_dtype(params: Iterable[Tensor]) -> torch.dtype:
    """The dtype in which norms are added up: float32 or, if any gradient has it, float64."""
    double = {torch.float64, torch.complex128}.intersection(map(_dtype, params))
    return torch.float64 if double else torch.float32


def _wider(dtype: torch.dtype, wide: torch.dtype) -> torch.dtype:
    return wide.to_complex() if dtype.is_complex else wide
