"""The optimizers under contract, and what the contract tests share: parameters, gradients, the oracle.

The oracle is plain AdamW over copies of the same parameters with the same gradients. Everything is float64, so that
weights and states are compared bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardstep

# 345 elements: not divisible by 2, and at 3 ranks cut inside the first and the fourth tensor.
SHAPES = ((13, 17), (5,), (3, 7), (97,), ())
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95)}


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{**OPTIONS, **options})


def torch_zero(params: Any, **options: Any) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import, so only where it is needed

    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, **{**OPTIONS, **options})


def sharded(params: Any, **options: Any) -> shardstep.ZeroRedundancyOptimizer:
    return shardstep.ZeroRedundancyOptimizer(params, torch.optim.AdamW, **{**OPTIONS, **options})


def sharded_whole_views(params: Any, **options: Any) -> shardstep.ZeroRedundancyOptimizer:
    return sharded(params, shard="tensor", parameters_as_bucket_view=True, **options)


SUBJECTS = {
    "AdamW": adamw,
    "torch.ZeRO": torch_zero,
    "shardstep": sharded,
    "shardstep-tensor-views": sharded_whole_views,
}


def new_params(shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 7) -> list[torch.nn.Parameter]:
    """The same parameters at every call, on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]


def set_gradients(params: Iterable[Tensor], step: int) -> None:
    """The same gradients on every rank, as DDP leaves them: a function of the step and the position."""
    for position, param in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * step + position)
        param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)


def train(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], steps: Iterable[int]) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def trained_oracle(steps: int, **options: Any) -> tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]:
    params = new_params()
    optimizer = adamw(params, **options)
    train(optimizer, params, range(steps))
    return optimizer, params


def assert_equal(found: Iterable[Tensor], expected: Iterable[Tensor], what: str = "weights") -> None:
    """Bit-equal, tensor by tensor."""
    for position, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.dtype == other.dtype, f"{what} {position}: {one.dtype} instead of {other.dtype}"
        assert torch.equal(one, other), f"{what} {position} differ by {(one - other).abs().max().item()}"


def clones(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def full_state_dict(optimizer: Any, rank: int, world_size: int) -> dict[str, Any]:
    """The full state dict, on every rank."""
    if not hasattr(optimizer, "consolidate_state_dict"):
        return copy.deepcopy(optimizer.state_dict())
    taken: dict[str, Any] = {}
    for recipient in range(world_size):
        optimizer.consolidate_state_dict(to=recipient)
        if rank == recipient:
            taken = copy.deepcopy(optimizer.state_dict())
    return taken


def owned_ranges(optimizer: Any, params: Sequence[Tensor]) -> dict[Tensor, slice]:
    """Which elements of which parameter the optimizer steps on this rank, told by memory alone."""
    local = getattr(optimizer, "optim", optimizer)
    stepped = {tensor.data_ptr(): tensor for group in local.param_groups for tensor in group["params"]}
    ranges = {}
    for param in params:
        begin, size = param.data_ptr(), param.element_size()
        for pointer, tensor in stepped.items():
            if begin <= pointer < begin + param.numel() * size:
                start = (pointer - begin) // size
                ranges[param] = slice(start, start + tensor.numel())
    return ranges


def everybody(value: Any, world_size: int) -> list[Any]:
    """Every rank's value, by rank."""
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value)
    return values
