"""In which order a tensor's dimensions lie in memory. In another order kernels may round differently."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def order_of(tensor: Tensor) -> list[int] | None:
    """The dimensions from the outermost in memory to the innermost; None if that is their own order.

    None also for a tensor with gaps or overlaps in memory: a copy of it has none.
    """
    if tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    return order if tensor.permute(order).is_contiguous() else None


def empty_in_order(
    shape: Sequence[int], order: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """New memory for a tensor of that shape whose dimensions lie in that order."""
    inverse = sorted(range(len(order)), key=lambda position: order[position])
    return torch.empty([shape[dim] for dim in order], dtype=dtype, device=device).permute(inverse)
