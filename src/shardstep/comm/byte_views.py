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


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def flat_memory(tensor: Tensor) -> Tensor | None:
    """The elements of a dense tensor in the order of its memory, 1D, over the same memory; else None."""
    return tensor.as_strided((tensor.numel(),), (1,)) if is_dense(tensor) else None


def dense_stride(tensor: Tensor) -> tuple[int, ...] | None:
    """The strides of a dense tensor whose dimensions have another order in memory; None for any other tensor.

    In another order kernels may round differently, so a copy of the state has to have it too.
    """
    return tensor.stride() if not tensor.is_contiguous() and is_dense(tensor) else None
