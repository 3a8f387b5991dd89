"""Meshes for tests: (replicate, shard), and what all of their ranks must have alike."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardstep import ZeroRedundancyOptimizer

Shape = tuple[int, int]


def mesh_of(shape: Shape) -> DeviceMesh:
    """All ranks, in their order."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def everybodys(tensor: Tensor) -> list[Tensor]:
    """Collective over all ranks: this tensor as each of them has it."""
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor.detach().contiguous())
    return rows


def check_alike(optimizer: ZeroRedundancyOptimizer, shape: Shape) -> None:
    """Parameters are the same bits on all ranks, and the state of a shard on all of its replicas."""
    optimizer.check_replicas()
    coordinates = divmod(dist.get_rank(), shape[1])
    assert (optimizer.rank, optimizer.world_size) == (coordinates[1], shape[1])
    digest = float(sum((position + 1) * _digest(value) for position, value in enumerate(_tensors(optimizer))))
    digests = torch.stack(everybodys(torch.tensor(digest, dtype=torch.float64))).view(shape)
    assert (digests == digests[0]).all(), f"replicas hold different states: {digests.tolist()}"


def _tensors(optimizer: ZeroRedundancyOptimizer) -> list[Tensor]:
    entries = [entry for entry in optimizer.optim.state.values() if isinstance(entry, dict)]
    return [value for entry in entries for value in entry.values() if isinstance(value, Tensor)]


def _digest(tensor: Tensor) -> int:
    words = tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
    return int((words * torch.arange(1, words.numel() + 1)).sum()) % (2**40)
