"""A saved tensor, read a window at a time: no more than that is in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardstep.checkpoint.open_checkpoint import Checkpoint
from shardstep.checkpoint.storage.torch_file import WINDOW_BYTES
from shardstep.state.shard import shard_of_range, shard_of_whole

_GLANCE = 1024  # elements


def windows_of(checkpoint: Checkpoint, fqn: str, first: int | None = None) -> Iterator[Tensor]:
    """The elements in their order, in flat windows of one buffer. ``first``: so many in the first one."""
    entry = checkpoint.entries[fqn]
    assert isinstance(entry, TensorStorageMetadata)
    shape, dtype = tuple(entry.size), entry.properties.dtype
    count, most = entry.size.numel(), max(WINDOW_BYTES // dtype.itemsize, 1)
    buffer = torch.empty(min(most, count), dtype=dtype)
    start = 0
    while start < count:
        stop = min(start + (first if start == 0 and first else most), count)
        window = buffer[: stop - start]
        whole = start == 0 and stop == count
        shard = shard_of_whole(window.view(shape)) if whole else shard_of_range(shape, start, stop, window)
        checkpoint.read_into({fqn: shard})
        yield window
        start = stop


def have_equal_bits(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Whether two saved 16-bit tensors have the same shape, dtype and bits. If not, a glance at both is enough."""
    entries = checkpoint.entries[one], checkpoint.entries[other]
    if not all(isinstance(entry, TensorStorageMetadata) for entry in entries):
        return False
    kinds = [(tuple(entry.size), entry.properties.dtype) for entry in entries]  # type: ignore[union-attr]
    pairs = zip(windows_of(checkpoint, one, _GLANCE), windows_of(checkpoint, other, _GLANCE), strict=True)
    return kinds[0] == kinds[1] and all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)
