"""Tensors as bytes, moved from one rank to another in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.comm.process_group import Group

# A tensor of at least this size travels in chunks of its own, straight from and to its memory.
_LARGE_BYTES = 1024 * 1024


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes, 1D, over the same memory if it is contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def stream(group: Group, spans: Sequence[Tensor], source: int, to: int | None, chunk_bytes: int) -> None:
    """Move byte tensors from one rank to another (or all), at most ``chunk_bytes`` at a time."""
    if source == to:
        return
    for chunk in chunks([span.numel() for span in spans], chunk_bytes):
        views = [spans[i][low:high] for i, low, high in chunk]
        if len(views) == 1:
            collectives.move(group, views[0], source, to)
        else:
            _move_together(group, views, source, to)


def _move_together(group: Group, views: Sequence[Tensor], source: int, to: int | None) -> None:
    sizes = [view.numel() for view in views]
    packed = torch.empty(sum(sizes), dtype=torch.uint8)
    if group.rank == source:
        torch.cat([view.cpu() for view in views], out=packed)
    collectives.move(group, packed, source, to)
    if group.rank != source:
        for view, part in zip(views, packed.split(sizes), strict=True):
            view.copy_(part)


def chunks(sizes: Sequence[int], chunk_bytes: int) -> Iterator[list[tuple[int, int, int]]]:
    """Ranges (which, start, stop) of tensors of these sizes, grouped into chunks; both sides compute the same.

    Large tensors are sliced and travel alone; small ones travel together.
    """
    small: list[tuple[int, int, int]] = []
    filled = 0
    for i, size in enumerate(sizes):
        if size >= min(_LARGE_BYTES, chunk_bytes):
            for low in range(0, size, chunk_bytes):
                yield [(i, low, min(low + chunk_bytes, size))]
        elif size > 0:
            if filled + size > chunk_bytes:
                yield small
                small, filled = [], 0
            small.append((i, 0, size))
            filled += size
    if small:
        yield small
