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
