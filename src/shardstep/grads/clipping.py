"""Clipping gradients by their norm, sharded or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardstep.grads.norms import local_norm, norm_over_ranks
from shardstep.grads.shards import GradientShards


def clip(
    params: Sequence[Tensor],
    sharded: GradientShards | None,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    announce: Callable[[float, float], None] = lambda limit, order: None,
) -> Tensor:
    """Scale all gradients if their norm exceeds ``max_norm``; return the norm, the same bits on every rank.

    Without sharding every rank has all gradients, and nothing is sent. Half precision is added up in float32.
    ``announce`` is called before something is sent.
    """
    order, limit = float(norm_type), float(max_norm)
    if not order > 0:
        raise ValueError(f"norm_type expects a number above 0, or inf, but got {norm_type!r}. Use 2.")
    if sharded is None:
        gradients = [param.grad for param in params if param.grad is not None]
    else:
        sharded.bring_in()
        announce(limit, order)
        gradients = sharded.shards()
    like = params[0] if params else torch.zeros(())
    wide = _wide([param.dtype for param in params])
    if sharded is None:
        norm = local_norm(gradients, order, like.device, wide)
    else:
        norm = norm_over_ranks(sharded.reads, "clip_grad_norm_", gradients, order, like.device, wide)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"clip_grad_norm_ expects a finite norm but the norm of order {order:g} of all gradients is {norm.item()}. "
            "Skip this batch, or pass error_if_nonfinite=False."
        )
    # No branch on the value: the host need not wait for an accelerator.
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.detach().mul_(factor.to(gradient.device, gradient.real.dtype))
    return norm


def _wide(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype in which norms are added up: float32 or, if any gradient has it, float64."""
    double = torch.float64 in [dtype.to_real() for dtype in dtypes]
    return torch.float64 if double else torch.float32
