"""Norms of gradients that lie on one rank or on many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shardstep.comm.checked_gather import CheckedGather


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
    norms = [torch.linalg.vector_norm(tensor, order, dtype=_wider(tensor.dtype, wide)).to(device) for tensor in tensors]
    if not norms:
        return torch.zeros((), dtype=wide, device=device)
    return torch.linalg.vector_norm(torch.stack([norm.to(wide) for norm in norms]), order)


def wide_dtype(params: Iterable[Tensor]) -> torch.dtype:
    """The dtype in which norms are added up: float32 or, if any gradient has it, float64."""
    double = any(param.dtype.to_real() == torch.float64 for param in params)
    return torch.float64 if double else torch.float32


def _wider(dtype: torch.dtype, wide: torch.dtype) -> torch.dtype:
    return wide.to_complex() if dtype.is_complex else wide
