"""Memory as values: what a layout plans, and what an optimizer holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardstep.layout.specs import Layout
from shardstep.params.tensor_subclasses import is_subclass, opened


class RankPlan(NamedTuple):
    """What one rank owns, according to the layout."""

    rank: int
    elements: int
    trainable_elements: int
    bytes: int


class MemoryReport(NamedTuple):
    """Bytes that this rank holds, measured on its live tensors."""

    parameters: int
    gradients: int
    state: int


def plan(layout: Layout) -> list[RankPlan]:
    """What each rank owns."""
    return [
        RankPlan(
            rank,
            layout.owned_elements(rank),
            layout.owned_elements(rank, trainable_only=True),
            layout.owned_bytes(rank),
        )
        for rank in range(layout.world_size)
    ]


def layout_text(layout: Layout) -> str:
    """The layout in a few lines, for the log."""
    rows = plan(layout)
    elements = sum(row.elements for row in rows)
    mean = elements / layout.world_size
    balance = max(row.elements for row in rows) / mean if mean else 1.0
    lines = [
        f"{len(layout.specs)} parameters, {elements} elements in {len(layout.buckets)} buckets over "
        f"{layout.world_size} ranks, max/mean {balance:.4f}, digest {layout.digest[:12]}"
    ]
    lines += [
        f"  rank {row.rank}: {row.elements} elements ({row.trainable_elements} trainable), {row.bytes} bytes"
        for row in rows
    ]
    lines += [
        f"  bucket {bucket.position}: {len(bucket.params)} parameters, {bucket.numel} elements, "
        f"{bucket.numel * bucket.itemsize} bytes of {bucket.dtype} on {bucket.device}"
        for bucket in layout.buckets
    ]
    return "\n".join(lines)


def measure(params: Iterable[Tensor], state: Mapping[Any, Any], sharded: Sequence[Tensor]) -> MemoryReport:
    """Bytes of distinct memory behind parameters, their gradients, and the state of the local optimizer.

    ``sharded``: gradients that are not on the parameters. (A sharded gradient there has no memory of its own.)
    """
    params = list(params)
    gradients = [param.grad for param in params if type(param.grad) is Tensor]
    gradients += sharded
    return MemoryReport(_bytes(params), _bytes(gradients), _bytes(_tensors(dict(state))))


def _bytes(tensors: Iterable[Tensor]) -> int:
    sizes: dict[tuple[torch.device, int], int] = {}
    for tensor in tensors:
        key = tensor.device, tensor.data_ptr()
        sizes[key] = max(sizes.get(key, 0), tensor.nbytes)
    return sum(sizes.values())


def _tensors(value: Any) -> list[Tensor]:
    if is_subclass(value):  # its own size is that of what it stands for
        value = opened(value)
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
