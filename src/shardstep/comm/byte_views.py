"""Tensors as the bytes that they are made of, which travel and compare alike for every dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes, 1D, over the same memory if it is contiguous."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() < 2:  # contiguous whatever its stride is (``large[::4]``), and there is no view as bytes of others
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def dense_stride(tensor: Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor that is dense in memory, its dimensions in another order; None for any other tensor.

    In another order kernels may round differently, so a copy of the state has to have it too.
    """
    if tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    return tensor.stride() if tensor.permute(order).is_contiguous() else None
