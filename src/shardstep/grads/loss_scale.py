"""``torch.amp.GradScaler`` and float16 parameters with masters.

``scaler.unscale_`` refuses float16 gradients: divided in float16 they would lose the bits that scaling has saved. So
the optimizer says that its step takes the scale itself (``_step_supports_amp_scaling``, as fused optimizers of torch
do). ``scaler.step(optimizer)`` then looks for infs and passes both on; gradients are divided after they were cast to
float32.

A stepping hook (``ddp_hooks.py``) steps before the scaler is asked, and a scaled loss looks like any other. So that
optimizer says so, too, and its step refuses the scale when it comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardstep.grads.sharded_gradient import ShardedGradient
from shardstep.params.master_modes import MasterMode
from shardstep.params.sharded_parameters import ShardedParameters


def takes_scale(sharded: ShardedParameters) -> bool:
    """Whether steps take the scale: there are float16 parameters with masters."""
    return any(spec.dtype == "float16" and spec.master != MasterMode.NONE.value for spec in sharded.layout.specs)


def is_scaled(optimizer: Any) -> bool:
    """Whether it is a scaler that calls ``step``, of an optimizer that takes the scale."""
    return hasattr(optimizer, "found_inf")


def stepped_already() -> RuntimeError:
    """What to raise if a scaler comes after a step in backward."""
    return RuntimeError(
        "GradScaler expects an optimizer that steps when it is told to, but a DDP hook made the step in backward, with "
        "gradients that were still multiplied by the scale: the parameters are wrong now. Drop overlap_with_ddp, or "
        "the scaler (bfloat16 needs none), and start again."
    )


def must_be_skipped(optimizer: Any) -> bool:
    """Whether the scaler that calls ``step`` has found an inf. It is the same on every rank, as the gradients are.

    The host waits for it, as it does inside of the scaler for optimizers that know nothing of scales.
    """
    found_inf: Tensor | int | None = getattr(optimizer, "found_inf", None)  # 0: there was no gradient to look at
    return found_inf is not None and bool(found_inf)


@contextmanager
def unscaled(optimizer: Any, sharded: ShardedParameters) -> Iterator[None]:
    """Within this context masters get gradients that are divided by the scale of the scaler that calls ``step``."""
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    if scale is None:
        yield
        return
    factor = scale.double().reciprocal().float()
    gradients = [
        (spec, gradient)
        for spec in sharded.layout.specs
        if spec.master == MasterMode.NONE.value and (gradient := sharded.params[spec.index].grad) is not None
    ]
    for spec, gradient in gradients:
        if gradient.dtype == torch.float16 and not isinstance(gradient, ShardedGradient):
            raise ValueError(
                f"a step with a GradScaler expects float16 parameters with masters, but {spec.label} has none, and its "
                "gradient divided in float16 would lose the bits that scaling has saved. Set master_weights for its "
                "group, too."
            )
    with torch.no_grad():
        for _, gradient in gradients:  # what has no master is divided where it is, as the scaler does
            gradient.mul_(factor.to(gradient.device))
    sharded.masters.gradient_factor = factor
    try:
        yield
    finally:
        sharded.masters.gradient_factor = None
