"""Every mode of the optimizer on one small model, for tests that ask the same of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from shardstep import (
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
    shard_ddp_gradients,
)

MODES = ("default", "views", "lazy", "shard_gradients", "reduce_scatter_hook", "hook", "interleaved", "scattering")
STEP_IN_BACKWARD = ("hook", "interleaved", "scattering")


def train_in(
    mode: str,
    model: nn.Module,
    kind: Callable[..., Any],
    options: dict[str, Any],
    cap_mb: float = 1e-3,
    ddp_cap_mb: float = 1e-3,
    find_unused: bool = False,
) -> Any:
    """The model to call, and its optimizer. ``model`` is on the device already. "ddp" is the plain optimizer.

    Buckets are small, DDP's as well as ours, so that there are several.
    """

    def build(**more: Any) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(model.parameters(), kind, bucket_cap_mb=cap_mb, **more, **options)

    if mode == "shard_gradients":
        return model, build(shard_gradients=True, find_unused_parameters=find_unused)
    ddp = DistributedDataParallel(model, bucket_cap_mb=ddp_cap_mb, find_unused_parameters=find_unused)
    if mode == "ddp":
        return ddp, kind(model.parameters(), **options)
    if mode in ("default", "views", "lazy"):
        optimizer = build(parameters_as_bucket_view=mode == "views", lazy_gather=mode == "lazy")
    elif mode == "reduce_scatter_hook":
        optimizer = build()
        shard_ddp_gradients(ddp, optimizer)
    else:
        optimizer = build(overlap_with_ddp=True)
        inner = reduce_scatter_hook if mode == "scattering" else allreduce_hook
        make = hook_with_zero_step if mode == "hook" else hook_with_zero_step_interleaved
        ddp.register_comm_hook(dist.group.WORLD, make(inner, ddp, optimizer))
    return ddp, optimizer


def clone_weights(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().cpu() for param in model.parameters()]
