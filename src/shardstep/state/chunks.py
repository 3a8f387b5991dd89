"""Tensors as bytes, moved from one rank to another in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.comm.host_copies import on_host
from shardstep.comm.process_group import Group

# A tensor of at least this size travels in chunks of its own, straight from and to its memory.
_LARGE_BYTES = 1024 * 1024


def stream(
    group: Group, spans: Sequence[Tensor], kinds: Sequence[str], source: int, to: int | None, chunk_bytes: int
) -> None:
    """Move byte tensors from one rank to another (or all), at most ``chunk_bytes`` at a time.

    ``kinds``: the types of the devices they are on at their source. What is on a device that the group serves travels
    through that device's backend. The targets are in host memory.
    """
    if source == to or group.world_size == 1:
        return
    for kind in sorted(set(kinds)):
        chosen = [span for span, its_kind in zip(spans, kinds, strict=True) if its_kind == kind]
        if kind != "cpu" and kind in group.backends:
            _move_on_device(group, chosen, kind, source, to, chunk_bytes)
        else:
            _move_on_host(group, chosen, source, to, chunk_bytes)


def _move_on_host(group: Group, spans: Sequence[Tensor], source: int, to: int | None, chunk_bytes: int) -> None:
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


def _move_on_device(
    group: Group, spans: Sequence[Tensor], kind: str, source: int, to: int | None, chunk_bytes: int
) -> None:
    """The recipients bring a chunk to the host while the next one arrives."""
    device = torch.device(kind, torch.get_device_module(kind).current_device())
    sends = group.rank == source

    def travelling() -> Iterator[tuple[list[Tensor], Tensor]]:
        for chunk in chunks([span.numel() for span in spans], chunk_bytes):
            views = [spans[i][low:high] for i, low, high in chunk]
            packed = _packed(views, device) if sends else _empty(views, device)
            collectives.copy_together(group, [packed], source, to)
            yield views, packed

    if sends:
        for _ in travelling():
            pass
    else:
        _unpack(travelling(), chunk_bytes)


def _packed(views: Sequence[Tensor], device: torch.device) -> Tensor:
    moved = [view.to(device) for view in views]
    return moved[0] if len(moved) == 1 else torch.cat(moved)


def _empty(views: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.empty(sum(view.numel() for view in views), dtype=torch.uint8, device=device)


def bring(spans: Sequence[Tensor], targets: Sequence[Tensor], chunk_bytes: int) -> None:
    """Copy byte tensors of this rank, on any device, to others in host memory."""
    sizes = [span.numel() for span in spans]
    parts = ((i, low, high) for chunk in chunks(sizes, chunk_bytes) for i, low, high in chunk)
    _unpack((([targets[i][low:high]], spans[i][low:high]) for i, low, high in parts), chunk_bytes)


def _unpack(chunks_on_device: Iterable[tuple[list[Tensor], Tensor]], chunk_bytes: int) -> None:
    """Copy chunks to the places in host memory that come with them, through pinned memory."""
    for places, chunk in on_host(chunks_on_device, chunk_bytes):
        assert chunk is not None, "none was put in"
        for place, part in zip(places, chunk.split([place.numel() for place in places]), strict=True):
            place.copy_(part)


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
