"""Clipping gradients by their norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardstep.grads.kinds import by_kind


def checked_order(norm_type: float, what: str = "norm_type") -> float:
    """ValueError unless there is such a norm. (Those of order 0 and below do not add up over pieces.)"""
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"{what} expects a number above 0, or inf, but got {norm_type!r}. Use 2.")
    return order


def scale(
    gradients: Sequence[Tensor],
    norm: Tensor,
    max_norm: float,
    order: float,
    error_if_nonfinite: bool,
    *,
    wide: bool = False,
) -> None:
    """Scale gradients of this norm so that it is at most ``max_norm``.

    ``wide``: gradients in 16 bits are multiplied in float32 and rounded once; else by a factor of their own dtype.
    """
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"clip_grad_norm_ expects a finite norm but the norm of order {order:g} of all gradients is {norm.item()}. "
            "Skip this batch, or pass error_if_nonfinite=False."
        )
    # No branch on the value: the host need not wait for an accelerator.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for places in by_kind(gradients):
        first, *others = map(Tensor.detach, map(gradients.__getitem__, places))
        dtype = factor.dtype if wide else first.dtype.to_real()
        times = factor.to(first.device, dtype, non_blocking=first.device.type != "cpu")  # the CPU would read too early
        if others:
            torch._foreach_mul_([first, *others], times)
        else:
            first.mul_(times)
