"""Norms of gradients that lie on one rank or on many."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardstep.comm.reads import Reads


def norm_over_ranks(
    reads: Reads, what: str, tensors: Sequence[Tensor], order: float, device: torch.device, wide: torch.dtype
) -> Tensor:
    """The norm of everything that the ranks hold together, added up in ``wide``: 0-dim, the same bits on every rank.

    Collective. A rank may hold nothing. ``what``: what is asked for, the same on every rank.
    """
    norms = reads.gather(what, local_norm(tensors, order, device, wide))
    return torch.linalg.vector_norm(norms, order)


def local_norm(tensors: Sequence[Tensor], order: float, device: torch.device, wide: torch.dtype) -> Tensor:
    """The norm of these tensors together, 0-dim."""
    norms = [torch.linalg.vector_norm(tensor, order, dtype=_wider(tensor.dtype, wide)).to(device) for tensor in tensors]
    if not norms:
        return torch.zeros((), dtype=wide, device=device)
    return torch.linalg.vector_norm(torch.stack([norm.to(wide) for norm in norms]), order)


def _wider(dtype: torch.dtype, wide: torch.dtype) -> torch.dtype:
    return wide.to_complex() if dtype.is_complex else wide
